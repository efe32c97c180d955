"""Compressed text: every form converts to the same dataset, damage ends in one line, windows are within the limit."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import environment
from helpers.compiler import needs_compiler
from helpers.conversions import TEXT, dense, opened, refused, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmc_stream.convert import convert
from xmc_stream.convert.lines.compression import Decompressing
from xmc_stream.errors import InputError, MemoryLimitError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIB = 2**20
ZSTD = zstd.CompressionParameter


def zstd_frame(content: bytes, window_log: int = 20) -> bytes:
    """A frame of unknown length with this window and a checksum."""
    options = {ZSTD.window_log: window_log, ZSTD.checksum_flag: 1}
    packer = zstd.ZstdCompressor(options=options)
    return packer.compress(content) + packer.flush()


def xz_stream(content: bytes, dictionary: int = 2**20) -> bytes:
    """A stream with a dictionary of so many bytes."""
    return lzma.compress(content, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": dictionary}])


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": xz_stream,
    "zstd": zstd_frame,
}
kinds = pytest.mark.parametrize("kind", PACK)


def rows(path: Path, room: int = 2**22) -> list[Any]:
    """All that is read of a text: indptrs as lengths of rows, and entries."""
    text = opened([path])
    text.fit(room)
    [part] = text.parts()
    blocks = [[np.diff(a), b.copy(), c.copy(), np.diff(d), e.copy()] for (a, b, c), (d, e, _) in part.blocks({})]
    return [np.concatenate(parts).tolist() for parts in zip(*blocks, strict=True)]


def long_text(n: int = 5000) -> bytes:
    rng = np.random.default_rng(0)
    return b"%d 100 9\n" % n + b"".join(b"%d %d:%.6f\n" % (i % 9, i % 100, v) for i, v in enumerate(rng.random(n)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[list[int]], int, int]:
    """Rows of X and of Y in any order, D and K."""
    n, n_features, n_labels = draw(st.integers(0, 12)), draw(st.integers(1, 30)), draw(st.integers(1, 9))
    value = st.floats(width=32, allow_nan=False, allow_infinity=False)
    x = st.lists(st.dictionaries(st.integers(0, n_features - 1), value, max_size=8), min_size=n, max_size=n)
    y = st.lists(st.lists(st.integers(0, n_labels - 1), unique=True), min_size=n, max_size=n)
    return draw(x), draw(y), n_features, n_labels


def packed(content: bytes, kind: str, cut: int) -> bytes:
    """The content in two compressed streams, one of them possibly empty."""
    at = cut % (len(content) + 1)
    return PACK[kind](content[:at]) + PACK[kind](content[at:]) if kind else content


@given(
    problems(),
    st.tuples(*[st.sampled_from(["", *PACK])] * 3),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"1", b"1.0", b"-2e3"]),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_form_and_compression_converts_to_the_same_dataset(
    tmp_path: Path,
    problem: tuple[list[dict[int, float]], list[list[int]], int, int],
    packing: tuple[str, str, str],
    newline: bytes,
    one: bytes,
    cut: int,
    ends: bool,
) -> None:
    x, y, n_features, n_labels = problem
    pairs = [b" ".join(b"%d:%s" % (j, repr(v).encode()) for j, v in row.items()) for row in x]
    lists = [b",".join(b"%d" % label for label in row) for row in y]
    last = newline if ends or not x else b"\n"  # an empty last row needs its newline
    headers = [(len(x), n_features, n_labels), (len(x), n_features), (len(x), n_labels)]
    bodies = [
        [labels + b" " + row for labels, row in zip(lists, pairs, strict=True)],
        pairs,
        [
            b" ".join(
                [b"%d:%s" % (label, one) for label in row] + [b"%d:0" % k for k in range(n_labels) if k not in row]
            )
            for row in y
        ],
    ]
    files = [
        packed(newline.join([b" ".join(b"%d" % n for n in header), *body]) + last, kind, cut)
        for header, body, kind in zip(headers, bodies, packing, strict=True)
    ]
    whole = convert(write(tmp_path / "one.txt", files[0]), tmp_path / "one.xmc", overwrite=True)
    split = convert(
        write(tmp_path / "x", files[1]), tmp_path / "two.xmc", labels=write(tmp_path / "y", files[2]), overwrite=True
    )
    assert whole.fingerprint == split.fingerprint
    got_x, got_y = dense(split)
    expected_x, expected_y = np.zeros(got_x.shape, np.float32), np.zeros(got_y.shape, int)
    for i in range(len(x)):
        expected_x[i, list(x[i])] = list(x[i].values())
        expected_y[i, y[i]] = 1
    assert (got_x == expected_x).all()
    assert (got_y == expected_y).all()


@kinds
def test_streams_and_padding_that_follow_each_other_are_one_text(tmp_path: Path, kind: str) -> None:
    pack, plain = PACK[kind], rows(write(tmp_path / "a.txt", TEXT))
    middle = len(TEXT) // 2
    for content in (
        pack(TEXT),
        pack(TEXT) + bytes(8),
        pack(TEXT) + bytes(300_000),
        pack(b"") + pack(TEXT[:middle]) + pack(TEXT[middle:]) + pack(b""),
        pack(TEXT[:middle]) + bytes(300_000) + pack(TEXT[middle:]) + bytes(4),
        b"".join(pack(TEXT[i : i + 1]) for i in range(len(TEXT))),
    ):
        assert rows(write(tmp_path / "a.packed", content)) == plain
    text = opened([tmp_path / "a.packed"])
    assert text.attributes["source_format"] == f"XMLRepo text, {kind}"
    assert text.x_entries is None


def test_a_frame_of_zstd_to_be_skipped_is_skipped(tmp_path: Path) -> None:
    skipped = b"\x53\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"any bytes"
    content = skipped + zstd_frame(TEXT) + skipped + skipped
    assert rows(write(tmp_path / "a.zst", content)) == rows(write(tmp_path / "a.txt", TEXT))


@kinds
def test_damaged_data_name_the_line_reached(tmp_path: Path, kind: str) -> None:
    text = long_text(60_000)  # several blocks of bzip2
    whole = PACK[kind](text)
    message = refused(tmp_path / "d.xmc", write(tmp_path / "cut", whole[: len(whole) * 3 // 4]))
    line = int(message.removeprefix(f"{tmp_path / 'cut'}:").split(":")[0])
    assert 15_000 < line < 59_000 or kind == "bzip2"
    assert f"the {kind} data end early at this line of the text" in message
    for name, content in {
        "bits": whole[: len(whole) // 2] + bytes(1000) + whole[len(whole) // 2 + 1000 :],
        "behind": whole + b"garbage that is no stream at all",
        "checksum": whole[:-30] + bytes(30),
    }.items():
        message = refused(tmp_path / "d.xmc", write(tmp_path / name, content))
        assert re.match(rf"{re.escape(str(tmp_path / name))}:\d+: ", message)
        assert f"the {kind} data " in message
    labels = write(tmp_path / "y.txt", b"60000 9\n" + b"1:1\n" * 60_000)
    part = PACK[kind](b"60000 9\n" + b"1:1\n" * 60_000)[:-4]
    features = write(tmp_path / "x.txt", b"60000 9\n" + b"1:1\n" * 60_000)
    for x, y, bad in ((features, write(tmp_path / "part", part), "part"), (tmp_path / "part", labels, "part")):
        message = refused(tmp_path / "d.xmc", x, labels=y)
        assert re.match(rf"{re.escape(str(tmp_path / bad))}:\d+: the {kind} data end early", message)


@kinds
def test_any_cut_is_an_error_and_no_flipped_bit_passes(tmp_path: Path, kind: str) -> None:
    text = long_text(60)
    whole, path = PACK[kind](text), tmp_path / "a"
    plain = rows(write(path, text))
    for n in range(len(whole)):
        with pytest.raises(InputError):
            rows(write(path, whole[:n]))
    rng = np.random.default_rng(1)
    unnoticed, messages = 0, []
    for place in rng.choice(len(whole), 200):
        bad = bytearray(whole)
        bad[place] ^= 1 << int(rng.integers(8))
        try:
            assert rows(write(path, bytes(bad))) == plain  # a bit without a meaning
            unnoticed += 1
        except InputError as error:
            messages.append(str(error))
    assert all(message.startswith(f"{path}:") and message.isprintable() for message in messages)
    assert unnoticed < 20


LARGER = {
    "xz": lambda content: xz_stream(content, 2**25),
    "zstd": lambda content: zstd_frame(content, 25),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGER)
def test_a_window_is_planned_as_large_as_the_file_says(tmp_path: Path, kind: str) -> None:
    for log in (10, 20, 22, 24, 26):
        content = xz_stream(TEXT, max(4096, 1 << log)) if kind == "xz" else zstd_frame(TEXT, log)
        [(name, held)] = opened([write(tmp_path / "a", content)]).overhead.items()
        assert name == f"decompression of {tmp_path / 'a'}"
        assert (1 << log) + MIB / 2 < held < max((1 << log) + 2 * MIB, 6 * MIB)
    here = json.loads(child("print(json.dumps(resident()))")) + 120 * 10**6
    large = xz_stream(TEXT, 2**28) if kind == "xz" else zstd_frame(TEXT, 28)
    message = refused(tmp_path / "d.xmc", write(tmp_path / "b", large), memory_limit=here, kind=MemoryLimitError)
    assert f"decompression of {tmp_path / 'b'} 269 MB" in message


@pytest.mark.parametrize("kind", LARGER)
def test_a_later_stream_with_a_larger_window_is_refused_where_it_does_not_fit(tmp_path: Path, kind: str) -> None:
    middle = TEXT.index(b"1\n\n")
    path = write(tmp_path / "a", PACK[kind](TEXT[:middle]) + LARGER[kind](TEXT[middle:]))
    with pytest.raises(
        MemoryLimitError, match=rf"a:4: the {kind} data need more memory from this line .* memory_limit"
    ):
        rows(path, 2**24)
    assert rows(path, 2**27) == rows(write(tmp_path / "b", TEXT))


def test_a_decompressor_gives_no_more_than_asked_for() -> None:
    bomb = zstd_frame(bytes(10**8))
    assert len(bomb) < 10**5
    stream = Decompressing(io.BufferedReader(io.BytesIO(bomb)), "zstd")  # type: ignore[arg-type]
    buffer = bytearray(1000)
    assert 0 < stream.readinto(buffer) <= 1000
    assert stream.readinto(bytearray(0)) == 0
    assert sum(iter(lambda: stream.readinto(bytearray(10**6)), 0)) > 10**8 - 1001


def child(code: str, *arguments: object) -> str:
    """What a fresh process prints."""
    prelude = (
        "import json, sys\nfrom xmc_stream.convert import convert\nfrom xmc_stream.system.memory import resident\n"
    )
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


CONVERT = """
convert(sys.argv[1], sys.argv[2], memory_limit="512MB")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@needs_compiler
@pytest.mark.parametrize("kind", LARGER)
def test_memory_keeps_the_limit_and_the_plan_covers_the_window(tmp_path: Path, kind: str) -> None:
    line = b"7 " + b" ".join(b"%d:%d" % (j, j % 10) for j in range(500)) + b"\n"
    n = 23 * 10**6 // len(line)  # more than a window, so that all of it is touched
    peaks, held = [], []
    for log in (20, 24):
        if kind == "xz":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << log}]
            packer: Any = lzma.LZMACompressor(filters=filters)
        else:
            packer = zstd.ZstdCompressor(options={ZSTD.window_log: log})
        path = tmp_path / f"{log}"
        with open(path, "wb") as file:
            file.write(packer.compress(b"%d 500 9\n" % n))
            for _ in range(n // 100):
                file.write(packer.compress(line * 100))
            file.write(packer.compress(line * (n % 100)) + packer.flush())
        held += opened([path]).overhead.values()
        peaks.append(int(child(CONVERT, path, tmp_path / f"{log}.xmc")) * 1024)
    assert max(peaks) < 512 * 10**6
    assert 10 * 10**6 < peaks[1] - peaks[0] < held[1] - held[0] + 12 * 10**6
