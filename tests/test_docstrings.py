"""What `help` shows of the public names: every parameter is described, and the examples are true."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import Forked

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions

_ESTIMATORS = (xs.PPDSparse, xs.PDSparse, xs.LEML, xs.CPLST, xs.GroupLasso, xs.MEMOIR, xs.LabelTree)
_ERRORS = {name for name in xs.__all__ if name.endswith("Error")}
_PUBLIC = {name: getattr(xs, name) for name in xs.__all__ if name not in {*_ERRORS, "errors", "__version__"}}
_ROOT = Path(xs.__file__).parent.parent


def sections(text: str) -> dict[str, str]:
    """A docstring in NumPy style by section; "" is what comes before the first."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(section: str) -> dict[str, str]:
    """Parameters by name: their types. Raises AssertionError for one that nothing is said of."""
    found = {}
    for match in re.finditer(r"^(\S[^\n:]*?) : ([^\n]+)((?:\n    [^\n]+|\n)*)", section, flags=re.MULTILINE):
        names, kind, text = match.groups()
        assert text.strip(), names
        found.update(dict.fromkeys((name.lstrip("*") for name in names.split(", ")), kind))
    found.update({match[1]: "any" for match in re.finditer(r"^\*\*(\w+)\n    \S", section, flags=re.MULTILINE)})
    return found


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and methods of public classes with those that they inherit of others of this package, by name."""
    for name, value in _PUBLIC.items():
        if not inspect.isclass(value):
            yield name, value
            continue
        for method, member in inspect.getmembers(value, inspect.isroutine):
            # a property that is kept passes for a routine
            if not method.startswith("_") and callable(member) and member.__module__.startswith("xmc_stream"):
                yield f"{name}.{method}", member


def classes() -> Iterator[type]:
    """Public classes, and those whose methods they have."""
    seen: dict[type, None] = {}
    for value in _PUBLIC.values():
        if inspect.isclass(value):
            seen |= dict.fromkeys(base for base in reversed(value.__mro__) if base.__module__.startswith("xmc_stream"))
    return iter(seen)


def examples() -> list[doctest.DocTest]:
    """One for each docstring that has any; each brings all that it needs."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    places = [*classes(), *(value for value in _PUBLIC.values() if not inspect.isclass(value))]
    return [test for place in places for test in finder.find(place, place.__name__, globs={}) if test.examples]


def run_examples() -> None:
    """Run the examples of every docstring, each in a folder of its own; exit code 1, with what differed, if one is not true."""
    failed = 0
    for example in examples():
        os.mkdir(example.name)
        with contextlib.chdir(example.name):
            failed += doctest.DocTestRunner(verbose=False).run(example).failed
    print(len(examples()))
    sys.exit(failed > 0)


def test_examples_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Forked(run_examples) as run:  # their limits are those of a process that begins with them
        assert run.wait() == 0, run.stdout + run.stderr
        assert int(run.stdout) > 30


@pytest.mark.parametrize("name", sorted(_PUBLIC))
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in sections(_PUBLIC[name].__doc__ or "").get("Examples", ""), name


@pytest.mark.parametrize(
    ("name", "function"), list(functions()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_parameter_of_a_public_function_is_described(name: str, function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    assert text.partition("\n")[0].endswith((".", ":")), f"{name} begins with a sentence"
    parts, signature = sections(text), inspect.signature(function)
    wanted = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    found = described(parts.get("Parameters", ""))
    assert list(found) == [parameter.name for parameter in wanted], name
    for parameter in wanted:
        if parameter.default is not parameter.empty:
            assert "default" in found[parameter.name], (name, parameter.name)
    if signature.return_annotation not in (None, "None", signature.empty):
        assert "Returns" in parts, name


def test_every_field_of_a_public_dataclass_is_described() -> None:
    for kind in (TextOptions,):
        found = described(sections(kind.__doc__ or "")["Parameters"])
        assert list(found) == [field.name for field in fields(kind)]
        assert all("default" in words for words in found.values())


@pytest.mark.parametrize("kind", _ESTIMATORS, ids=lambda kind: kind.__name__)
def test_estimators_describe_every_parameter(kind: Any) -> None:
    parts = sections(kind.__doc__)
    assert list(parts) == ["", "Parameters", "Attributes", "Examples"]
    found = described(parts["Parameters"])
    assert list(found) == list(inspect.signature(kind).parameters)
    assert sorted(found) == list(kind().get_params())
    assert all("default" in words for words in found.values())
    wanted = ["model_", "report_", "classes_", "n_features_in_", "feature_names_in_", "coef_", "intercept_"]
    assert list(described(parts["Attributes"])) == wanted
    assert re.search(r"(ICML|KDD|NIPS|arXiv|Machine\s+Learning) \d{4}", parts[""])
    assert re.search(r"section|equation", parts[""])


def leads_somewhere(reference: str, package: str) -> bool:
    """Whether a dotted name is that of a module or of what is in it, as seen from a package or one around it."""
    while package:
        parts = f"{package}.{reference}".split(".")
        for n in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:n]))
            except ModuleNotFoundError:
                continue
            for name in parts[n:]:
                found = getattr(found, name, None)
            if found is not None:
                return True
        package = package.rpartition(".")[0]
    return False


def test_source_refers_to_modules_and_documents_that_exist() -> None:
    sources = [file for file in _ROOT.glob("xmc_stream/**/*.py") if file.parent.name != "kernels"]
    assert sources
    for file in sources:
        text, package = file.read_text(), ".".join(file.parent.relative_to(_ROOT).parts)
        for reference in re.findall(r"`([a-z_]+(?:\.\w+)+)`", text):
            assert leads_somewhere(reference.removeprefix("xmc_stream."), package), (file, reference)
        for document in re.findall(r"\b(?:docs|benchmarks|tools)/[\w/-]+\.\w+", text):
            assert (_ROOT / document).exists(), (file, document)
        assert not re.search(r"DESIGN|ALGORITHMS", text), file
