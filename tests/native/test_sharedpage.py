"""The page that daemon and channel share: what the daemon takes, and that it waits for the channel's step."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.native.sharedpage import SharedPage, length

LOCK_AT, TOTAL_AT, STREAMS_AT = 4, 8, 16
SLOTS = 1 << 16


@pytest.fixture
def shared() -> Iterator[tuple[SharedPage, mmap.mmap]]:
    fd = os.memfd_create("page")
    os.ftruncate(fd, length())
    try:
        yield SharedPage(fd), mmap.mmap(fd, length())
    finally:
        os.close(fd)


def test_each_word_is_where_the_channel_has_it(shared: tuple[SharedPage, mmap.mmap]) -> None:
    page, raw = shared
    struct.pack_into("<Q", raw, TOTAL_AT, 2**63 + 7)
    for slot in (0, 3, 15):
        struct.pack_into("<Q", raw, STREAMS_AT + 16 * slot, 1000 + slot)
        assert page.end(slot) == 1000 + slot
        assert struct.unpack_from("<Q", raw, STREAMS_AT + 16 * slot + 8) == (0,)
        assert page.take(slot) == 1000 + slot
        assert struct.unpack_from("<Q", raw, STREAMS_AT + 16 * slot + 8) == (1000 + slot,)
    page.arm()
    assert struct.unpack_from("<II", raw) == (1, 0)  # armed, and the lock given back
    assert page.total() == 2**63 + 7
    assert (page.end(16), page.take(16)) == (0, 0)
    assert raw[STREAMS_AT + 256 :] == bytes(len(raw) - STREAMS_AT - 256)


def test_taking_waits_for_a_close_that_is_being_recorded(shared: tuple[SharedPage, mmap.mmap]) -> None:
    page, raw = shared
    struct.pack_into("<I", raw, LOCK_AT, 1)
    found: list[int] = []
    taker = threading.Thread(target=lambda: found.append(page.take(0)))
    taker.start()
    struct.pack_into("<Q", raw, STREAMS_AT, 72)  # the record, and then the drop: both before the lock is given back
    struct.pack_into("<I", raw, LOCK_AT, 0)
    taker.join()
    assert found == [72]


def test_a_channel_that_was_killed_with_the_lock_is_not_waited_for(shared: tuple[SharedPage, mmap.mmap]) -> None:
    page, raw = shared
    struct.pack_into("<IQQ", raw, LOCK_AT, 1, 0, 144)
    struct.pack_into("<Q", raw, STREAMS_AT, 144)
    assert page.take(0) == 144
    assert struct.unpack_from("<IQQQ", raw, LOCK_AT) == (1, 0, 144, 0)  # it may live: lock and `taken` are as they were


def test_nothing_is_appended_without_the_lock(shared: tuple[SharedPage, mmap.mmap], tmp_path: Path) -> None:
    """The channel may be in the middle of a record, at the same place."""
    page, raw = shared
    struct.pack_into("<I", raw, LOCK_AT, 1)
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="busy"):
        page.append(0, fd, b"x" * 72)
    assert os.fstat(fd).st_size == 0 and page.end(0) == 0
    os.close(fd)


def test_both_sides_append_in_one_order(shared: tuple[SharedPage, mmap.mmap], tmp_path: Path) -> None:
    page, raw = shared
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    records = [bytes([n]) * 72 for n in range(200)]
    threads = [threading.Thread(target=lambda n=n: [page.append(3, fd, r) for r in records[n::4]]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.end(3) == page.total() == 200 * 72
    data = (tmp_path / "log").read_bytes()
    assert sorted(data[i : i + 72] for i in range(0, len(data), 72)) == records
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        page.append(3, fd, records[0])
    assert page.end(3) == 200 * 72 and struct.unpack_from("<I", raw, LOCK_AT) == (0,)
    with pytest.raises(OSError, match="Invalid argument"):
        page.append(16, 0, b"")


def test_what_is_open_and_what_is_going_are_by_inode(shared: tuple[SharedPage, mmap.mmap]) -> None:
    page, raw = shared
    opens_at = STREAMS_AT + 256 + 8
    going_at = opens_at + 4 * SLOTS
    page.set_block_bytes(1 << 20)
    assert struct.unpack_from("<Q", raw, STREAMS_AT + 256) == (1 << 20,)
    ino = (3 << 40) + 77
    slot = ino * 0x9E3779B97F4A7C15 % 2**64 >> 48
    assert not page.has_open(ino)
    struct.pack_into("<I", raw, opens_at + 4 * slot, 2)
    assert page.has_open(ino) and not page.has_open(ino + 1)
    page.hold(ino)
    page.hold(ino)
    assert struct.unpack_from("<I", raw, going_at + 4 * slot) == (2,)
    page.let(ino)
    page.let(ino)
    assert struct.unpack_from("<I", raw, going_at + 4 * slot) == (0,)
    assert len(raw) >= going_at + 4 * SLOTS
