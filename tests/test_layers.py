"""The layers of the package, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_imports_point_downwards_only() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_test_module_imports_another() -> None:
    """What two of them use is in helpers/."""
    imports = re.compile(r"^\s*(?:import\s.*\b|from\s+)(?:test_\w+|conftest)\b", re.MULTILINE)
    assert imports.search("x = 1\n    from test_x import y\n")
    assert imports.search("import conftest\n")
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found = imports.findall(path.read_text(encoding="utf-8"))
        assert found == [] or path == Path(__file__), path


def test_importing_loads_no_heavy_package() -> None:
    heavy = "numba", "dask", "distributed", "zarr", "scipy", "numpy"
    code = f"import sys, xmc_stream; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
def test_every_public_name_can_be_reached_in_any_order() -> None:
    run_python("import xmc_stream as xs; xs.PPDSparse; assert callable(xs.convert)")
    run_python("import xmc_stream.convert.formats.xmlrepo, xmc_stream as xs; assert callable(xs.convert)")
    run_python(
        "import xmc_stream as xs; assert {*xs._HOME, 'convert', 'errors', 'InputError', '__version__'} <= set(xs.__all__);"
        "assert len(set(xs.__all__)) == len(xs._HOME) + 9; [getattr(xs, name) for name in xs.__all__]"
    )


@pytest.mark.parametrize(("told", "threads"), [(None, "1"), ("3", "3")])
def test_a_command_gives_BLAS_one_thread_unless_it_is_told_otherwise(
    told: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", told)
    code = (
        "import os, sys; from xmc_stream.cli import main, program\n"
        "@main.command()\n"
        "def look(): print('numpy' in sys.modules, os.environ['OPENBLAS_NUM_THREADS'])\n"
        "sys.argv = ['xmc-stream', 'look']; program()"
    )
    assert run_python(code).split() == ["False", threads]


def test_opening_a_model_loads_nothing_that_predicts() -> None:
    heavy = "evaluate", "forecast", "predict", "warm"
    code = "import sys, xmc_stream.training.train, xmc_stream.ppdsparse.method, xmc_stream.linear.model;"
    code += f"print([n for n in {heavy} if f'xmc_stream.linear.{{n}}' in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from xmc_stream.cli import main;"
        "sys.argv = ['xmc-stream', '--help'];\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numba', 'distributed', 'zarr'} & set(sys.modules)"
    )
    run_python(code)
