"""Stores that an earlier version wrote: they open, are whole, and predict bit for bit; unfinished runs go on, or say no.

tests/kept/ has them, as `tools/keep_stores.py` made them. A test that fails here means that stores which users have are not
read as they were: change the code, not what is kept.
"""

from __future__ import annotations

import json
import platform
import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from helpers.tools import load_tool

import xmc_stream as xs
from xmc_stream.errors import ResumeError
from xmc_stream.methods import registry
from xmc_stream.models.model import KINDS

FOLDER = Path(__file__).parent / "kept"
ARCHIVES = {archive.name.removesuffix(".tar.gz"): archive for archive in sorted(FOLDER.glob("*.tar.gz"))}
HOW = "give it a line in tools/keep_stores.py, run that with its name, and commit what it makes in tests/kept/"
MOST, MOST_OF_ALL = 30_000, 500_000  # bytes of an archive, and of all
tool = load_tool("keep_stores")


def about(name: str) -> dict[str, Any]:
    """What is kept of a store."""
    with tarfile.open(ARCHIVES[name]) as tar:
        file = tar.extractfile("kept.json")
        assert file is not None
        found: dict[str, Any] = json.load(file)
        return {**found, "members": tar.getnames(), "unfinished": f"{found['store']}.partial" in tar.getnames()}


ABOUT = {name: about(name) for name in ARCHIVES}
FINISHED = [name for name in ABOUT if not ABOUT[name]["unfinished"]]
MODELS = [name for name in FINISHED if ABOUT[name]["facts"]["kind"] == "model"]
UNFINISHED = [name for name in ABOUT if ABOUT[name]["unfinished"]]


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Unpacks an archive into the current folder; returns the path of the store."""

    def unpacked(name: str) -> Path:
        monkeypatch.chdir(tmp_path)
        with tarfile.open(ARCHIVES[name]) as tar:
            tar.extractall(filter="data")
        return tmp_path / ABOUT[name]["store"]

    return unpacked


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What last bits may depend on, of this machine."""
    X = sp.csr_matrix(np.eye(3, dtype=np.float32))
    model = xs.PPDSparse(max_rounds=1, memory_limit="2GB").fit(X, X).model_
    found: dict[str, str] = model.attributes["identity"]["environment"]
    return found


def test_every_method_and_kind_of_model_is_kept() -> None:
    words = [ABOUT[name]["words"] for name in MODELS]
    methods = {of[of.index("--solver") + 1] if "--solver" in of else "ppdsparse" for of in words}
    for method in registry.names():
        assert method in methods, f"no model of {method} is kept: {HOW}"
    for kind in KINDS:
        assert kind in {ABOUT[name]["facts"]["kind_of_model"] for name in MODELS}, f"no {kind} model is kept: {HOW}"


def test_every_form_of_a_store_is_kept() -> None:
    forms = {
        "X/columns", "observed", "names/features", "names/labels", "row_ids", "selected_features", "vectorizer",
        "guide", "implied", "factors", "units/00000", "units/00000-00002", "units/rows",
    }  # fmt: skip
    there = {member.partition("/")[2] for name in FINISHED for member in ABOUT[name]["members"]}
    assert forms - there == set()
    assert {ABOUT[name]["facts"]["calibrated"] for name in MODELS} == {False, True}


def test_what_is_kept_is_small() -> None:
    sizes = {name: archive.stat().st_size for name, archive in ARCHIVES.items()}
    assert max(sizes.values()) <= MOST
    assert sum(sizes.values()) <= MOST_OF_ALL
    assert {kept.name for kept in (*tool.KEPT, *tool.UNFINISHED)} <= set(sizes), f"something is not kept: {HOW}"


@pytest.mark.parametrize("name", FINISHED)
def test_a_store_is_whole_and_what_it_was(name: str, unpack: Callable[[str], Path]) -> None:
    store, facts = unpack(name), ABOUT[name]["facts"]
    report = xs.verify(store, memory_limit="2GB")
    assert (report["kind"], report["damage"]) == (facts["kind"], [])
    assert tool.facts(store, ABOUT[name]["beside"]) == facts


@pytest.mark.parametrize("name", MODELS)
def test_a_model_predicts_what_it_did(name: str, unpack: Callable[[str], Path], environment: dict[str, str]) -> None:
    model, kept = xs.load_model(unpack(name)), np.load("predicted.npz")
    source = Path(ABOUT[name]["beside"] or "rows.npz")
    rows = tool.texts_of(source) if source.suffix == ".jsonl" else sp.load_npz(source)
    check = same(kept["labels"], kept["scores"], model.kind != "low-rank" or one_blas(ABOUT[name], environment))
    check(*model.predict_topk(rows, k=tool.TOP, memory_limit="2GB"))
    if "selected_features" not in model.attributes:  # else data must be selected by the same model
        data = xs.convert(source, "rows.xmc", like=model, unlabelled=True, memory_limit="2GB")
        xs.predict(model, data, "p.zarr", k=tool.TOP, memory_limit="2GB")
        check(*(np.asarray(zarr.open_array(f"p.zarr/{part}", mode="r")[...]) for part in ("labels", "scores")))


