"""What removing the last name does to an object: a tombstone, or nothing is left.

A published object keeps its rows and bytes for the undelete window, in order of deletion, so that the collector finds
those whose window is over without looking at the rest. One that never reached the remote goes whole.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import msgspec

from aof2.engine import objects, segments
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectRow, ObjectState


def tombstone(b: Batch, row: ObjectRow) -> None:
    """The last name is gone; bytes and rows stay for the undelete window."""
    dead = msgspec.structs.replace(row, state=ObjectState.TOMBSTONED, tombstoned_ms=b.now_ms)
    b.put(t.OBJECTS, (row.ino, row.generation), dead)
    b.put(t.TOMBSTONES, (b.now_ms, row.ino), row.generation)


def lift(b: Batch, row: ObjectRow) -> None:
    """Undeleted within the window."""
    b.delete(t.TOMBSTONES, (row.tombstoned_ms, row.ino))
    alive = msgspec.structs.replace(row, state=ObjectState.PUBLISHED, tombstoned_ms=0)
    b.put(t.OBJECTS, (row.ino, row.generation), alive)


def discard(b: Batch, row: ObjectRow) -> None:
    """An object that never reached the remote goes: rows now, its backing file once the commit is durable."""
    for chunk_id in row.data_chunks:
        objects.discard_chunk(b, chunk_id)
    b.delete(t.OBJECTS, (row.ino, row.generation))
    objects.unqueue_upload(b, row.ino, row.generation)
    if row.state == ObjectState.DIRTY:
        segments.unopened(b, row.ino)
        b.delete(t.DIRTY, row.ino)
