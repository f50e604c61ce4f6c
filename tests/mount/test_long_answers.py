"""No READ is answered by a message that the kernel may have no room for: the one way out of the daemon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio

from aof2.engine.foreground import Foreground
from aof2.fs.channel_wire import HELD
from aof2.fs.ops import LONG_ANSWER, Operations

CONTIGUOUS_FREE_BYTES = 80 << 10  # past it, a message takes pages in a row


class Kernel:
    """Takes what is handed over."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int, bytes]] = []

    def hand_over(self, fh: int, offset: int, data: bytes) -> int:
        self.taken.append((fh, offset, data))
        return HELD + len(self.taken)


def operations(kernel: Kernel) -> Any:
    """With one kind, whose every handle has the bytes that are asked for in memory alone."""

    async def read(offset: int, size: int) -> bytes:
        return bytes([offset % 251]) * size

    async def handle(_: int) -> SimpleNamespace:
        return SimpleNamespace(read=read)

    kinds = SimpleNamespace(handle=handle, folded=None)
    volume = SimpleNamespace(foreground=Foreground())
    return Operations(volume, kernel, SimpleNamespace(kinds=kinds))  # type: ignore[arg-type]


def test_what_the_socket_may_lose_goes_around_it() -> None:
    assert LONG_ANSWER + 4096 < CONTIGUOUS_FREE_BYTES
    kernel = Kernel()
    ops = operations(kernel)

    async def main() -> None:
        for size in (0, 1, LONG_ANSWER):
            assert await ops.read(7, 5, size) == b"\5" * size
        assert kernel.taken == []
        for size in (LONG_ANSWER + 1, 1 << 20):
            with pytest.raises(pyfuse3.FUSEError) as answer:
                await ops.read(7, 5, size)
            assert answer.value.errno == HELD + len(kernel.taken)
            assert kernel.taken[-1] == (7, 5, b"\5" * size)

    trio.run(main)
