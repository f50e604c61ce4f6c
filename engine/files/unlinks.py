"""Unlinks that are answered before the catalog has them.

`rm -rf` asks for one thing after the other, so each commit would hold one name, and a thread change each way. Here an
unlink is a record in the tenant's intent log (`engine/intents`) and a look at the rows; the catalog gets them many at a
time. Look-ups mind what is gone by themselves; every other operation that could see the difference waits for the fold.

Invariant: what is not the only name of a closed regular file goes the usual way.

Owner: the trio thread. A crash leaves intent logs.
"""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.errors import os_error
from aof2.engine.intents.format import Intent, IntentKind
from aof2.engine.intents.mounted import Intents

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

WAITING_MAX: Final = 2048


class Unlinks:
    """What was unlinked and is still in the catalog."""

    def __init__(self, files: Files, intents: Intents) -> None:
        self._files = files
        self._intents = intents
        self._names: dict[tuple[int, bytes], int] = {}
        self._inos: set[int] = set()
        self._touched: dict[int, int] = {}  # directories → when their last name went

    def take(self, parent: int, name: bytes) -> InodeRow | None:
        """The inode without its name, once that is in the log; None: the usual way. ENOENT where it is gone already."""
        volume, stream_id = self._files.volume, stream_of(parent)
        if len(self._names) >= WAITING_MAX or volume.read_only_reason:
            return None
        if (parent, name) in self._names:
            raise os_error(errno.ENOENT)
        with volume.catalog.view() as view:
            entry = view.get(stream_id, t.DENTRIES, (parent, name))
            row = view.get(stream_id, t.INODES, entry.ino) if entry is not None else None
        if row is None or not stat.S_ISREG(row.mode) or row.nlink != 1:
            return None
        if self._files.known.is_open(row.ino) or self._files.known.is_held(row.ino):
            return None
        now_ns = volume.env.now_ns()
        if not self._intents.append(stream_id, IntentKind.UNLINKED, row.ino, parent=parent, name=name, time_ns=now_ns):
            return None
        self._names[parent, name] = row.ino
        self._inos.add(row.ino)
        self._touched[parent] = now_ns
        volume.foreground.removed()
        return msgspec.structs.replace(row, nlink=0, ctime_ns=now_ns, parent=parent, last_name=name)

    def adopt(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        for intent, row in folded:
            if not intent.is_own:
                continue
            self._names.pop((intent.parent, intent.name), None)
            self._inos.discard(intent.ino)
            if self._touched.get(intent.parent) == intent.time_ns:
                del self._touched[intent.parent]
            if row is not None:
                self._files.removal.removed(row)

    # -- what is gone, for those who look before the fold ------------------------------------------------------

    def is_gone(self, parent: int, name: bytes) -> bool:
        return (parent, name) in self._names

    def is_nameless(self, ino: int) -> bool:
        """Whether the row that the catalog has of this inode is of before."""
        return ino in self._inos

    def as_told(self, row: InodeRow) -> InodeRow:
        """The row as it is once everything is folded; not of one that `is_nameless`."""
        last_ns = self._touched.get(row.ino)
        if last_ns is None or last_ns <= row.mtime_ns:
            return row
        return msgspec.structs.replace(row, mtime_ns=last_ns, ctime_ns=max(last_ns, row.ctime_ns))
