"""All kernels that trainings and models use, compiled into the cache: `python -m helpers.all_kernels` in tests/."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import xmc_stream as xs
from xmc_stream.convert.options import TextOptions
from xmc_stream.factors.predict import ScoreWarmUp
from xmc_stream.grouplasso.method import GroupLassoWarmUp
from xmc_stream.grouplasso.predict import RowsWarmUp
from xmc_stream.linear.predict import LinearWarmUp
from xmc_stream.lowrank.method import LEMLWarmUp
from xmc_stream.memoir.method import MEMOIRWarmUp
from xmc_stream.pdsparse.method import PDSparseWarmUp
from xmc_stream.ppdsparse.method import PPDSparseWarmUp
from xmc_stream.ppdsparse.parameters import PPDSparseParameters
from xmc_stream.tree.method import TreeWarmUp
from xmc_stream.tree.predict import TreesWarmUp


def compile_all() -> None:
    """Takes three minutes where nothing is compiled, else seconds."""
    options = PPDSparseParameters(cut=0.1, delta=1.0, min_value=0.1)
    for job in (
        PPDSparseWarmUp(options, again=True, large=True, guided=True),
        PPDSparseWarmUp(dense=True, fours=True),
        PPDSparseWarmUp(guided=True, lifts=True, all_rows=True),
        PDSparseWarmUp(), LEMLWarmUp(), GroupLassoWarmUp(),
        LinearWarmUp(True, guided=True, fours=True),
        LinearWarmUp(False, guided=True, fours=True), ScoreWarmUp(), RowsWarmUp(), MEMOIRWarmUp("l1", "sw-graph"),
        MEMOIRWarmUp("l2", "exact"), MEMOIRWarmUp("lsh", "simple-lsh"), MEMOIRWarmUp("lsh", "exact"),
        TreeWarmUp(), TreesWarmUp(),
    ):  # fmt: skip
        job.run()
    with tempfile.TemporaryDirectory() as folder:
        convert_all(Path(folder))


def convert_all(folder: Path) -> None:
    """A few rows of each kind of text, written again and verified: or the first test of a command would compile in it."""
    rows = [
        {"text": "red \u00e9 green", "labels": ["a", "b"], "id": 7},
        {"text": "red \\ blue", "labels": ["b"], "id": 8},
    ]
    texts = {
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "rows.csv": 'text,labels\n"red, green",a\nblue red,b\n',
        "rows.svm": "0,1 1:1 0:0.25\n1 2:3\n",
        "rows.txt": "2 3 2\n0,1 0:1.0 2:1e-3\n1 1:7\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        for words in (TextOptions(), TextOptions(hash_features=2**10)) if name.endswith(("jsonl", "csv")) else (None,):
            data = xs.convert(
                folder / name, folder / "data.xmc", text=words, columns=True, memory_limit="4GB", overwrite=True
            )
    xs.export(data, folder / "out.txt", memory_limit="4GB")
    xs.verify(data.path, memory_limit="4GB")


if __name__ == "__main__":
    compile_all()
