"""Mutated texts for the parser and its twin."""

from __future__ import annotations

import random

from reference import parse as twin

from helpers.parsing import agree
from xmc_stream.convert.lines.parser import UNKNOWN

N_FEATURES, N_LABELS = 40, 30


BYTES = b"0123456789:,.+-eE# \t\n\r\0\x0b\xff\xc3naqidx"


TOKENS = [
    b"nan", b"inf", b"-inf", b"1e400", b"1e-400", b"9" * 19, b"0" * 25, b"1." + b"0" * 30, b"3.4028235677973366e38",
    b"7.0064923216240853546186479164495806564013097093825788587853e-46", b"qid:3", b"+1", b"-1", b"1.0", b"0.5", b"#",
    b"\xef\xbb\xbf", b"\0" * 5, b"\r", b"\r\n", b"\n", b"\n\n", b" ", b", ", b"1,", b":", b"::", b"7:", b":7", b"0:1",
    b"40:1", b"30", b"39:-0.0", b"18446744073709551616:1", b"4294967297:1", b"1_0:1", b"0x1:1", b"1:0x1", b"1:1e", b"1:.",
]  # fmt: skip


def good_line(rng: random.Random) -> bytes:
    """A line without faults, of either dialect."""
    labels = sorted(rng.sample(range(1, N_LABELS), rng.choice([0, 1, 1, 2, 5])))
    n = rng.choice([0, 1, 3, 8, 20])
    features = rng.sample(range(1, N_FEATURES), n)
    if rng.random() < 0.8:
        features.sort()
    form = rng.choice(["{:.6g}", "{:.9f}", "{:e}", "{:.17g}", "{:+.1f}"])
    pairs = [f"{j}:{form.format(rng.gauss(0, 10 ** rng.randint(-3, 3)))}" for j in features]
    line = ",".join(map(str, labels)) + "".join(" " + pair for pair in pairs)
    return line.encode() + rng.choice([b"\n", b"\n", b"\n", b"\r\n", b" \n", b" # a comment\n"])


def mutated(rng: random.Random, text: bytearray) -> None:
    """One change of a text, in place."""
    place = rng.randrange(len(text) + 1)
    stop = min(len(text), place + rng.choice([1, 1, 2, 5, 30]))
    kind = rng.randrange(8)
    if kind == 0:
        text[place : place + 1] = bytes([rng.choice(BYTES)])
    elif kind == 1 and place < len(text):
        text[place] ^= 1 << rng.randrange(8)
    elif kind == 2:
        text[place:place] = bytes([rng.choice(BYTES)])
    elif kind == 3:
        del text[place:stop]
    elif kind == 4:
        text[place:place] = text[place:stop]
    elif kind == 5:
        text[place:place] = rng.choice(TOKENS)
    elif kind == 6:
        text[place:place] = b" " + rng.choice(TOKENS) + b" "
    elif rng.random() < 0.1:  # long
        text[place:place] = bytes([rng.choice(BYTES)]) * rng.choice([100, 5000])


def fuzz(n: int, seed: int) -> int:
    """Compare parser and twin on n texts; returns how many of them held rows. Raises AssertionError with the text."""
    rng = random.Random(seed)
    pool = [good_line(rng) for _ in range(500)]
    n_good = 0
    for i in range(n):
        text = bytearray(b"".join(rng.choices(pool, k=rng.choice([1, 1, 2, 4]))))
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            mutated(rng, text)
        rules = twin.Rules(
            libsvm=rng.random() < 0.5,
            x_base=rng.choice([0, 1, None]),
            y_base=rng.choice([0, 1, None]),
            skip=rng.random() < 0.5,
            sum_duplicates=rng.random() < 0.5,
            drop_unseen=rng.random() < 0.5,
        )
        sizes = (UNKNOWN, UNKNOWN) if rng.random() < 0.1 else (N_FEATURES, N_LABELS)
        try:
            n_good += agree(bytes(text), *sizes, rules)
        except Exception as error:
            raise AssertionError(f"text {i} of seed {seed}: {bytes(text)!r} by {rules}") from error
    return n_good
