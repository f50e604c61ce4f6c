"""`user.aof2.*`: what the catalog knows of a file, as extended attributes. They are answered, never listed: copying a
file's attributes does not copy these.

Owner: stateless.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import HashKind, InodeRow, ObjectState, stream_of
from aof2.engine.catalog.store import View
from aof2.engine.objects import bytes_here

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

PREFIX: Final = b"user.aof2."
SHA256: Final = b"user.aof2.sha256"
GENERATION: Final = b"user.aof2.generation"
RESIDENCY: Final = b"user.aof2.residency"
DURABLE: Final = b"user.aof2.durable"
FACTS: Final = frozenset((SHA256, GENERATION, RESIDENCY, DURABLE))


def fact(volume: Volume, view: View, row: InodeRow, name: bytes, *, dirty_whole: bool) -> bytes | None:
    """The value, or None where the file has none: not a regular file, or not sealed. `durable` is of any file.
    `dirty_whole`: whether a file that is being written is here whole."""
    stream_id = stream_of(row.ino)
    if name == DURABLE:
        return b"1" if volume.is_durable(view, row) else b"0"
    obj = view.get(stream_id, t.OBJECTS, (row.ino, row.generation)) if stat.S_ISREG(row.mode) else None
    if obj is None:
        return None
    if name == GENERATION:
        return str(obj.generation).encode()
    if name == SHA256:
        return obj.sha256.hex().encode() if obj.sha256 and obj.hashed is HashKind.BYTES else None
    if obj.state == ObjectState.DIRTY:
        return b"1.000" if dirty_whole else b"0.000"
    here, total = bytes_here(view, stream_id, obj, volume.settings.engine.block_bytes)
    return f"{here / total if total else 1.0:.3f}".encode()
