"""What the channel tells of streams reaches the kind whose inode it is about."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aof2.engine.catalog.rows import INO_STREAM_SHIFT
from aof2.engine.kinds.kernel import AppendState
from aof2.engine.kinds.kind import Kind
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
