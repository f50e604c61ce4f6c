"""ManifestOps: the typed changes that subscribers of the change feed see.

An op is applied to a batch like any other row change, and remembered in the commit's ManifestChangeRecord. Rows that no
subscriber cares for (names, jobs, counters) are changed without an op.

The tags are in the change log. Never rename.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from aof2.engine.catalog.rows import ChunkRow, DeltaRow, WalRow


class _Op(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all ops."""


class UpsertChunk(_Op, frozen=True):
    chunk: ChunkRow


class DeleteChunk(_Op, frozen=True):
    chunk_id: int


class UpsertChunkDelta(_Op, frozen=True):
    db_id: int
    chunk_id: int
    generation: int
    delta: DeltaRow


class DeleteChunkDelta(_Op, frozen=True):
    db_id: int
    chunk_id: int
    generation: int


class UpsertWal(_Op, frozen=True):
    stream_ino: int
    wal: WalRow


class DeleteWal(_Op, frozen=True):
    stream_ino: int
    segment_id: int


class SetWatermark(_Op, frozen=True):
    """The generation a component (`checkpoint`, `truncation` …) has reached. Never goes down."""

    component: str
    generation: int


ManifestOp = UpsertChunk | DeleteChunk | UpsertChunkDelta | DeleteChunkDelta | UpsertWal | DeleteWal | SetWatermark

decode_op: Final[Callable[[bytes], ManifestOp]] = msgspec.msgpack.Decoder(ManifestOp).decode
