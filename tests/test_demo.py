"""The demo: which docstrings become samples, what their labels and words are, and the command itself."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xmc_stream.demo import (
    Sample,
    as_sample,
    prepare_folder,
    read_samples,
    run_step,
    source_files,
    source_folders,
    write_text_set,
)
from xmc_stream.errors import XmcStreamError

TEXT = "Some words that say what it is good for"
TOPICS = (
    "bread flour oven crust dough yeast",
    "violin strings bow melody concert chord",
    "rain cloud wind storm sky sun",
)
FIGURES = "folder n_train n_test n_features n_labels P@1_most_frequent P@5_at_best P@1 P@3 P@5 PSP@5 seconds"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def documented(*names: str) -> str:
    """Source of functions, each with a docstring of its own."""
    return "\n".join(f'def {name}():\n    """{TEXT} {name[::-1]}q"""' for name in names)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packages of two modules, 240 functions, whose docstrings are drawn from the package's and module's words."""
    folder, rng = tmp_path_factory.mktemp("packages"), np.random.default_rng(0)
    for p, topic in enumerate(TOPICS):
        words = topic.split()
        for half in range(2):
            functions = [
                f'def call_{i}():\n    """{" ".join(rng.choice(words[3 * half :] * 3 + words, 12))}."""'
                for i in range(40)
            ]
            write(folder, {f"{'abc'[p]}pack/{'xy'[half]}mod.py": "\n".join(functions)})
    write(
        folder,
        {f"dpack/m{i}.py": documented(*(f"act_{chr(97 + i)}{chr(110 + j)}" for j in range(5))) for i in range(5)},
    )
    return folder


def test_public_modules_classes_functions_and_methods_are_samples(tmp_path: Path) -> None:
    inner = '''
"""The module has words to be read as well"""
class Open:
    """A class whose words can be read by all"""
    def method(self):
        """Its method, whose words can be read too"""
        def local(): """What is inside of a function is of no interest"""
    def _hidden(self): """A private method with words of its own in here"""
    class Within: """A class within another class which says so here"""
try:
    if Open:
        async def waiting(): """A coroutine that is defined under some condition"""
except ValueError:
    def fallback(): """What is there if something else was not there"""
class _Closed:
    def method(self): """A public method of a private class, left out"""
def short(): """too few words here"""
def silent(): pass
'''
    files = {
        "pack/mod.py": inner,
        "pack/_impl.py": '"""The docstring of a private module is not taken"""\n' + documented("outside"),
        "pack/__init__.py": f'"""{TEXT}"""',
        "pack/__main__.py": "",
        "single.py": documented("alone"),
        "_private.py": documented("a"),
        "pack/_private/mod.py": documented("b"),
        "pack/tests/mod.py": documented("c"),
        "pack/test_mod.py": documented("d"),
        "not-a-package/mod.py": documented("e"),
        "site-packages/other/mod.py": documented("f"),
        "pack/data.txt": documented("g"),
    }
    samples = read_samples([write(tmp_path, files)])
    names = "pack pack.mod pack.mod.Open pack.mod.Open.Within pack.mod.Open.method pack.mod.fallback pack.mod.waiting"
    assert [sample.name for sample in samples] == [*names.split(), "pack.outside", "single.alone"]
    assert samples[4].labels == ["pack", "pack.mod", "pack.mod.Open", "pack.mod.Open.method"]


def test_words_of_the_own_name_are_left_out() -> None:
    text = "HTTPServer.get_file2: the HttpServer gets a File from getFile, package numerics.httpserver.\n\n\tNot filed\x1b[1m."
    sample = as_sample("numerics.HTTPServer.get_file2", text)
    assert sample.words == "the gets a from package not filed m"
    assert sample.beginning == (
        "[HTTP][Server].[get]_[file]2: the [Http][Server] gets a [File] from [get][File], package ..."
    )


