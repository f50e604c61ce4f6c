"""Line framing and page diff."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2 import native
from aof2.native import reference
from tests.native.support import noise


@given(st.lists(st.sampled_from([b"a", b"bcd", b"\n", b"\r\n", b"\0", b"\n\n"]), max_size=60), st.integers(1, 9))
def test_lines(pieces: list[bytes], max_record: int) -> None:
    buf = b"".join(pieces)
    lengths, consumed = native.frame_lines(buf, max_record)
    assert (list(lengths), consumed) == reference.frame_lines(buf, max_record)
    assert lengths.typecode == "I"


def test_lines_at_the_edges() -> None:
    assert native.frame_lines(b"", 10)[1] == 0
    assert list(native.frame_lines(b"no newline", 11)[0]) == []
    assert list(native.frame_lines(b"no newline", 10)[0]) == [10]
    assert list(native.frame_lines(b"full line\n", 10)[0]) == [10]
    assert list(native.frame_lines(b"full lines\n", 10)[0]) == [10, 1]
    assert list(native.frame_lines(b"x\n", 2**32 - 1)[0]) == [2]
    for max_record in (0, -1, 2**32):
        with pytest.raises(ValueError, match="max_record"):
            native.frame_lines(b"x\n", max_record)


@pytest.mark.parametrize("count", [65_535, 65_536, 65_537, 200_000])
def test_many_lines(count: int) -> None:
    lengths, consumed = native.frame_lines(b"ab\n" * count + b"rest", 100)
    assert (len(lengths), set(lengths), consumed) == (count, {3}, 3 * count)


@given(st.binary(max_size=300), st.data(), st.integers(1, 40))
def test_pages(a: bytes, data: st.DataObject, page_len: int) -> None:
    b = bytearray(a[: data.draw(st.integers(0, len(a)))] + data.draw(st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 3)) if b else 0):
        b[data.draw(st.integers(0, len(b) - 1))] ^= 1
    assert native.page_diff(a, b, page_len) == reference.page_diff(a, bytes(b), page_len)
    assert native.page_diff(b, a, page_len) == reference.page_diff(a, bytes(b), page_len)


def test_pages_at_the_edges() -> None:
    assert native.page_diff(b"", b"", 4096) == (b"", 0)
    assert native.page_diff(b"", b"x", 2**63) == (b"\x01", 1)
    assert native.page_diff(b"ab", b"abc", 2) == (b"\x02", 1)
    assert native.page_diff(b"a", b"ab", 2) == (b"\x01", 1)
    page = noise(4096)
    assert native.page_diff(page * 9, page * 8 + page[:-1] + b"?", 4096) == (b"\x00\x01", 1)
    with pytest.raises(ValueError, match="page_len 0"):
        native.page_diff(b"", b"", 0)


def test_buffers_are_let_go() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        assert native.page_diff(mapped, mapped, 512)[1] == 0
        assert native.frame_lines(mapped, 4096)[1] == 4096
        mapped.resize(8192)  # refused while anything holds the buffer
