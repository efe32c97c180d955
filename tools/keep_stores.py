"""Keep a small store of each kind, as this version writes it, in tests/kept/: versions that follow must read it.

    python tools/keep_stores.py                  # all of them; what is there is replaced
    python tools/keep_stores.py leml words       # these
    python tools/keep_stores.py --into FOLDER    # elsewhere, to compare kept.json of two versions

Run it by hand once a release, with the version that is released, and commit what it made. tests/test_kept.py opens every
archive that is there. One of an earlier release may stay beside the new one under another name.

Do not run it because that test fails: then stores that users have are not read as they were, which a release must say. A
new kind of store, or a new method, gets a line in KEPT.

All is made in /tmp/kept: unfinished work has whole paths of its files. Logs name the host: it is called "kept".
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import xmc_stream as xs
from xmc_stream.cli import main as xmc_stream

TARGET = Path(__file__).resolve().parent.parent / "tests" / "kept"
PLACE = Path("/tmp/kept")
N, D, K, TOP = 240, 40, 12, 5
TIME = 10**9  # of all files: a conversion that goes on knows its input by it
TEXT = "--text-field text --label-field label --id-field id"


@dataclass(frozen=True)
class Kept:
    """A store, called name, and the command that makes it.

    beside: a file that is kept with it: of a dataset an input that is converted like it, of a model texts to predict for, of
    predictions the truth. after: the command is killed when this job stands in the ledger, so that the store is unfinished.
    """

    name: str
    command: str
    beside: str = ""
    after: str = ""

    @property
    def words(self) -> list[str]:
        """Of the command."""
        return [*shlex.split(self.command), "--memory-limit", "2GB"]

    @property
    def store(self) -> str:
        """What it makes."""
        return next(word for word in self.words if word in [f"{self.name}.{kind}" for kind in ("xmc", "model", "zarr")])


TRAIN = "train normalized.xmc"
NEW, TEXTS = "more.txt", "new.jsonl"
KEPT = (
    Kept("plain", "convert rows.txt plain.xmc", NEW),
    Kept("normalized", "convert rows.txt normalized.xmc --normalize l2 --columns", NEW),
    Kept("masked", "convert rows.txt masked.xmc --normalize l2 --observed pairs.txt"),
    Kept("dense", "convert dense.npy dense.xmc --labels classes.npy"),
    Kept("words", f"convert texts.jsonl words.xmc {TEXT}", TEXTS),
    Kept("hashed", f"convert texts.jsonl hashed.xmc --hash-features 64 {TEXT}", TEXTS),
    Kept("beside", f"convert texts.jsonl beside.xmc --beside vectors.npy {TEXT}"),
    Kept("many-labels", "convert many.txt many-labels.xmc"),
    Kept("appended", "append plain.xmc more.xmc appended.xmc"),
    Kept("split", "split plain.xmc split.xmc held.xmc --fraction 0.2"),
    Kept("selected", "select-features plain.xmc selected.xmc --features ids.txt"),
    Kept("ppdsparse", f"{TRAIN} ppdsparse.model"),
    Kept("dismec", f"{TRAIN} dismec.model --solver dismec"),
    Kept("groups", f"{TRAIN} groups.model --set guide=2"),
    Kept("implied", f"{TRAIN} implied.model --set implied=0.1"),
    Kept("float16", f"{TRAIN} float16.model --set weight_type=float16"),
    Kept("wide-units", "train many-labels.xmc wide-units.model"),
    Kept("calibrated", "train uneven.xmc calibrated.model --set class_weight=balanced --calibrate 0.5"),
    Kept("of-words", "train words.xmc of-words.model", TEXTS),
    Kept("of-selected", "train selected.xmc of-selected.model"),
    Kept("pdsparse", f"{TRAIN} pdsparse.model --solver pdsparse --set max_passes=4"),
    Kept("leml", f"{TRAIN} leml.model --solver leml --set rank=4 --set alternations=3"),
    Kept(
        "leml-logistic", f"{TRAIN} leml-logistic.model --solver leml --set rank=4 --set loss=logistic --set bias=true"
    ),
    Kept("cplst", f"{TRAIN} cplst.model --solver cplst --set rank=4"),
    Kept("group-lasso", f"{TRAIN} group-lasso.model --solver group-lasso --set loss=multitask --set lam=0.02"),
    Kept("compact", "compact group-lasso.model compact.model"),
    Kept("memoir", f"{TRAIN} memoir.model --solver memoir --set steps=20"),
    Kept("memoir-lsh", f"{TRAIN} memoir-lsh.model --solver memoir --set variant=lsh --set rank=4 --set steps=20"),
    Kept("tree", f"{TRAIN} tree.model --solver tree --set max_leaf=4 --set root=2 --set branching=2"),
    Kept("parabel", f"{TRAIN} parabel.model --solver parabel --set max_leaf=4"),
    Kept("bonsai", f"{TRAIN} bonsai.model --solver bonsai"),
    Kept("xr-linear", f"{TRAIN} xr-linear.model --solver xr-linear --set max_leaf=4"),
    Kept("predictions", "predict ppdsparse.model more.xmc predictions.zarr", "more.xmc"),
)
AFTER = {
    "ppdsparse": "search/1/", "pdsparse": "pass/0/1/", "leml": "h/1", "cplst": "h/1", "group-lasso": "segment/0/0",
    "memoir": "steps/3", "memoir-lsh": "reduce/1/turn",
}  # fmt: skip
UNFINISHED = (
    Kept("unfinished", "convert rows.txt unfinished.xmc", "rows.txt", after="write/Y/indices"),
    *(
        Kept(f"unfinished-{name}", kept.command.replace("normalized.xmc ", "small.xmc unfinished-"), after=AFTER[name])
        for kept in KEPT
        if (name := kept.name) in AFTER
    ),
)


def make_inputs() -> None:
    """Rows that can be learned, as text and arrays, texts, and lists of pairs and of features."""
    rng = np.random.default_rng(0)
    labels = (rng.random((N, K)) < 0.06) | (rng.integers(0, K, (N, 1)) == np.arange(K))
    labels[:, -1] |= labels[:, :3].any(axis=1)  # which these imply
    X = (labels @ np.eye(K, D) + (rng.random((N, D)) < 0.1) * rng.random((N, D))).round(2)
    for name, n, n_labels in (("rows", N, K), ("more", 80, K), ("many", 100, 2500)):
        write_rows(name, X[:n], labels[:n], n_labels)
    often = 1 / np.arange(1, K + 1) ** 1.5
    uneven = (rng.choice(K, (N, 1), p=often / often.sum()) == np.arange(K)) | (rng.random((N, K)) < 0.2 * often)
    seldom = uneven @ np.eye(K, D) * (rng.random((N, D)) < 0.4) + (rng.random((N, D)) < 0.2) * rng.random((N, D))
    write_rows("uneven", seldom.round(2), uneven, K)
    texts = [
        json.dumps({"id": f"row {i}", "text": f"w{i % 9} w{i % 7} w{i % 7} v{i}", "label": [f"label {i % 5}"]}) + "\n"
        for i in range(60)
    ]
    Path("texts.jsonl").write_text("".join(texts))
    Path("new.jsonl").write_text("".join(texts[::7]))
    np.save("vectors.npy", rng.random((60, 3)).round(2).astype(np.float32))
    np.save("dense.npy", X[:60, :10].astype(np.float32))
    np.save("classes.npy", np.array([f"class {i % 4}" for i in range(60)]))
    Path("pairs.txt").write_text("".join(f"{i} {j}\n" for i, j in np.argwhere(rng.random((N, K)) < 0.5)))
    Path("ids.txt").write_text("".join(f"{j}\n" for j in range(0, D, 3)))
    for file in Path().iterdir():
        os.utime(file, (TIME, TIME))
    for words in ("more.txt more.xmc", "more.txt small.xmc --normalize l2", "uneven.txt uneven.xmc --normalize l2"):
        run(f"convert {words} --memory-limit 2GB".split())


def write_rows(name: str, X: NDArray[Any], labels: NDArray[Any], n_labels: int) -> None:
    """XMLRepo text. n_labels: how many there are; those of the rows are spread over them."""
    lines = (
        ",".join(map(str, np.flatnonzero(mine) * (n_labels // K)))
        + "".join(f" {j}:{x[j]:g}" for j in np.flatnonzero(x))
        for mine, x in zip(labels, X, strict=True)
    )
    Path(f"{name}.txt").write_text("\n".join([f"{len(X)} {D} {n_labels}", *lines, ""]))


def run(words: list[str]) -> dict[str, Any]:
    """What a command says of what it made."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        xmc_stream.commands[words[0]].main([*words[1:], "--json"], standalone_mode=False)
    told: dict[str, Any] = json.loads(said.getvalue())
    return told


