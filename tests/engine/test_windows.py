"""Windows of packs: one member, then its neighbours, in few requests."""

from __future__ import annotations

import random
import threading
from typing import Any, cast

import pytest

from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.location import Location
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.windows import WINDOW_BYTES, Windows

PACK = random.Random(3).randbytes(5 * WINDOW_BYTES + 77)


class Remote:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.fails = 0
        self.gate = threading.Event()
        self.gate.set()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        self.gate.wait(10)
        if self.fails:
            self.fails -= 1
            raise RemoteUnavailableError("away")
        assert offset + length <= len(PACK)
        return PACK[offset : offset + length]


def read(windows: Windows, remote: Any, offset: int, length: int = 4096, key: str = "k") -> bytes:
    at = Location(key, offset, length)
    return bytes(windows.read(cast("RemoteStore", remote), at, len(PACK)))


def test_a_lone_miss_brings_its_member_alone() -> None:
    remote, windows = Remote(), Windows()
    for key in "abc":
        assert read(windows, remote, 8192, key=key) == PACK[8192:12288]
    assert remote.asked == [(8192, 4096)] * 3


@pytest.mark.parametrize("shuffled", [False, True])
def test_all_of_a_pack_in_few_requests(shuffled: bool) -> None:
    remote, windows = Remote(), Windows()
    offsets = list(range(0, len(PACK) - 4096, 4000))
    if shuffled:
        random.Random(1).shuffle(offsets)
    for offset in offsets:
        assert read(windows, remote, offset) == PACK[offset : offset + 4096]
    assert len(remote.asked) < 12
    assert sum(length for _, length in remote.asked) < 4 * len(PACK)


def test_what_is_held_is_bounded() -> None:
    remote, windows = Remote(), Windows(held_bytes=2 * WINDOW_BYTES)
    for offset in range(0, len(PACK) - 4096, 50_000):
        read(windows, remote, offset)
        assert windows._held_bytes == sum(len(held.data) for held in windows._held.values()) <= 2 * WINDOW_BYTES


def test_a_failure_is_one_readers_and_forgotten() -> None:
    remote, windows = Remote(), Windows()
    read(windows, remote, 0)
    remote.fails = 1
    with pytest.raises(RemoteUnavailableError):
        read(windows, remote, 4096)
    assert read(windows, remote, 4096) == PACK[4096:8192]
    windows.forget("k")
    assert not windows._held_bytes
    remote.asked.clear()
    read(windows, remote, 4096)
    assert remote.asked == [(4096, 4096)]


def test_those_who_want_the_same_window_wait_for_one_request() -> None:
    remote, windows = Remote(), Windows()
    read(windows, remote, 0)
    remote.asked.clear()
    remote.gate.clear()
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda i=i: got.append(read(windows, remote, 100 * i))) for i in range(8)]
    for thread in threads:
        thread.start()
    while not remote.asked:
        pass
    remote.gate.set()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(PACK[100 * i : 100 * i + 4096] for i in range(8))
    assert len(remote.asked) == 1


def test_windows_that_are_not_read_are_given_up_and_tried_again() -> None:
    remote, windows = Remote(), Windows(held_bytes=2 * WINDOW_BYTES)
    rng = random.Random(5)
    for i in range(300):
        read(windows, remote, rng.randrange(5 * WINDOW_BYTES), key=f"k{i % 60}")
    assert windows.unread_bytes > 0.9 * (windows.neighbours_bytes - windows._held_bytes)
    remote.asked.clear()
    for i in range(200):
        read(windows, remote, rng.randrange(5 * WINDOW_BYTES), key=f"k{i % 60}")
    assert sum(length > 4096 for _, length in remote.asked) < 8
    for _ in range(4):  # read in order again, it pays again
        for offset in range(0, len(PACK) - 4096, 4096):
            read(windows, remote, offset)
    remote.asked.clear()
    for offset in range(0, len(PACK) - 4096, 4096):
        read(windows, remote, offset, key="other")
    assert len(remote.asked) < 12
