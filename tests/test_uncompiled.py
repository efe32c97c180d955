"""Nothing compiled (NUMBA_DISABLE_JIT=1): all methods train, predict and convert, to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import xmc_stream
from xmc_stream.methods.registry import names

TRAIN = """
import json, sys, tempfile
from pathlib import Path
import numpy as np
import scipy.sparse as sp
import xmc_stream as xs
from xmc_stream.convert.options import TextOptions

rng = np.random.default_rng(0)
X = sp.random(30, 20, 0.3, format="csr", dtype=np.float32, random_state=rng)
Y, y = sp.random(30, 6, 0.3, format="csr", random_state=rng), rng.integers(0, 4, 30)
estimators = {
    "ppdsparse": (xs.PPDSparse(), Y), "rounds, groups": (xs.PPDSparse(all_rows=False, guide=1.0, implied=0.1), Y),
    "pdsparse": (xs.PDSparse(max_passes=2), Y), "leml": (xs.LEML(rank=3, alternations=2), Y), "cplst": (xs.CPLST(rank=3), Y),
    "group-lasso": (xs.GroupLasso(max_passes=5), y), "memoir": (xs.MEMOIR(steps=20), y),
    "tree": (xs.LabelTree(max_leaf=2, root=2, branching=2, n_trees=2), Y),
}
told = {}
for name, (estimator, labels) in estimators.items():
    fitted = estimator.fit(X, labels)
    told[name] = [fitted.model_.digest(), fitted.predict_topk(X, 2)[0].tolist()]
with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "t.txt")
    text.write_text("3 4 3\\n0,1 0:1.0 2:0.5\\n2 1:1 3:1\\n1 0:2\\n")
    told["text"] = xs.convert(text, Path(folder, "t.xmc")).fingerprint
    table = Path(folder, "t.csv")
    table.write_text("words,topic\\nred green,a\\nblue green,b\\nred,a\\n")
    options = TextOptions(text_fields=("words",), label_field="topic")
    told["raw text"] = xs.convert(table, Path(folder, "c.xmc"), text=options).fingerprint
told["numba"] = "numba" in sys.modules
print(json.dumps(told))
"""


def test_what_is_not_compiled_gives_the_same_bits() -> None:
    """One can step through every line of a small training, and what one sees is what runs."""
    told = []
    for plain in "10":
        environment = {
            **os.environ,
            "NUMBA_DISABLE_JIT": plain,
            "PYTHONPATH": str(Path(xmc_stream.__file__).parents[1]),
        }
        command = [sys.executable, "-W", "ignore", "-c", TRAIN]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    plain, compiled = told
    assert (plain.pop("numba"), compiled.pop("numba")) == (False, True)
    assert plain == compiled
    assert set(names()) - {"dismec", "parabel", "bonsai", "xr-linear"} <= set(plain)  # presets
