"""Messages name arguments: as flags in the shell, as Python's arguments in Python, and nothing else in them changes."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import distributed
import distributed.cli.dask_worker
import pytest

import xmc_stream as xs
from xmc_stream import flags
from xmc_stream.cli import main
from xmc_stream.errors import XmcStreamError, renaming
from xmc_stream.flags import Wording
from xmc_stream.runtime.job import do, receipt_of

PACKAGE = Path(xs.__file__).parent
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
TABLE = {name: entry for name, entry in vars(flags).items() if isinstance(entry, Wording)}
COMMANDS = (
    "demo.py",
    "ppdsparse/parameters.py",
    "tree/parameters.py",
    "training/tune.py",
)  # which tell of commands elsewhere than in errors
LIKE_FLAGS = [
    "--memory-limit",
    "{overwrite}",
    "{0} %s --set lam=1 -k 3",
    "xmc-stream --on-error=skip",
    "flags.OVERWRITE",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def in_table(node: ast.AST) -> bool:
    """Whether an expression is an entry of the table."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "flags"
        and node.attr.isupper()
    )


def used(tree: ast.AST) -> set[str]:
    """The entries that a module names."""
    return {node.attr for node in ast.walk(tree) if in_table(node)}  # type: ignore[attr-defined]


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of all strings but docstrings; {} stands for what an f-string puts in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from texts(node)


def spells_a_flag(text: str) -> bool:
    """Whether a text has a flag in it that is not of a whole command."""
    return re.search(r"(?<![\w-])(--[a-z]|-k\b)", re.sub(r"xmc-stream [^,;:()`]*|`[^`]*`", "", text)) is not None


def calls(node: ast.AST) -> Iterator[str]:
    """Names of functions, and of methods of this object, that are called in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if isinstance(part.func, ast.Name):
                yield part.func.id
            elif isinstance(part.func, ast.Attribute):
                yield part.func.attr


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def lost(tree: ast.Module) -> list[int]:
    """Lines of f-strings into which a text goes that names arguments: itself, or by a variable or function of the module."""
    of_module = [node for node in tree.body if isinstance(node, ast.Assign)]
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    variables: dict[int, set[str]] = {id(function): set() for function in functions}
    everywhere: set[str] = set()
    giving: set[str] = set()

    def names_arguments(node: ast.AST, names: set[str]) -> bool:
        direct = any(map(in_table, ast.walk(node)))
        return direct or bool(named(node) & names) or bool(giving.intersection(calls(node)))

    def taken(assigned: ast.AST, names: set[str]) -> set[str]:
        value = getattr(assigned, "value", None)
        if value is None or not names_arguments(value, names):
            return set()
        targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]  # type: ignore[attr-defined]
        return {target.id for target in targets if isinstance(target, ast.Name)}

    while True:
        before = len(everywhere), len(giving), sum(map(len, variables.values()))
        for node in of_module:
            everywhere |= taken(node, everywhere)
        for function in functions:
            mine = variables[id(function)]
            for node in ast.walk(function):
                if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                    mine |= taken(node, mine | everywhere)
                elif isinstance(node, ast.Return) and node.value is not None:
                    giving |= {function.name} if names_arguments(node.value, mine | everywhere) else set()
        if before == (len(everywhere), len(giving), sum(map(len, variables.values()))):
            break
    return [
        part.lineno
        for scope, names in [(tree, everywhere), *((one, variables[id(one)] | everywhere) for one in functions)]
        for part in ast.walk(scope)
        if isinstance(part, ast.FormattedValue) and names_arguments(part.value, names)
    ]


def is_error(one: object) -> bool:
    return inspect.isclass(one) and issubclass(one, Exception)


def options() -> set[str]:
    """Of all commands, and of dask's workers, which some messages tell how to start."""
    commands = [main, *main.commands.values(), distributed.cli.dask_worker.main]
    return {
        option
        for command in commands
        for one in command.params
        if isinstance(one, click.Option)
        for option in (*one.opts, *one.secondary_opts)
    }


def arguments() -> set[str]:
    """Of all public functions, classes and methods, and of dask's workers."""
    public = [one for name in xs.__all__ if callable(one := getattr(xs, name)) and not is_error(one)]
    methods = [vars(kind).values() for one in public if inspect.isclass(one) for kind in one.__mro__[:-1]]
    found = set(inspect.signature(distributed.Worker).parameters)
    for one in [
        *public,
        *(one for some in methods for one in some if inspect.isfunction(one) and one.__name__[0] != "_"),
    ]:
        found |= set(inspect.signature(one).parameters)
    return found


def test_each_entry_is_a_flag_of_a_command_and_an_argument_of_a_function() -> None:
    known, public = options(), arguments()
    assert len(TABLE) > 30
    for name, entry in TABLE.items():
        assert re.split(r"[ =]", entry)[0] in known, name
        spelled = re.findall(r"(?<![.\w])([a-z_]+)(?==|$)", entry.in_python)
        assert set(spelled) <= public, name
        assert spelled or name == "SET"  # a parameter of a method is named behind it


def test_each_entry_is_used_and_each_that_is_used_is_there() -> None:
    assert set().union(*map(used, TREES.values())) == set(TABLE)


def test_no_message_spells_a_flag_itself() -> None:
    """In the package of the commands one may: what is said there, only the shell shows."""
    found = []
    for file, tree in TREES.items():
        if file.startswith("cli/") or file == "flags.py":
            continue
        parts = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)] if file in COMMANDS else [tree]
        found += [(file, line, text) for part in parts for line, text in texts(part) if spells_a_flag(text)]
    assert found == []


