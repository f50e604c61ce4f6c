"""LOOKUP, GETATTR and READDIRPLUS, as fast as they go: from the channel's message to the answer's bytes, in one step.

They come as upcalls, past libfuse and pyfuse3: a request's way through tasks, locks and objects there takes longer
than the answer. What is answered is what `ops.py` would answer.

Invariants
- `answer` never waits: where the catalog is behind what was answered before, it says so, and the request goes on as a
  task (`answer_in_time`).
- Nothing but OSError leaves here.

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

from aof2.engine.errors import os_error
from aof2.engine.foreground import Foreground
from aof2.engine.kinds.kind import Asked
from aof2.fs.answers import code_of
from aof2.fs.channel_wire import GETATTR, LOOKUP, READDIRPLUS
from aof2.fs.directories import Directories, PackedPage
from aof2.fs.tree import Tree

ABOUT_NAMES: Final = {LOOKUP: "lookup", GETATTR: "getattr", READDIRPLUS: "readdir"}
_ASKED: Final = {LOOKUP: Asked.LOOK_UP, GETATTR: Asked.ATTRIBUTES, READDIRPLUS: Asked.LIST}
_READ_IN: Final = struct.Struct("=QQI")


class Quick:
    def __init__(self, tree: Tree, directories: Directories, foreground: Foreground) -> None:
        self._tree = tree
        self._directories = directories
        self._foreground = foreground

    def answer(self, opcode: int, nodeid: int, body: bytes) -> bytes | None:
        """The body of the reply; None: not at once, or not here. OSError with what the kernel is told instead."""
        asked = _ASKED.get(opcode)
        if asked is None or not self._tree.kinds.is_folded(nodeid, asked):
            return None
        answer = self._look(opcode, nodeid, body)
        if opcode == LOOKUP and answer == self._tree.absent_out() and self._tree.kinds.of(nodeid).follows:
            return None  # it may be on its way
        return answer

    async def answer_in_time(self, opcode: int, nodeid: int, body: bytes) -> bytes:
        """The same, after waiting for the catalog."""
        kind = await self._tree.kinds.folded(nodeid, _ASKED[opcode])
        answer = self._look(opcode, nodeid, body)
        if opcode == LOOKUP and answer == self._tree.absent_out() and kind.follows:
            await kind.at_end(nodeid)
            answer = self._look(opcode, nodeid, body)
        return answer

    def _look(self, opcode: int, nodeid: int, body: bytes) -> bytes:
        try:
            self._foreground.asked()
            if opcode == LOOKUP:
                row = self._tree.find(nodeid, body.partition(b"\0")[0])
                return self._tree.absent_out() if row is None else self._tree.entry_out(row)
            if opcode == GETATTR:
                return self._tree.attr_out(self._tree.get(nodeid))
            return self._page(nodeid, body)
        except Exception as e:  # noqa: BLE001 (the mount must live)
            raise OSError(code_of(ABOUT_NAMES[opcode], e), "") from None

    def _page(self, nodeid: int, body: bytes) -> bytes:
        if len(body) < _READ_IN.size:
            raise os_error(errno.EINVAL)
        fh, start, room = _READ_IN.unpack_from(body)
        page = PackedPage(self._tree, room)
        self._directories.tell(fh, start, page, nodeid)
        return page.packed()