def one_blas(kept: dict[str, Any], now: dict[str, str]) -> bool:
    """Whether BLAS, by which low-rank models score, adds in the order in which it did: see docs/design/determinism.md."""
    return all(kept["environment"][part] == now[part] for part in ("processor", "numpy"))


def same(labels: Any, scores: Any, bits: bool) -> Callable[[Any, Any], None]:
    """Compares predictions with those that were kept, bit for bit or nearly."""

    def check(found: Any, found_scores: Any) -> None:
        np.testing.assert_array_equal(found, labels)
        assert found_scores.dtype == scores.dtype == np.float32
        if bits:
            np.testing.assert_array_equal(found_scores.view(np.uint32), scores.view(np.uint32))
        else:
            np.testing.assert_allclose(found_scores, scores, rtol=0, atol=1e-5 * np.abs(scores).max())

    return check


def test_predictions_are_those_that_were_written(unpack: Callable[[str], Path]) -> None:
    store = unpack("predictions")
    labels = np.asarray(zarr.open_array(store / "labels", mode="r")[...])
    assert labels.shape == (80, 5)
    report = xs.evaluate(store, xs.open_dataset("more.xmc"), memory_limit="2GB")
    assert report["P@1"] == ABOUT["predictions"]["facts"]["metrics"]["P@1"] > 50


@pytest.mark.soak
@pytest.mark.slow
def test_the_tool_keeps_what_the_tests_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", platform.node)  # which the tool changes
    monkeypatch.setattr(tool, "PLACE", tmp_path / "place")
    tool.main(["compact", "predictions", "--into", str(tmp_path)], standalone_mode=False)
    for name in ("compact", "predictions"):
        with tarfile.open(tmp_path / f"{name}.tar.gz") as tar:
            assert set(ABOUT[name]["members"]) == set(tar.getnames())


def files(folder: Path) -> dict[str, bytes]:
    """All that stands in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(work: Path, change: Callable[[str], str]) -> None:
    """Change the text of each line of a run's ledger; checksums are made anew."""
    [ledger] = work.glob("ledger*")
    lines = [change(line.rpartition(b"\t")[0].decode()).encode() for line in ledger.read_bytes().splitlines()]
    ledger.write_bytes(b"".join(line + b"\t%08x\n" % zlib.crc32(line) for line in lines))


def tried(words: list[str], work: Path) -> tuple[dict[str, Any], str]:
    """What a command says that goes on; or the one line in which it ends, with all that was done as it was."""
    before = files(work)
    try:
        return tool.run(words), ""
    except ResumeError as error:
        assert files(work) == before
        [line] = error.in_shell.splitlines()
        return {}, line


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_run_goes_on_or_says_to_begin_anew(
    name: str, unpack: Callable[[str], Path], environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store, kept = unpack(name), ABOUT[name]
    work = store.with_name(f"{store.name}.partial")
    if kept["words"][0] == "convert":  # it knows its input, and what it made of it, by their paths
        rewrite(work, lambda line: line.replace(str(tool.PLACE), str(store.parent)))
    told, line = tried(kept["words"], work)
    if line:
        assert kept["environment"] != environment or "begin anew by --overwrite" in line
        told = tool.run([*kept["words"], "--overwrite" if "--overwrite" in line else "--force"])
    assert told["resumed"] or "--overwrite" in line
    assert "made again" not in caplog.text  # which is said of what is damaged, or not understood
    assert not work.exists()
    assert xs.verify(store, memory_limit="2GB")["sound"]
    facts = tool.facts(store, kept["beside"])
    if kept["environment"] == environment:
        assert facts == kept["facts"]
    else:  # what was learned may be rounded otherwise
        assert facts["sizes"][:2] == kept["facts"]["sizes"][:2]


def test_a_run_in_another_format_is_refused_and_stays_as_it_is(unpack: Callable[[str], Path]) -> None:
    store, words = unpack("unfinished-ppdsparse"), ABOUT["unfinished-ppdsparse"]["words"]
    work = store.with_name(f"{store.name}.partial")
    # with other packages too: --force, which is for these, does not help here, so no line may name it
    rewrite(work, lambda line: re.sub(r'"format":\d+', '"format":1', line.replace('"numpy":"', '"numpy":"0.')))
    for more in ([], ["--force"]):
        assert tried([*words, *more], work)[1].endswith("begin anew by --overwrite")
    assert not tool.run([*words, "--overwrite"])["resumed"]
    assert xs.load_model(store).digest()