def run_and_die(words: list[str], work: str, after: str) -> None:
    """Run a command in this process, which is killed when the job is durable."""
    name_host()
    make_durable = os.fsync

    def fsync(fd: Any) -> None:
        make_durable(fd)
        if any(f'"key":"{after}' in ledger.read_text(errors="replace") for ledger in Path(work).glob("ledger*")):
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    run(words)


def name_host() -> None:
    """Have logs name no host of ours."""
    platform.node = lambda: "kept"


def content(dataset: Path) -> str:
    """A hash of X and Y as they are read: of scipy's matrices that are exported."""
    with contextlib.chdir(dataset.parent):
        run(["export", dataset.name, "exported.npz", "--overwrite"])
        found = hashlib.sha256()
        for name in ("exported.npz", "exported-labels.npz"):
            matrix = sp.csr_matrix(sp.load_npz(name))
            for part, kind in (
                (matrix.shape, "i8"),
                (matrix.indptr, "i8"),
                (matrix.indices, "i8"),
                (matrix.data, "f4"),
            ):
                found.update(np.asarray(part, f"<{kind}").tobytes())
            Path(name).unlink()
    return found.hexdigest()


def names(store: Any) -> dict[str, list[str] | None]:
    """Names of features and labels, and ids of rows, as far as a store has them."""
    some = {"features": store.feature_names(), "labels": store.label_names()}
    if hasattr(store, "row_ids"):
        some["rows"] = store.row_ids()
    sizes = {"features": store.n_features, "labels": store.n_labels, "rows": getattr(store, "n_samples", 0)}
    return {
        kind: found if found is None else [str(n) for n in found.read(0, sizes[kind])] for kind, found in some.items()
    }


