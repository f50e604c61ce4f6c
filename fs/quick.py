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
from aof2.fs.answers import code_of
from aof2.fs.attrs import ABSENT_OUT
from aof2.fs.channel_wire import GETATTR, LOOKUP, READDIRPLUS
from aof2.fs.directories import Directories, PackedPage
from aof2.fs.nodes import Nodes

ABOUT_NAMES: Final = {LOOKUP: "lookup", GETATTR: "getattr", READDIRPLUS: "readdir"}
_READ_IN: Final = struct.Struct("=QQI")


class Quick:
    """Answers them."""

    def __init__(self, nodes: Nodes, directories: Directories) -> None:
        self._nodes = nodes
        self._directories = directories
        self._foreground = nodes.volume.foreground

    def answer(self, opcode: int, nodeid: int, body: bytes) -> bytes | None:
        """The body of the reply; None: not at once, or not here. OSError with what the kernel is told instead."""
        births = self._nodes.births
        if opcode not in ABOUT_NAMES or (births is not None and births.behind()) or self._is_behind(opcode, nodeid):
            return None
        return self._look(opcode, nodeid, body)

    async def answer_in_time(self, opcode: int, nodeid: int, body: bytes) -> bytes:
        """The same, after waiting for the catalog."""
        births, unlinks = self._nodes.births, self._nodes.unlinks
        if births is not None:
            await births.catch_up()
        if unlinks is not None and self._is_behind(opcode, nodeid):
            await unlinks.catch_up()
        return self._look(opcode, nodeid, body)

    def _is_behind(self, opcode: int, nodeid: int) -> bool:
        """Whether something was unlinked that an answer from the catalog would show; `Nodes.find` minds it itself."""
        unlinks = self._nodes.unlinks
        if unlinks is None or opcode == LOOKUP:
            return False
        return unlinks.is_nameless(nodeid) if opcode == GETATTR else unlinks.behind()

    def _look(self, opcode: int, nodeid: int, body: bytes) -> bytes:
        try:
            self._foreground.asked()
            if opcode == LOOKUP:
                row = self._nodes.find(nodeid, body.partition(b"\0")[0])
                return ABSENT_OUT if row is None else self._nodes.entry_out(row)
            if opcode == GETATTR:
                return self._nodes.attr_out(self._nodes.get(nodeid))
            return self._page(body)
        except Exception as e:  # noqa: BLE001 (the mount must live)
            raise OSError(code_of(ABOUT_NAMES[opcode], e), "") from None

    def _page(self, body: bytes) -> bytes:
        if len(body) < _READ_IN.size:
            raise os_error(errno.EINVAL)
        fh, start, room = _READ_IN.unpack_from(body)
        page = PackedPage(self._nodes, room)
        self._directories.tell(fh, start, page)
        return page.packed()
