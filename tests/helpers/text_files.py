"""Raw text for tests: files of records, and a source read and settled as the conversion does it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from xmc_stream.convert.pieces import Piece, new_piece
from xmc_stream.convert.source import PartRead, Settled
from xmc_stream.runtime.job import Notes, run_here

SYLLABLES = "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu ñe ß ž 日 本 𐐷x".split()


def documents(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records with words of very different frequencies (accents and letters beyond 16 bits too) and names of labels."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(3000)]
    weights = [1 / (i + 1) for i in range(len(words))]
    labels = [f"Label {i} é" for i in range(40)]
    return [
        {
            "uid": str(i),
            "title": " ".join(rng.choices(words, weights, k=3)).title(),
            "content": ", ".join(rng.choices(words, weights, k=rng.randint(0, 60))),
            "labels": rng.sample(labels, rng.randint(0, 3)),
        }
        for i in range(n)
    ]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def settled(source: Any, work: Path, room: int = 2**26) -> Settled:
    """Read the parts of a source into pieces under `work`, and settle them."""
    source.load_kernels()
    source.fit(room)
    read = []
    for i, part in enumerate(source.parts()):
        notes: dict[str, Any] = {"folder": str(work / f"part-{i}")}
        with ExitStack() as stack:
            writers = [stack.enter_context(new_piece(work / f"{side}-{i}", side == "X")) for side in part.sides]
            for block in part.blocks(notes):
                for writer, rows in zip(writers, block, strict=True):
                    writer.append(*rows)
        pieces = {side: writer.piece() for side, writer in zip(part.sides, writers, strict=True)}
        read.append(PartRead(pieces, json.loads(json.dumps(notes))))
    loop = source.settle(work / "settled", read)
    result: Any = run_here(loop, Notes())
    return result


def matrix(pieces: Sequence[Piece], n_columns: int, base: int = 0) -> scipy.sparse.csr_matrix:
    """The rows of pieces in turn."""
    parts = []
    for piece in pieces:
        indptr = np.concatenate([[0], np.cumsum(np.concatenate([[], *(w.copy() for w in piece.lengths())]))])
        indices = np.concatenate([np.zeros(0, np.int64), *(w - base for w in piece.indices())])
        data = (
            np.concatenate([np.zeros(0, np.float32), *(w.copy() for _, w in piece.values())])
            if piece.valued
            else np.ones(len(indices), np.float32)
        )
        parts.append(scipy.sparse.csr_matrix((data, indices, indptr), shape=(piece.n_rows, n_columns)))
    return scipy.sparse.csr_matrix(scipy.sparse.vstack(parts))
