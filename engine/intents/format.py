"""Records of an intent log. FORMATS.md has the layout; the channel writes the same (`native/channel/births.c`,
`change.c`).

Invariant: a record that is cut or fails its checksum is the torn end; nothing behind it was answered.

Owner: pure functions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

RECORD: Final = struct.Struct("<IIHHIQQIIQQI4xQ")
_ALIGN: Final = 8
_CRC_FROM: Final = 8
DROPPED: Final = 1  # flag of CLOSED: the channel let go of the backing file
BY_CHANNEL: Final = 1  # flag of UNLINKED: the channel answered it; else the daemon did
SET_MODE: Final = 1  # flags of SET
SET_ATIME: Final = 2
SET_MTIME: Final = 4
SET_UID: Final = 8
SET_GID: Final = 16


class IntentKind(IntEnum):
    """Written to disk. Never renumber."""

    BORN = 1  # the channel created a file, and opened it
    CLOSED = 2  # its creator closed it
    UNLINKED = 3  # a name is gone
    RENAMED = 4  # to a name that was free
    MADE = 5  # a directory
    RMDIR = 6
    SET = 7  # attributes
    LINKED = 8  # one more name
    SYMLINKED = 9
    REPLACED = 10  # renamed, over another name
    EXCHANGED = 11
    XATTR_SET = 12
    XATTR_REMOVED = 13


class Intent(NamedTuple):
    kind: IntentKind
    ino: int
    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    time_ns: int
    fh: int
    flags: int
    end: int  # of the record, in its log
    other: int = 0  # of REPLACED and EXCHANGED: what had the new name

    @property
    def is_own(self) -> bool:
        """Whether the daemon answered it."""
        return self.kind is IntentKind.UNLINKED and not self.flags & BY_CHANNEL

    @property
    def names(self) -> tuple[bytes, bytes]:
        """Of RENAMED, REPLACED and EXCHANGED: the old name and the new one; of SYMLINKED: the name and the
        target; of XATTR_SET: the name and the value."""
        old, _, new = self.name.partition(b"\0")
        return old, new


def pack(
    kind: IntentKind,
    ino: int,
    *,
    parent: int = 0,
    name: bytes = b"",
    mode: int = 0,
    uid: int = 0,
    gid: int = 0,
    time_ns: int = 0,
    fh: int = 0,
    flags: int = 0,
    other: int = 0,
) -> bytes:
    size = -(-(RECORD.size + len(name)) // _ALIGN) * _ALIGN
    fixed = RECORD.pack(size, 0, kind, len(name), mode, ino, parent, uid, gid, time_ns, fh, flags, other)
    body = (fixed + name).ljust(size, b"\0")[_CRC_FROM:]
    return struct.pack("<II", size, zlib.crc32(body)) + body


def parse(data: bytes, offset: int = 0, *, check: bool = False) -> Iterator[Intent]:
    """The records in `data`, which starts at `offset` of the log; ends at the first that is cut, is of a kind that this
    release does not know, or (`check`) fails its checksum."""
    at = 0
    while at + RECORD.size <= len(data):
        size, crc, kind, name_len, mode, ino, parent, uid, gid, time_ns, fh, flags, other = RECORD.unpack_from(data, at)
        if size < RECORD.size or at + size > len(data) or RECORD.size + name_len > size or kind not in _KINDS:
            return
        if check and zlib.crc32(data[at + _CRC_FROM : at + size]) != crc:
            return
        name = data[at + RECORD.size : at + RECORD.size + name_len]
        at += size
        yield Intent(_KINDS[kind], ino, parent, name, mode, uid, gid, time_ns, fh, flags, offset + at, other)


MOVES: Final = (IntentKind.RENAMED, IntentKind.REPLACED, IntentKind.EXCHANGED)
_KINDS: Final = {int(kind): kind for kind in IntentKind}