def texts_of(file: Path) -> list[str]:
    """What stands in a file of raw text."""
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def rows_for(model: xs.Model) -> sp.csr_matrix:
    """Rows to predict for, of as many features as the model has."""
    rng = np.random.default_rng(1)
    X: Any = sp.random(25, D, 0.2, "csr", np.float32, rng)
    X = X + sp.csr_matrix(np.eye(25, D, k=-3, dtype=np.float32))
    return sp.csr_matrix(X[:, : model.n_features], dtype=np.float32)


def facts(store: Path, beside: str) -> dict[str, Any]:
    """What must be the same of a store in every version, as JSON. beside: see `Kept`."""
    told = run(["info", str(store), "--digest"])
    found = {name: told.get(name) for name in ("kind", "digest", "arrays_digest")}
    if told["kind"] == "dataset":
        dataset = xs.open_dataset(store)
        found |= {"sizes": [dataset.n_samples, dataset.n_features, dataset.n_labels], "names": names(dataset)}
        found |= {"content": content(store)}
        if beside:
            run(["convert", beside, str(store.with_name("liked.xmc")), "--like", str(store), "--overwrite"])
            found |= {"like": content(store.with_name("liked.xmc"))}
    elif told["kind"] == "model":
        model = xs.load_model(store)
        found |= {"kind_of_model": model.kind, "sizes": [*model.shape, model.nnz], "names": names(model)}
        found |= {"calibrated": model.calibrated, "decision": repr(model.decision)}
    else:
        metrics = xs.evaluate(store, store.with_name(beside), memory_limit="2GB")
        found |= {"metrics": {name: metrics[name] for name in ("P@1", "P@3", "P@5")}}
    as_json: dict[str, Any] = json.loads(json.dumps(found))
    return as_json