def test_copies_count_once(tmp_path: Path) -> None:
    copied = 'def {}():\n    """The same words are written here,\n    twice."""\n'
    apart = 'def {0}():\n    """This is for the {0}, and it is apart but for its name."""\n'
    source = copied.format("one") + copied.format("two") + apart.format("three") + apart.format("four")
    assert [s.name for s in read_samples([write(tmp_path, {"m.py": source})])] == ["m.one", "m.three"]


def is_parsed(source: str) -> bool:
    """Whether this version of Python takes it."""
    try:
        ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError):
        return False
    return True


@pytest.mark.filterwarnings("error")
def test_nothing_in_the_source_crashes_hangs_or_runs(tmp_path: Path) -> None:
    files = {
        "good.py": f'open({str(tmp_path / "was_run")!r}, "w")\nx = "\\d"\n' + documented("fine"),
        "syntax.py": documented("a") + "\ndef (:",
        "nul.py": documented("b") + "\n\0",
        "huge.py": documented("g") + "\n" + "#" * 2**20,
        "surrogate.py": 'def h(): """Words \\ud800 and some more of them, to be kept"""',
        "sub/deep.py": "if 0:\n" + "".join(" " * i + "if 0:\n" for i in range(1, 90)) + " " * 90 + "def i(): pass\n",
    }
    deep = {  # a version of Python takes some of them
        "parentheses.c": documented("c") + "\nx = " + "(" * 5000 + ")" * 5000,
        "minus.d": documented("d") + "\nx = " + "-" * 100_000 + "1",
        "dots.e": documented("e") + "\nx = x" + ".x" * 100_000,
        "elif.f": "if 0: pass\n" + "elif 0: pass\n" * 20_000 + documented("f"),
    }
    write(tmp_path, files | {f"{name[:-2]}.py": source for name, source in deep.items()})
    (tmp_path / "latin.py").write_bytes(documented("j").encode() + b"\n# \xe9")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nothing.py")
    (tmp_path / "circle.py").symlink_to(tmp_path / "circle.py")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    samples = read_samples([tmp_path])
    taken = [name for name, source in deep.items() if is_parsed(source)]
    assert [sample.name for sample in samples] == sorted(["good.fine", "surrogate.h", *taken])
    for sample in samples:
        sample.beginning.encode()
    assert not (tmp_path / "was_run").exists()
    assert not any(path.name in ("huge.py", "pipe.py", "folder.py") for path, _, _ in source_files(tmp_path))


def test_the_text_set_holds_the_samples(packages: Path, tmp_path: Path) -> None:
    samples = read_samples([packages])
    sizes = write_text_set(samples, tmp_path)
    shown = (tmp_path / "samples.txt").read_text().splitlines()
    counts: dict[str, int] = {}
    for sample in samples:
        for label in sample.labels:
            counts[label] = counts.get(label, 0) + (not sample.held_out)
    labels = {label for label, count in counts.items() if count >= 3}
    assert sizes["n_labels"] == len(labels)
    assert [line.split("\t")[0] for line in shown] == [s.name for s in samples if s.held_out and set(s.labels) & labels]
    for name, held_out in (("train", False), ("test", True)):
        part = [s for s in samples if s.held_out == held_out and set(s.labels) & labels]
        lines = gzip.decompress((tmp_path / f"{name}.jsonl.gz").read_bytes()).splitlines()
        assert sizes[f"n_{name}"] == len(part)
        assert [json.loads(line) for line in lines] == [
            {"text": s.words, "labels": [label for label in s.labels if label in labels]} for s in part
        ]


