"""Files that stay on this disk: `aof2 pin`. A row an inode, which the evictor looks at before it chooses.

A pin is the inode's, not one name's nor one generation's: it outlives renames and rewriting. It holds the newest
content only; what is superseded or unlinked may go. An inode that is gone leaves a row that `holds` and `pinned` skip.

Owner: changes are the catalog's writer thread's, for the length of a batch; reading is over a view. A crash leaves the
pins before or after a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.catalog.store import View


def pin(b: Batch, inos: Sequence[int]) -> int:
    """Keeps these; how many were not kept before. One that is gone is passed over."""
    added = 0
    for ino in inos:
        if b.get(t.INODES, ino) is not None and b.get(t.PINS, ino) is None:
            b.put(t.PINS, ino, b.now_ms)
            added += 1
    return added


def unpin(b: Batch, inos: Sequence[int]) -> int:
    """Lets these go; how many were kept."""
    gone = [ino for ino in inos if b.get(t.PINS, ino) is not None]
    for ino in gone:
        b.delete(t.PINS, ino)
    return len(gone)


def is_pinned(view: View, stream_id: int, ino: int) -> bool:
    return view.get(stream_id, t.PINS, ino) is not None


def holds(view: View, stream_id: int, row: ObjectRow) -> bool:
    """Whether a pin keeps this generation from being evicted."""
    if row.state == ObjectState.TOMBSTONED or not is_pinned(view, stream_id, row.ino):
        return False
    inode = view.get(stream_id, t.INODES, row.ino)
    return inode is not None and inode.generation == row.generation


def pinned(view: View, stream_id: int) -> Iterator[tuple[int, int]]:
    """(inode, bytes) of everything that is kept and still there."""
    for ino, _ in view.scan(stream_id, t.PINS):
        inode = view.get(stream_id, t.INODES, ino)
        if inode is not None and inode.nlink:
            row = view.get(stream_id, t.OBJECTS, (ino, inode.generation)) if inode.generation else None
            yield ino, row.size if row is not None else inode.size