def keep(kept: Kept, environment: dict[str, str], into: Path) -> Path:
    """Pack what was made, and what is true of it."""
    store, files = Path(kept.store), [kept.store, *filter(None, [kept.beside])]
    about: dict[str, Any] = {
        "store": kept.store,
        "words": kept.words,
        "beside": kept.beside,
        "environment": environment,
    }
    if kept.after:
        files[0] = f"{kept.store}.partial"
        dying = multiprocessing.get_context("spawn").Process(
            target=run_and_die, args=(kept.words, *files[:1], kept.after)
        )
        dying.start()
        dying.join()
        if dying.exitcode != -signal.SIGKILL or store.exists():
            raise click.ClickException(f"{kept.name} was not killed after {kept.after}: name another job")
        shutil.rmtree(Path(files[0], "scratch"), ignore_errors=True)  # which no run trusts
        shutil.move(files[0], "begun")  # what follows is the run that nobody killed
        run(kept.words)
        files += kept.words[1:2] if kept.words[0] == "train" else []
    about["facts"] = facts(store, kept.beside)
    if about["facts"]["kind"] == "model" and not kept.after:
        model = xs.load_model(store)
        rows: Any = texts_of(Path(kept.beside)) if kept.beside else rows_for(model)
        if not kept.beside:
            sp.save_npz("rows.npz", rows)
            files.append("rows.npz")
        labels, scores = model.predict_topk(rows, k=TOP, memory_limit="2GB")
        np.savez("predicted.npz", labels=labels, scores=scores)
        files.append("predicted.npz")
    if kept.after:
        shutil.rmtree(store)
        shutil.move("begun", files[0])
    Path("kept.json").write_text(json.dumps(about, indent=1))
    archive = into / f"{kept.name}.tar.gz"
    pack(archive, ["kept.json", *files])
    return archive


def refuse_what_is_private(names: list[str]) -> None:
    """Raise ClickException where a description or a log names this host, or a folder of whoever runs this."""
    words = "|".join(map(re.escape, (socket.gethostname(), str(Path.home()), str(TARGET.parent.parent))))
    for file in (file for name in names for file in (Path(name), *Path(name).rglob("*"))):
        if file.suffix in (".json", ".jsonl") or file.name == "ledger":
            found = re.search(rf"(?<!\w)({words})(?!\w)", file.read_text())
            if found:
                raise click.ClickException(f"{file} names {found[0]}: have it written without")


def pack(archive: Path, files: list[str]) -> None:
    """Files and folders as an archive that has nothing of this machine, nor of today."""

    def neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.uname, member.gname, member.mtime = 0, 0, "", "", TIME
        return member

    refuse_what_is_private(files)
    with gzip.GzipFile(archive, "wb", 9, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in files:
            tar.add(name, filter=neutral)


@click.command()
@click.argument("chosen", nargs=-1, metavar="NAME...")
@click.option("--into", type=click.Path(path_type=Path), default=TARGET, help="The folder. [default: tests/kept]")
def main(chosen: tuple[str, ...], into: Path) -> None:
    """Keep stores of all kinds, or those that are named."""
    every = {kept.name: kept for kept in (*KEPT, *UNFINISHED)}
    if unknown := [name for name in chosen if name not in every]:
        raise click.UsageError(f"nothing is called {', '.join(unknown)}: there are {', '.join(every)}")
    name_host()
    into = into.absolute()
    into.mkdir(exist_ok=True)
    if PLACE.exists():
        raise click.ClickException(f"{PLACE} is there already: see whose it is, and remove it")
    PLACE.mkdir()
    try:
        with contextlib.chdir(PLACE):
            make_inputs()
            for kept in KEPT:
                run(kept.words)
            environment = xs.load_model("ppdsparse.model").attributes["identity"]["environment"]
            for name in chosen or every:
                archive = keep(every[name], environment, into)
                click.echo(f"{archive.stat().st_size:8,} {archive.name}")
    finally:
        shutil.rmtree(PLACE)


if __name__ == "__main__":
    main()
