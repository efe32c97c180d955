"""The least limit that a refusal names: it works, for every method, option and command, and a little less names it again."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import scipy.sparse as sp
from helpers.commands import said_at_last
from helpers.forked import Forked
from helpers.methods import METHODS, TRAINED
from helpers.soak import first

import xmc_stream as xs
from xmc_stream.cli import main
from xmc_stream.errors import MemoryLimitError
from xmc_stream.methods import registry
from xmc_stream.methods.parameters import Choice, Flag
from xmc_stream.runtime.plan import MIB, Forecaster, MemoryPlan, least_that_works
from xmc_stream.system.memory import MemoryLimit, least_limit

Cli = Callable[..., Any]
N, D, K = 1100, 120, 12
FEW: dict[str, dict[str, Any]] = {  # so that a training takes a moment
    "pdsparse": {"max_passes": 2},
    "leml": {"rank": 4, "alternations": 2},
    "cplst": {"rank": 4},
    "group-lasso": {"max_passes": 2},
    "memoir": {"steps": 10, "rank": 4},
    "tree": {"max_leaf": 2, "root": 2, "branching": 2, "n_trees": 2},
}
NAMED = re.compile(r"set --memory-limit to (\d+)MB or more$")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one label each."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("least")
    labels = rng.integers(0, K, N)
    X = sp.random(N, D, 0.1, "csr", np.float32, rng)
    X = sp.csr_matrix(X + sp.csr_matrix((np.ones(N, np.float32), (np.arange(N), labels)), (N, D)))
    Y = sp.csr_matrix((np.ones(N, np.float32), (np.arange(N), labels)), (N, K))
    xs.convert(X, folder / "data.xmc", labels=Y, normalize="l2").with_observed(sp.csr_matrix(np.ones((N, K))))
    np.save(folder / "rows.npy", np.ones(N))
    np.save(folder / "labels.npy", np.ones(K))
    (folder / "tree.txt").write_text(
        "".join(f"{label} n{label % 4}\nn{label % 4} m{label % 2}\n" for label in range(K))
    )
    xs.PPDSparse(memory_limit="2GB").fit(folder / "data.xmc", model=folder / "start.model")
    return folder / "data.xmc"


def settings(solver: str) -> list[dict[str, Any]]:
    """The defaults, and each word and flag that the method declares, by itself."""
    rules, few = registry.declared(solver).rules(), FEW.get(solver, {})
    found = [few]
    for name, rule in rules.items():
        values: Sequence[Any] = (
            rule.options if isinstance(rule, Choice) else (True, False) if isinstance(rule, Flag) else ()
        )
        found += [{**few, name: value} for value in values if value != registry.declared(solver).defaults()[name]]
    return found


def options(solver: str, chosen: dict[str, Any]) -> tuple[str, ...]:
    words = ("--solver", solver)
    for name, value in chosen.items():
        words += ("--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def named(line: str) -> int:
    found = NAMED.search(line)
    assert found is not None, line
    return int(found[1])


def check(commands: Cli, *words: Any, planned: bool = True) -> int:
    """The least limit that a command names is the one that `plan` names and the least that works; in megabytes."""
    with Forked(print_least, [str(word) for word in words], planned) as looked:
        assert looked.wait() == 0, looked.stderr
        least = int(looked.stdout)
    done = commands(*words, "--memory-limit", f"{least}MB")  # in a process of its own, whose peak it tells
    assert done.get("peak_rss", 0) <= least * 10**6
    return least


def print_least(words: list[str], planned: bool) -> None:
    """The limit that a command names, which it and its plan name again under a little less; the plan fits in it."""
    least = named(line_of(*words, "--memory-limit", "1MB"))
    for before in ((), ("plan",))[: 1 + planned]:
        line = line_of(*before, *words, "--memory-limit", f"{least - 1}MB")
        assert named(line) == least, line
        assert "unknown" not in line, line
    if planned:
        code, out, said = ended("plan", *words, "--memory-limit", f"{least}MB", "--json")
        assert code == 0, said
        told = json.loads(out)
        assert (told["fits"], told["least_limit"]) == (True, least * 10**6), told
    print(least)


def line_of(*words: str) -> str:
    """What a command that fails in this process says."""
    code, out, said = ended(*words)
    assert (code, out) == (1, ""), (words, code, out, said)
    (line,) = said_at_last(said)
    return line


def ended(*words: str) -> tuple[Any, str, str]:
    """The exit code, stdout and stderr of a command in this process."""
    code, out, said = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), said.getvalue()


ALL = [(solver, number) for solver in TRAINED for number in range(len(settings(solver)))]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("solver", "number"), ALL, ids=lambda value: str(value))
def test_the_least_limit_of_every_method_and_word_works(
    solver: str, number: int, data: Path, commands: Cli, tmp_path: Path
) -> None:
    chosen = settings(solver)[number]
    words = ("train", data, tmp_path / "m", "--threads", 2, *options(solver, chosen))
    line = commands(*words, "--memory-limit", "1MB", fails=True)
    if NAMED.search(line) is None:  # words that do not go together are refused for that
        assert "memory" not in line, line
        return
    check(commands, *words, planned=False)


@pytest.mark.parametrize("solver", TRAINED)
def test_the_least_limit_works(solver: str, data: Path, commands: Cli, tmp_path: Path) -> None:
    check(commands, "train", data, tmp_path / "m", "--threads", 2, *options(solver, FEW.get(solver, {})))


@pytest.mark.slow
@pytest.mark.parametrize("solver", first(TRAINED))
def test_the_least_limit_of_a_calibrated_training_works(solver: str, data: Path, commands: Cli, tmp_path: Path) -> None:
    words = ("train", data, tmp_path / "m", "--threads", 2, "--calibrate", "0.3")
    check(commands, *words, *options(solver, FEW.get(solver, {})))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--warm-start", "start.model"), ("--class-weight", "labels.npy"), ("--sample-weight", "rows.npy"),
        ("--solver", "tree", "--tree", "tree.txt"),
    ],
)  # fmt: skip
def test_the_least_limit_of_a_start_and_of_what_is_given_works(
    more: tuple[str, ...], data: Path, commands: Cli, tmp_path: Path
) -> None:
    check(commands, "train", data, tmp_path / "m", *more[:-1], data.with_name(more[-1]))


OTHERS: dict[str, list[tuple[str, ...]]] = {
    "convert": [("lines.txt", "{out}.xmc")],
    "predict": [(model, "data.xmc", f"{{out}}{kind}") for model, kind in (("start.model", ""), ("W.model", ".npz"))],
    "evaluate": [("start.model", "data.xmc"), ("start.model", "data.xmc", "--train", "data.xmc"), ("p.npz", "data.xmc")],
    "calibrate": [("W.model", "held.xmc")],
    "split": [("data.xmc", "{out}.a", "{out}.b")],
    "select-features": [("data.xmc", "{out}", "--features", "ids.txt")],
    "export": [("data.xmc", "{out}.txt"), ("data.xmc", "{out}.npz")],
    "append": [("part.xmc", "held.xmc", "{out}")],
    "tune": [("data.xmc", "{out}.json", "--solver", "pdsparse", "--grid", "lam=0.1,0.2", "--set", "max_passes=1", "-q")],
    "verify": [("data.xmc",)],
    "compact": [("rows.model", "{out}")],
}  # fmt: skip
# they have no share in this: their memory does not grow with what they are given, or they do not take a limit
LEFT_OUT = {"info", "copy", "plan", "train", "demo"}


def test_all_commands_that_take_a_limit_are_looked_at() -> None:
    assert OTHERS.keys() | LEFT_OUT == main.commands.keys()
    limited = {name for name, command in main.commands.items() if takes_limit(command)}
    assert limited <= OTHERS.keys() | {"train"}


def takes_limit(command: click.Command) -> bool:
    return any(parameter.name == "memory_limit" for parameter in command.params)


@pytest.fixture(scope="module")
def around(data: Path) -> Path:
    """The folder of the data, with what other commands take."""
    folder = data.parent
    (folder / "ids.txt").write_text("\n".join(map(str, range(50))) + "\n")
    (folder / "lines.txt").write_text("200 30 5\n" + "".join(f"{i % 5} {i % 30}:1\n" for i in range(200)))
    xs.split(data, folder / "part.xmc", folder / "held.xmc", fraction=0.3)
    xs.LEML(rank=4, memory_limit="2GB").fit(folder / "part.xmc", model=folder / "W.model")
    xs.GroupLasso(max_passes=2, memory_limit="2GB").fit(folder / "part.xmc", model=folder / "rows.model")
    xs.predict(folder / "start.model", data, folder / "p.npz", memory_limit="2GB")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, some in OTHERS.items() for number in range(len(some))]
)
def test_the_least_limit_of_every_other_command_works(
    name: str, number: int, around: Path, commands: Cli, tmp_path: Path
) -> None:
    words = [name]
    for word in OTHERS[name][number]:
        there = around / word
        words.append(str(there) if there.exists() else word.replace("{out}", str(tmp_path / "out")))
    check(commands, *words, planned=name in ("convert", "predict", "evaluate"))


# ---- rows of millions of values

LONG = 550_000  # more than the 4 MiB of a row block


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Few rows, one of them with so many values as once did not fit into any block; in its text as well."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("long")
    short = sp.random(239, LONG + 100, 5e-5, "csr", np.float32, rng)
    long = sp.csr_matrix((np.ones(LONG, np.float32), np.arange(LONG), [0, LONG]), (1, LONG + 100))
    X = sp.vstack([short, long]).tocsr()
    labels = np.arange(240) % 3
    Y = sp.csr_matrix((np.ones(240, np.float32), (np.arange(240), labels)), (240, 3))
    xs.convert(X, folder / "long.xmc", labels=Y, normalize="l2")
    xs.PPDSparse(memory_limit="4GB").fit(folder / "long.xmc", model=folder / "m")
    return folder / "long.xmc", folder / "m"


@pytest.mark.slow
@pytest.mark.parametrize("solver", METHODS)
def test_every_method_learns_from_a_long_row_under_the_least_limit(
    solver: str, long_rows: tuple[Path, Path], commands: Cli, tmp_path: Path
) -> None:
    data, few = long_rows[0], {**FEW.get(solver, {}), **({"rank": 2} if "rank" in FEW.get(solver, {}) else {})}
    assert check(commands, "train", data, tmp_path / "m", "--threads", 1, *options(solver, few)) < 2000
    if solver in ("ppdsparse", "leml", "group-lasso", "tree"):  # a model of each kind
        check(commands, "evaluate", tmp_path / "m", data, "-k", 1, "--threads", 1)


@pytest.mark.slow
def test_other_commands_take_a_long_row(long_rows: tuple[Path, Path], commands: Cli, tmp_path: Path) -> None:
    data, model = long_rows
    check(commands, "predict", model, data, tmp_path / "p", "-k", 2)
    check(commands, "split", data, tmp_path / "a", tmp_path / "b", planned=False)
    check(commands, "export", data, tmp_path / "text.txt", planned=False)
    exported = xs.convert(tmp_path / "text.txt", tmp_path / "again.xmc", memory_limit="2GB")
    assert exported.X_rows().nnz == xs.open_dataset(data).X_rows().nnz


# ---- how it is found


def test_the_least_limit_is_in_whole_megabytes_and_never_below_what_works() -> None:
    for bound in (1, 10**6, 10**6 + 1, 63 * 10**6, 64 * 10**6, 64 * 10**6 + 1, 123_456_789, 10**13 + 7):
        found = least_limit(lambda size, bound=bound: size >= bound)
        assert found == -(-bound // 10**6) * 10**6
    assert least_limit(lambda size: False) is None


@pytest.mark.parametrize("need", [0, 5, 3 * MIB, 700 * MIB, 2**40])
@pytest.mark.parametrize("limit", ["1MB", "300MB", "1GB"])
def test_a_refusal_names_the_least_limit_whose_budget_is_enough(need: int, limit: str) -> None:
    asked = MemoryLimit.of(limit)
    budget = asked.budget(0)
    if need <= budget:
        asked.check({"all": need}, "it", budget)
        return
    with pytest.raises(MemoryLimitError) as refused:
        asked.check({"all": need}, "it", budget)
    least = MemoryLimit(named(refused.value.in_shell) * 10**6)
    assert least.budget(0) >= need
    least.check({"all": need}, "it", least.budget(0))


class Probed(Forecaster):
    """What a probe says depends on what it may hold: of little memory it sees too little."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.need = 100 * MIB if plan.budget > 80 * MIB else 60 * MIB

    def check(self, plan: MemoryPlan) -> None:
        plan.refuse_unless({"all": self.need}, "it")

    def forecast(self, plan: MemoryPlan) -> dict[str, Any]:
        raise NotImplementedError


def test_what_is_named_fits_by_what_is_foreseen_under_that_very_limit() -> None:
    plan = MemoryPlan(2**20, -1, 1)
    least = least_that_works(Probed, plan)
    assert least is not None
    there = plan.under(least)
    Probed(there).check(there)