def test_no_message_loses_a_spelling_in_an_f_string() -> None:
    assert [(file, line) for file, tree in TREES.items() if used(tree) for line in lost(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        'def f(): raise E(f"or {flags.FORCE}")',
        'A = "or " + flags.FORCE\ndef f(): return f"{A}"',
        'def f(x):\n    hint = "or " + flags.FORCE if x else ""\n    raise E(f"so: {hint}")',
        'def f(x):\n    more = ", " + g(x)\n    raise E(f"so{more}")\ndef g(x): return x + flags.FORCE',
        'def f(self): return f"{self.g()}"\ndef g(self): return flags.FORCE + "."',
    ],
)
def test_a_spelling_that_would_be_lost_is_found(code: str) -> None:
    assert lost(ast.parse(code))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('raise E(f"{x}: or --force")', True),
        ('A = {"x": "or --force"}', True),
        ('def f(n): return f"-k {n} or more"', True),
        ('def f():\n    "It has --force."', False),
        ('raise E(f"see `xmc-stream info {x} --verify`, a--b")', False),
        ('raise E("scale them (xmc-stream convert --normalize l2), or --force")', True),
    ],
)
def test_a_flag_that_is_spelled_is_found(code: str, found: bool) -> None:
    assert any(spells_a_flag(text) for _, text in texts(ast.parse(code))) == found


def test_a_text_is_put_together_in_both_spellings() -> None:
    error = xs.InputError("give " + flags.UNSEEN_DROP + ", or " + flags.SET + f"C={1} and " + (flags.K + " 3"))
    assert error.in_shell == "give --unseen=drop, or --set C=1 and -k 3"
    assert str(error) == "give drop_unseen=True, or C=1 and k 3"


@pytest.mark.parametrize("name", LIKE_FLAGS)
@pytest.mark.parametrize("kind", [xs.InputError, xs.StoreError, xs.MemoryLimitError, xs.ResumeError, xs.JobError])
def test_what_users_name_stays_as_it_is(kind: type[XmcStreamError], name: str) -> None:
    error = pickle.loads(pickle.dumps(kind(f"{name} exists: or " + flags.OVERWRITE + f" replaces {name}")))
    assert type(error) is kind
    assert error.in_shell == f"{name} exists: or --overwrite replaces {name}"
    assert str(error) == f"{name} exists: or overwrite=True replaces {name}"


@pytest.mark.parametrize("name", LIKE_FLAGS)
def test_names_of_files_stay_as_they_are(name: str, small: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    out.mkdir()
    with pytest.raises(xs.InputError) as caught:
        xs.predict(trained, small, out)
    assert str(caught.value) == f"{out} exists: give another name, or overwrite=True to replace it"
    assert caught.value.in_shell == f"{out} exists: give another name, or --overwrite to replace it"


@pytest.mark.parametrize("name", LIKE_FLAGS)
def test_labels_stay_as_they_are(name: str, tmp_path: Path) -> None:
    for file, label in (("train", "a"), ("test", name)):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({"text": "blue hat", "labels": [label]}) + "\n")
    train = xs.convert(tmp_path / "train.jsonl", tmp_path / "train.xmc", memory_limit="2GB")
    with pytest.raises(xs.InputError) as caught:
        xs.convert(tmp_path / "test.jsonl", tmp_path / "test.xmc", like=train, memory_limit="2GB")
    said = f"{tmp_path / 'test.jsonl'}:1: label {name!r} does not occur in {train.path}"
    end = " takes them for `xmc-stream append`"
    assert str(caught.value) == f"{said}: drop_unseen=True leaves out such labels, new_labels{end}"
    assert caught.value.in_shell == f"{said}: --unseen=drop leaves out such labels, --new-labels{end}"


@dataclass(frozen=True)
class Refused:
    """A job that ends with an error."""

    error: XmcStreamError
    key: str = "refused"

    def run(self) -> dict[str, Any]:
        raise self.error


@pytest.mark.parametrize("name", LIKE_FLAGS)
def test_an_error_comes_back_from_a_worker_in_both_spellings(name: str) -> None:
    outcome = pickle.loads(pickle.dumps(do(Refused(xs.MemoryLimitError(f"{name} needs more", 5_000_000)))))
    with pytest.raises(xs.MemoryLimitError) as caught:
        receipt_of(outcome)
    assert str(caught.value) == f"{name} needs more: set memory_limit to 5MB or more"
    assert caught.value.in_shell == f"{name} needs more: set --memory-limit to 5MB or more"


def test_things_get_other_words_in_both_spellings() -> None:
    with pytest.raises(xs.InputError) as caught, renaming({"/tmp/x": "X"}):
        raise xs.InputError("/tmp/x: give " + flags.FORCE + " for /tmp/x")
    assert (str(caught.value), caught.value.in_shell) == ("X: give force=True for X", "X: give --force for X")


def test_a_row_that_is_wrong_is_told_in_both_spellings(tmp_path: Path, commands: Callable[..., Any]) -> None:
    """Its reason goes through the part of the file, and where rows are left out into the report."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "blue hat", "labels": [1]}\n{"labels": [1]}\n')
    with pytest.raises(
        xs.InputError, match=r":2: there is no field 'text': .* \(text=TextOptions\(text_fields=\.\.\.\)\)$"
    ):
        xs.convert(source, tmp_path / "d.xmc", memory_limit="2GB")
    assert commands("convert", source, tmp_path / "d.xmc", fails=True).endswith("(--text-field)")
    commands("convert", source, tmp_path / "d.xmc", "--on-error", "skip")
    [(_, _, why)] = xs.open_dataset(tmp_path / "d.xmc").attributes["skipped_rows"]
    assert why.endswith("(--text-field)")
