"""What holds for all kernels: few arguments, domains of draws that never change, and numba's private option."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

from helpers.compiler import needs_compiler

import xmc_stream
from xmc_stream.kernels import domains
from xmc_stream.kernels.permutation import key_of

MOST_ARGUMENTS = 12
SOURCES = sorted(Path(xmc_stream.__file__).parent.rglob("kernels/*.py"))
ROOT = str(Path(xmc_stream.__file__).parents[1])


def test_no_kernel_takes_many_arguments() -> None:
    found = 0
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and {"kernel", "inner_kernel"} & {
                decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)
            }:
                found += 1
                assert len(node.args.args) <= MOST_ARGUMENTS, f"{source.name}: {node.name}"
    assert found > 50


def test_domains_are_those_that_models_were_made_with() -> None:
    named = {name: value for name, value in vars(domains).items() if name.isupper()}
    assert named == {
        "FIRST_NEGATIVES": 2**40,
        "WEIGHT_DRAWS": 2**41,
        "SHARED_ORDER": 2**40,
        "LABEL_NUMBERS": 2**40,
        "HELD_OUT_ROWS": 2**41,
        "PASSES": 2**42,
        "FEATURE_ORDER": 2**43,
        "ZERO_CLASSES": 2**44,
        "LABEL_GROUPS": 2**45,
        "TREE_FEATURES": 2**46,
        "TREE_SPLITS": 2**47,
        "TREE_ROWS": 2**48,
        "TREE_ORDERS": 2**49,
        "TREE_CHOICE": 2**50,
        "FIRST_FACTORS": 0x1E31,
        "STEPS": 0x3E01,
    }


def test_keys_of_different_domains_are_different() -> None:
    """But for the two of different methods that share a number, see `domains`."""
    few = range(3)
    keys = {}
    for round_, number in itertools.product(few, few):
        for label in few:
            keys["class", label, round_, number] = key_of(0, label, round_, number)
        for epoch in ("FIRST_NEGATIVES", "WEIGHT_DRAWS"):
            keys[epoch, round_, number] = key_of(0, number, round_, getattr(domains, epoch))
        for label_domain in ("SHARED_ORDER", "HELD_OUT_ROWS", "PASSES", "FEATURE_ORDER", "ZERO_CLASSES"):
            keys[label_domain, round_, number] = key_of(0, getattr(domains, label_domain), round_, number)
    assert len(set(keys.values())) == len(keys)


GONE = """
import warnings
from numba.core import cpu
{remove}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from xmc_stream.kernels.jit import inner_kernel, kernel

    @inner_kernel
    def double(x):
        return 2.0 * x

    @kernel
    def twice(x):
        return double(x)

    assert twice(1.5) == 3.0
print(*[str(each.message) for each in caught if "_nrt" in str(each.message)])
"""


@needs_compiler
def test_where_numba_has_lost_its_private_option_it_is_said(tmp_path: Path) -> None:
    said = []
    for number, remove in enumerate(("", "del cpu._options_mixin._nrt")):
        script = tmp_path / f"gone{number}.py"
        script.write_text(GONE.format(remove=remove))
        environment = {
            **os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ROOT, "NUMBA_DISABLE_JIT": "0"
        }  # fmt: skip
        ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout.strip())
    assert said[0] == ""
    assert "has no option _nrt" in said[1]
    assert "Install numba" in said[1]
