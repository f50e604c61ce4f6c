"""Which names a stream has, and the inode numbers of those that no row has.

    <stream>/_append           where to write                                made up
    <stream>/_tail.<ext>       what is committed and not sealed              made up
    <stream>/<20 digits>.<ext> a sealed segment's payloads                   a file
    <stream>/.segments/        a directory
        <segment_id>.idx       its header, footer and record headers         a file
        <segment_id>.seg       the raw segment                               made up, of the two files

Invariants
- The number of what is made up has the highest bit of an inode's local part, which no counter reaches, and tells the
  inode that it belongs to: it is the same after a restart.
- The index of a payload file has the next inode number.

Owner: pure functions.
"""

from __future__ import annotations

import re
import stat
from enum import IntEnum
from typing import Final, NamedTuple

from aof2.engine.catalog.rows import INO_STREAM_SHIFT, InodeRow

APPEND: Final = b"_append"
SEGMENTS: Final = b".segments"
INDEX_SUFFIX: Final = b".idx"
RAW_SUFFIX: Final = b".seg"
OFFSET_DIGITS: Final = 20
_MADE_UP: Final = 1 << (INO_STREAM_SHIFT - 1)
_TAG_BITS: Final = 2
_LOCAL_MASK: Final = (1 << INO_STREAM_SHIFT) - 1
_SEGMENT_NAME: Final = re.compile(rb"(0|[1-9][0-9]{0,19})\.(idx|seg)")


class Tag(IntEnum):
    """What an inode that no row has is, of the one that it tells. Known to the kernel: never renumber."""

    APPEND = 0  # of a stream's directory
    TAIL = 1  # of a stream's directory
    RAW = 2  # of an index


class MadeUp(NamedTuple):
    tag: Tag
    of: int


def made_up_ino(of: int, tag: Tag) -> int:
    return of & ~_LOCAL_MASK | _MADE_UP | (of & _LOCAL_MASK) << _TAG_BITS | tag


def made_up(ino: int) -> MadeUp | None:
    """What an inode number tells; None: it is a row's."""
    if not ino & _MADE_UP:
        return None
    local = ino & (_MADE_UP - 1)
    tag = local & (1 << _TAG_BITS) - 1
    return MadeUp(Tag(tag), ino & ~_LOCAL_MASK | local >> _TAG_BITS) if tag in tuple(Tag) else None


def tail_name(ext: str) -> bytes:
    return b"_tail." + ext.encode()


def payload_name(base_offset: int, ext: str) -> bytes:
    return f"{base_offset:0{OFFSET_DIGITS}d}.{ext}".encode()


def is_payload_name(name: bytes, ext: str) -> bool:
    digits, dot, rest = name.partition(b".")
    return len(digits) == OFFSET_DIGITS and digits.isdigit() and dot == b"." and rest == ext.encode()


def base_offset_of(name: bytes) -> int:
    """Of a payload file's name."""
    return int(name[:OFFSET_DIGITS])


def index_name(segment_id: int) -> bytes:
    return b"%d" % segment_id + INDEX_SUFFIX


def raw_name(segment_id: int) -> bytes:
    return b"%d" % segment_id + RAW_SUFFIX


def segment_of(name: bytes) -> int | None:
    """The segment that a name in `.segments` is of."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match is not None else None


def index_ino(payload_ino: int) -> int:
    return payload_ino + 1


def payload_ino(index_ino: int) -> int:
    return index_ino - 1


# -- how they look ---------------------------------------------------------------------------------------------------


def append_row(stream: InodeRow) -> InodeRow:
    """Who may make files in the stream's directory may write to it."""
    return _row(made_up_ino(stream.ino, Tag.APPEND), stream, stream.mode & 0o222)


def tail_row(stream: InodeRow, size: int, mtime_ns: int) -> InodeRow:
    return _row(made_up_ino(stream.ino, Tag.TAIL), stream, stream.mode & 0o444, size=size, mtime_ns=mtime_ns)


def raw_row(index: InodeRow, payload: InodeRow) -> InodeRow:
    """The raw segment is as long as the two files that it is made of."""
    size, mode = index.size + payload.size, index.mode & 0o444
    return _row(made_up_ino(index.ino, Tag.RAW), index, mode, size=size, parent=index.parent)


def _row(ino: int, of: InodeRow, mode: int, *, size: int = 0, mtime_ns: int = 0, parent: int = 0) -> InodeRow:
    return InodeRow(
        ino,
        stat.S_IFREG | mode,
        of.uid,
        of.gid,
        size,
        mtime_ns=mtime_ns or of.mtime_ns,
        ctime_ns=max(mtime_ns, of.ctime_ns),
        atime_ns=of.atime_ns,
        parent=parent or of.ino,
    )
