"""What will be looked up next: the channel is told, and answers for it (why that is right: `native/channel/ahead.h`).

A process that stats the files of a directory one after the other asks for names in the order we list them. Once a few
came that way, the next ones are told ahead, more each time as long as what follows is what was to be expected.

Invariants
- Told is only what changes by requests alone: no directories (new files change them), nothing open, dirty, or unlinked.
- Look-ups in another order cost little: after each wrong guess more names must come in order before the next one.
- Nothing is raised: the LOOKUP has been answered.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import logging
from typing import Final

from aof2.fs.tree import Tree

log = logging.getLogger(__name__)

WALKS_MAX: Final = 64
PATIENCE_MIN: Final = 2
PATIENCE_MAX: Final = 64
COUNT_MIN: Final = 8
COUNT_MAX: Final = 256
MESSAGE_BYTES: Final = 60_000
_END: Final = b"\xff" * 256  # behind every name


class _Walk:
    """How far look-ups in one directory are, and what was told ahead of them."""

    __slots__ = ("count", "last", "left", "next", "patience", "upto")

    def __init__(self, name: bytes) -> None:
        self.last = name
        self.upto = b""  # names in (last, upto] were told
        self.next = b""  # the first behind them
        self.count = COUNT_MIN
        self.patience = self.left = PATIENCE_MIN

    def goes_on(self, name: bytes) -> bool:
        """A name is looked up; whether those behind it are to be told."""
        if name == self.next:
            self.count, self.last, self.patience = min(2 * self.count, COUNT_MAX), name, PATIENCE_MIN
            return True
        if self.last < name <= self.upto:
            return False  # it asked before the channel heard, or about what is not told
        if self.next:
            self.patience = self.left = min(2 * self.patience, PATIENCE_MAX)
        self.left = self.left - 1 if name > self.last else self.patience
        self.last, self.upto, self.next, self.count = name, b"", b"", COUNT_MIN
        return self.left <= 0


class Ahead:
    """Of one mount."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._walks: dict[int, _Walk] = {}

    def after(self, parent: int, body: bytes) -> bytes:
        """A LOOKUP was answered, from the catalog as it is: what is to be told ahead, packed."""
        name = body.partition(b"\0")[0]
        walk = self._walks.get(parent)
        if walk is None:
            if len(self._walks) >= WALKS_MAX:
                del self._walks[next(iter(self._walks))]
            self._walks[parent] = _Walk(name)
            return b""
        try:
            return self._next(walk, parent) if walk.goes_on(name) else b""
        except Exception:
            log.exception("names could not be told ahead", extra={"ino": parent})
            return b""

    def _next(self, walk: _Walk, parent: int) -> bytes:
        parts, room = [], MESSAGE_BYTES
        walk.left = walk.patience
        walk.upto, walk.next = _END, b""
        names = self._tree.kinds.of(parent).steady(parent, walk.last, walk.count + 1)
        for i, (name, row) in enumerate(names):
            if i == walk.count or room < 0:
                walk.upto, walk.next = names[i - 1][0], name
                break
            if row is not None:
                parts.append(b"%b%c%b" % (self._tree.entry_out(row), len(name), name))
                room -= len(parts[-1])
        return b"".join(parts)
