"""SHA-256 of many messages at once, and of stretches of a file: what hashlib says, whichever way it goes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2 import native

LANES = [1, native.SPANS_MAX] if native.sha256_lanes() > 1 else [1]
EDGES = [0, 1, 54, 55, 56, 57, 63, 64, 65, 118, 119, 120, 121, 127, 128, 129, 4096, 9999]
PIECE = 4096


def expected(messages: list[bytes]) -> list[bytes]:
    return [hashlib.sha256(message).digest() for message in messages]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "f").write_bytes(random.Random(7).randbytes(40 * PIECE))
    opened = os.open(tmp_path / "f", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("lanes", LANES)
def test_every_length_at_every_place(lanes: int) -> None:
    """Each length in each lane, beside others that end before it and behind it."""
    rng = random.Random(1)
    messages = [rng.randbytes(size) for size in range(300)]
    for turn in range(16):
        turned = messages[turn:] + messages[:turn]
        assert native.sha256_many(turned, lanes=lanes) == expected(turned)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 15, 16, 17, 33, 100])
def test_any_number_of_them(lanes: int, count: int) -> None:
    rng = random.Random(count)
    for _ in range(5):
        messages = [rng.randbytes(rng.choice(EDGES)) for _ in range(count)]
        assert native.sha256_many(messages, lanes=lanes) == expected(messages)


@pytest.mark.parametrize("lanes", LANES)
def test_a_long_one_among_short_ones(lanes: int) -> None:
    rng = random.Random(3)
    messages = [rng.randbytes(size) for size in [10] * 7 + [300_001] + [64] * 30]
    assert native.sha256_many(messages, lanes=lanes) == expected(messages)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("count", [1, 4, 5, 16])
def test_stretches_of_a_file(fd: int, lanes: int, count: int) -> None:
    length = 8 * PIECE
    offsets = [i * 2 * PIECE for i in range(count)]  # they may overlap
    spans = native.Spans(fd, offsets, length, piece_bytes=PIECE, step_bytes=2 * PIECE, lanes=lanes)
    steps = 0
    while spans.left:
        spans.go_on()
        steps += 1
    assert steps == 4
    for offset, one in zip(offsets, spans.digests(), strict=True):
        data = os.pread(fd, length, offset)
        assert one.sha256 == hashlib.sha256(data).digest()
        crcs = [native.crc64(data[at : at + PIECE]) for at in range(0, length, PIECE)]
        assert one.piece_crcs == b"".join(crc.to_bytes(8, "little") for crc in crcs)


def test_a_file_that_ends_before(fd: int) -> None:
    spans = native.Spans(fd, [0, 39 * PIECE], 2 * PIECE, piece_bytes=PIECE, step_bytes=2 * PIECE)
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        spans.go_on()
    with pytest.raises(ValueError, match="not hashed yet"):
        spans.digests()


def test_lengths_that_do_not_fit(fd: int) -> None:
    for offsets, length, step in (([], 64, 64), ([0] * 17, 64, 64), ([0], 65, 64), ([0], 128, 96)):
        with pytest.raises(ValueError, match="cannot be hashed"):
            native.Spans(fd, offsets, length, piece_bytes=64, step_bytes=step)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        native.Spans(fd, [0], 100, piece_bytes=50, step_bytes=50).go_on()
