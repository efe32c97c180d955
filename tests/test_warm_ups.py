"""What a warm-up is for: the kernels of a training are loaded before its memory is planned, and none is compiled later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import xmc_stream as xs

# each in a process of its own, as kernels that others have loaded would not be missed: forked from one that has loaded none
TRAIN = """
import gc, json, os, sys, traceback
import numba
import xmc_stream as xs
from xmc_stream.kernels.jit import Kernel
from xmc_stream.runtime.warmup import WarmUp
from xmc_stream.training import train

def loaded():
    kernels = [each for each in gc.get_objects() if type(each) is Kernel]
    return {(each.py_func.__qualname__, str(types)) for each in kernels for types in each.numba.signatures}

def warm(self, run=WarmUp.run):
    receipt = run(self)
    before.update(loaded())
    return receipt

before = set()
WarmUp.run = warm
rows, folder, cases = sys.argv[1:]
methods = [(f"{rows}/{data}", getattr(xs, method), options) for data, method, options in json.loads(cases)]
numba.njit(lambda x: x)(1)  # the compiler itself is begun once
assert not any(each._made for each in gc.get_objects() if type(each) is Kernel)
for number, (data, method, options) in enumerate(methods):
    child = os.fork()
    if child:
        assert not os.waitpid(child, 0)[1]
        continue
    try:
        method(memory_limit="2GB", threads=1, **options).fit(data, model=f"{folder}/{number}")
        assert before
        print(json.dumps(sorted(loaded() - before)), flush=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
"""
ONE: list[tuple[str, dict[str, object]]] = [
    ("PPDSparse", {}), ("PPDSparse", {"all_rows": True, "max_rounds": 1}), ("PDSparse", {"max_passes": 2}),
    ("LEML", {"rank": 3, "held_out": 0.3}), ("LEML", {"rank": 3, "held_out": 0.3, "criterion": "auc"}),
    ("CPLST", {"rank": 3}), ("GroupLasso", {}), ("MEMOIR", {"rank": 3, "steps": 5}),
    ("LabelTree", {}), ("LabelTree", {"max_leaf": 2, "root": 2, "branching": 2, "n_trees": 2}),
]  # fmt: skip
# on rows of several labels, where these methods do more
SEVERAL: list[tuple[str, dict[str, object]]] = [("LabelTree", {"max_leaf": 4, "root": 2, "branching": 2})]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets of 300 rows: of one label each, and of three."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("warm")
    X = sp.random(300, 40, 0.2, "csr", np.float32, rng)
    for name, n, k in (("one.xmc", 1, 7), ("several.xmc", 3, 21)):
        labels = (np.arange(300)[:, None] + 5 * np.arange(n)) % k
        Y = sp.csr_matrix((np.ones(300 * n, np.float32), labels.ravel(), n * np.arange(301)), (300, k))
        xs.convert(X, folder / name, labels=Y, normalize="l2")
    return folder


@pytest.mark.slow
def test_a_training_compiles_nothing_after_its_warm_up(rows: Path, tmp_path: Path) -> None:
    cases = [*(("one.xmc", *case) for case in ONE), *(("several.xmc", *case) for case in SEVERAL)]
    command = [sys.executable, "-c", TRAIN, str(rows), str(tmp_path), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    later = dict(zip(map(str, cases), map(json.loads, done.stdout.splitlines()), strict=True))
    assert {case: kernels for case, kernels in later.items() if kernels} == {}
