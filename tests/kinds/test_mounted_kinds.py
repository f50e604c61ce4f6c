"""The kinds of a mount: what the channel tells reaches the one it is about; requests wait until all have begun."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.testing

from aof2.engine.catalog.rows import INO_STREAM_SHIFT
from aof2.engine.kinds.kernel import AppendState
from aof2.engine.kinds.kind import Asked, Kind
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.kinds.opens import Opens


class Hears:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def appended(self, state: AppendState) -> None:
        self.heard.append(state)

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        self.heard.append((nodeid, fh, data))


def test_by_the_stream_of_the_inode() -> None:
    one, two = Hears(), Hears()
    kinds = Kinds({1: cast(Kind, one), 2: cast(Kind, two)}, Opens())
    ino = 2 << INO_STREAM_SHIFT | 5
    state = AppendState(ino, 7, 96, 0, 0, 0, 0)
    kinds.partial(ino, 3, b"begun")
    kinds.appended(state)
    kinds.partial(1 << INO_STREAM_SHIFT, 4, b"")
    assert two.heard == [(ino, 3, b"begun"), state]
    assert one.heard == [(1 << INO_STREAM_SHIFT, 4, b"")]
    with pytest.raises(FileNotFoundError):
        kinds.partial(9 << INO_STREAM_SHIFT, 4, b"")


class Runs:
    """A kind that takes a while to begin."""

    def __init__(self) -> None:
        self.may_begin = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.may_begin.wait()
        task_status.started()

    def is_folded(self, ino: int, asked: Asked) -> bool:
        return True


@pytest.mark.timeout(20)
def test_no_request_is_answered_before_all_have_begun() -> None:
    async def main() -> None:
        quick, slow = Runs(), Runs()
        kinds = Kinds({1: cast(Kind, quick), 2: cast(Kind, slow)}, Opens(), begun=False)
        ino, found = 1 << INO_STREAM_SHIFT | 5, []

        async def ask() -> None:
            found.append(await kinds.folded(ino))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kinds.begin, nursery)
            nursery.start_soon(ask)
            quick.may_begin.set()
            await trio.testing.wait_all_tasks_blocked()
            assert found == [] and not kinds.is_folded(ino, Asked.LOOK_UP)
            slow.may_begin.set()
        assert found == [quick] and kinds.is_folded(ino, Asked.LOOK_UP)

    trio.run(main)