def test_equal_source_gives_equal_files(packages: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_text_set(read_samples([packages]), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.slow
def test_too_little_source_is_one_clear_error(tmp_path: Path) -> None:
    write(tmp_path / "few", {"m.py": documented("a", "b", "c")})
    for source, message in (("few", "3 docstrings"), ("none", "is not a folder")):
        command = [sys.executable, "-m", "xmc_stream.cli", "demo", tmp_path / "out", "--source", tmp_path / source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stdout.startswith("The task: ")
        assert message in done.stderr
        assert "--source" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_where_an_earlier_demo_was(packages: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    folder = tmp_path / "the demo"
    prepare_folder(folder)
    write_text_set(read_samples([packages]), folder)
    text = gzip.decompress((folder / "train.jsonl.gz").read_bytes())
    (folder / "own.txt").write_text("mine")
    (folder / "train.xmc").mkdir()
    (folder / "train.xmc" / "zarr.json").write_text("damaged")
    command = [sys.executable, "-m", "xmc_stream.cli", "demo", folder, "--source", packages, "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    figures, told = json.loads(done.stdout), done.stderr
    assert set(FIGURES.split()) <= set(figures)
    assert figures["n_samples"] == figures["n_test"] > 10
    assert figures["P@1"] > figures["P@1_most_frequent"] + 20
    assert figures["P@5"] <= figures["P@5_at_best"] <= 100
    assert commands("evaluate", folder / "predictions.zarr", folder / "test.xmc")["P@5"] == figures["P@5"]
    steps = [line.split()[2] for line in told.splitlines() if line.startswith("$ xmc-stream")]
    assert steps[:7] == ["convert", "convert", "plan", "train", "predict", "evaluate", "info"]
    assert f"P@1      {figures['P@1']:6.2f}" in told
    assert f"$ cd '{folder}'" in told
    assert told.index("$ xmc-stream train") < told.index("docs.model: ") < told.index("$ xmc-stream predict")
    shown = (folder / "samples.txt").read_text().splitlines()
    assert sum(line.split("\t")[0] in told.splitlines() for line in shown) == 5
    assert gzip.decompress((folder / "train.jsonl.gz").read_bytes()) == text
    assert (folder / "own.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_folder_of_something_else_is_left_alone(packages: Path, tmp_path: Path, commands: Callable[..., Any]) -> None:
    (tmp_path / "train.jsonl.gz").write_text("mine")
    assert "earlier demo" in commands("demo", tmp_path, "--source", packages, fails=True)
    (tmp_path / "README.txt").write_text("mine too")
    assert "earlier demo" in commands("demo", tmp_path, "--source", packages, fails=True)
    assert "is a file" in commands("demo", tmp_path / "README.txt", "--source", packages, fails=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.txt", "train.jsonl.gz"]


def test_what_an_interrupted_demo_left_is_removed_and_nothing_beside(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "demo")
    write(
        tmp_path, {"demo/docs.model.partial/x": "", "demo/test.xmc/x": "", "demo/own.model/x": "", "linked/x": "mine"}
    )
    (tmp_path / "demo" / "train.xmc").symlink_to(tmp_path / "linked")
    prepare_folder(tmp_path / "demo")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["README.txt", "own.model"]
    assert (tmp_path / "linked" / "x").read_text() == "mine"


def test_a_step_that_fails_is_named(tmp_path: Path) -> None:
    with (
        open(tmp_path / "told", "w", encoding="utf-8") as told,
        pytest.raises(XmcStreamError, match=r"convert nothing.txt x.xmc.* exit code 1"),
    ):
        run_step("convert nothing.txt x.xmc", tmp_path, told)


@pytest.mark.soak
@pytest.mark.slow
def test_the_standard_library_gives_an_extreme_set(tmp_path: Path) -> None:
    samples = read_samples(source_folders()[:1])
    sizes = write_text_set(samples, tmp_path)
    assert sizes["n_train"] + sizes["n_test"] >= 3000  # some systems leave parts of it out
    assert sizes["n_labels"] >= 500
    assert 0.08 < sizes["n_test"] / sizes["n_train"] < 0.15
    assert sizes["P@1_most_frequent"] < 30
    texts = [sample.words for sample in samples]
    assert len(set(texts)) == len(texts)
    for sample in samples[::50]:
        assert set(sample.words.split()).isdisjoint(as_own_words(sample))


def as_own_words(sample: Sample) -> set[str]:
    """The letters of a name's parts, lower-cased."""
    return {"".join(c for c in part if c.isascii()) for part in sample.name.lower().replace("_", ".").split(".")}
