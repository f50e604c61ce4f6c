"""The kinds of one mount: who answers for an inode, and what all of them say together.

The kernel asks as soon as the mount is there, while kinds still take over what the last one left: such a request waits.

Invariant: no request is answered before every kind has begun (`folded`, `is_folded`).

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import os_error
from aof2.engine.kinds import registry
from aof2.engine.kinds.kernel import AppendState, Kernel, Short, Touched
from aof2.engine.kinds.kind import Answers, Asked, FileHandle, Kind, Unsealed, Way
from aof2.engine.kinds.opens import OPENED_FH, Opens
from aof2.engine.kinds.registry import MountWish, Surroundings

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

TOP: int = 0  # the stream of what is in no tenant: the root of the mount, and `.aof2/`


class Kinds:
    """By the stream of an inode. `begun`: their caller has run them already."""

    def __init__(self, by_stream: dict[int, Kind], opens: Opens, *, begun: bool = True) -> None:
        self._begun = trio.Event()
        if begun:
            self._begun.set()
        self._by_stream = by_stream
        self.all: list[Kind] = list(dict.fromkeys(by_stream.values()))
        self.opens = opens

    async def begin(self, nursery: trio.Nursery) -> None:
        """Runs them; requests that came before are answered from here on."""
        for kind in self.all:
            await nursery.start(kind.run)
        self._begun.set()

    def of(self, ino: int) -> Kind:
        """The kind that answers for an inode."""
        try:
            return self._by_stream[stream_of(ino)]
        except KeyError:
            raise os_error(errno.ENOENT) from None

    def answers(self) -> dict[int, Answers]:
        """What the channel may answer by itself, by stream."""
        return {stream_id: kind.answers(stream_id) for stream_id, kind in self._by_stream.items()}

    async def folded(self, ino: int, asked: Asked = Asked.ANY) -> Kind:
        """The same, with rows that show all that was acknowledged."""
        if not self._begun.is_set():
            await self._begun.wait()
        kind = self.of(ino)
        if not kind.is_folded(ino, asked):
            await kind.fold()
        return kind

    @asynccontextmanager
    async def opening(self, ino: int) -> AsyncIterator[Kind]:
        """`folded`, for an open: a file that loses its name in that very fold can be opened all the same, as one that
        was looked up before it was removed."""
        with self.of(ino).opening(ino):
            yield await self.folded(ino)

    def is_folded(self, ino: int, asked: Asked) -> bool:
        """Whether `folded` has nothing to wait for."""
        return self._begun.is_set() and self.of(ino).is_folded(ino, asked)

    async def fold(self) -> None:
        """What any caller was told shows in the rows of all tenants when this returns."""
        for kind in self.all:
            await kind.fold()

    async def handle(self, number: int) -> FileHandle:
        """An open file. What the channel opened by itself is known once it is folded. EBADF."""
        for kind in self.all:
            if not kind.is_folded(0, Asked.HANDLE):
                await kind.fold()
            if number & OPENED_FH and self.opens.find(number) is None:
                await kind.take_opened(number)
        return self.opens.get(number)

    # -- all together ------------------------------------------------------------------------------------------

    def way(self) -> Way:
        """How files of the mount are served: as the kind says that the kernel has a part in."""
        return next((way for kind in self.all if (way := kind.way()) is not None), Way())

    def is_open(self, ino: int) -> bool:
        return self.of(ino).is_open(ino)

    def is_kept_unsealed(self, ino: int) -> bool:
        """Whether a process that has it open keeps it from being sealed."""
        return self.of(ino).is_kept_unsealed(ino)

    def open_inos(self) -> set[int]:
        return set().union(*(kind.open_inos() for kind in self.all))

    def open_count(self) -> int:
        return sum(kind.open_count() for kind in self.all)

    def writing(self) -> set[int]:
        """Inodes of files that are open for writing."""
        return set().union(*(kind.writing() for kind in self.all))

    def unsealed(self) -> Unsealed:
        counts = [kind.unsealed() for kind in self.all]
        return Unsealed(sum(one.files for one in counts), sum(one.bytes for one in counts))

    def unsealed_inos(self) -> set[int]:
        return set().union(*(kind.unsealed_inos() for kind in self.all))

    async def seal(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        """Seals what is closed and dirty now, of these or all; how many files. `begin`: their upload begins with it."""
        return sum([await kind.seal(inos, begin=begin) for kind in self.all])

    def stop_ahead(self) -> None:
        for kind in self.all:
            kind.stop_ahead()

    def refuse_writes(self) -> int:
        return sum(kind.refuse_writes() for kind in self.all)

    async def sync_all(self) -> None:
        for kind in self.all:
            await kind.sync_all()

    # -- what the channel tells --------------------------------------------------------------------------------

    def refused(self, ino: int, _: int) -> None:
        self.of(ino).refused(ino)

    def used(self, inos: Sequence[int]) -> None:
        for ino in inos:
            self.of(ino).used((ino,))

    def changes_waiting(self) -> None:
        for kind in self.all:
            kind.changes_waiting()

    def room_short(self, short: Short) -> None:
        kind = self._by_stream.get(short.stream_id)
        if kind is not None:
            kind.room_short(short)

    def touched(self, touched: Touched) -> None:
        self.of(touched.ino).touched(touched)

    def appended(self, state: AppendState) -> None:
        self.of(state.nodeid).appended(state)

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        self.of(nodeid).partial(nodeid, fh, data)


def make_kinds(
    volume: Volume, kernel: Kernel, wish: MountWish, top: Callable[[Opens, Mapping[int, Kind]], Kind]
) -> Kinds:
    """A kind object for each kind that a tenant of the volume has; `top` makes the one for what is in no tenant."""
    opens = Opens()
    by_stream: dict[int, Kind] = {}
    made: dict[int, Kind] = {}
    for number, tenants in sorted(volume.tenants.by_kind().items()):
        made[number] = registry.by_number(number).make(Surroundings(volume, kernel, opens, wish, tenants, dict(made)))
        by_stream |= dict.fromkeys(tenants, made[number])
    return Kinds({**by_stream, TOP: top(opens, by_stream)}, opens, begun=False)
