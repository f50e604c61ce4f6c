"""The part of a stream's log that the remote does not have, read from the folder: what `position.py` starts from, and
what `status` says while no daemon runs.

Which publications were foretold follows from the log: a blob that has its chunk's own key was announced for that chunk,
and where that was not in this part, the remote's log has it. A seal that is in this part touches its inode by itself.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Mutation, batches_in
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.manifest.chunk import is_bookkeeping
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LogPosition, ManifestIntegrityError, RecordType
from aof2.engine.manifest.reader import Chunk, Stream, chunk_headers
from aof2.engine.remote.keys import ChunkBlobKey, parse_key
from aof2.engine.replicate.position import Replication, StreamPosition, Touches, touches_of
from aof2.engine.replicate.stream import state_of

NEVER: Final = 1 << 62  # an ordinal that no log reaches
# What a batch that publishes, and ends its job, has records and rows of.
_UPLOAD_DONE: Final = frozenset((RecordType.UPLOAD_DONE, RecordType.CUSTOM_EVENT))
_OBJECT: Final = (t.OBJECTS.number, t.OBJECTS.tag)
_JOB: Final = (t.JOBS.number, t.JOBS.tag)
_BESIDE: Final = frozenset(
    (table.number, table.tag)
    for table in (t.CHUNKS, t.BLOBS, t.UNPUBLISHED, t.JOBS, t.JOB_TOKENS, t.COUNTERS, t.WATERMARKS, t.CHANGES)
)


def read_tail(view: View, directory: Path, stream_id: int) -> StreamPosition:
    """Where the log ends here and there. Of a damaged log nothing is called durable."""
    position = StreamPosition()
    at = view.position(stream_id)
    try:
        start = _first_missing(directory, state_of(view, stream_id).is_uploaded(stream_id))
        if start is None:
            position.here = position.there = at.ordinal if at is not None else 0
            return position
        position.here = position.there = start.ordinal
        tail = _Tail(view, stream_id)
        for chunk in Stream(directory).read(start):
            tail.note(position, chunk)
    except ManifestIntegrityError:
        position.any_until = position.published_until = NEVER
    return position


def positions_of(env: Env, view: View, manifest_dir: Path) -> Replication:
    """Every stream's, with no daemon."""
    found = Replication(env)
    for stream_id in view.streams():
        found.opened(stream_id, read_tail(view, manifest_dir / str(stream_id), stream_id))
    return found


def _first_missing(directory: Path, is_uploaded: Callable[[int], bool]) -> LogPosition | None:
    """The start of the first chunk that is not in the remote; None when all that is here is there."""
    for _, header in chunk_headers(directory):
        if not header.uploaded and not is_uploaded(header.chunk_index):
            return LogPosition(header.chunk_index, CHUNK_HEADER_LEN, header.base_record)
    return None


class _Tail:
    """What is known of the chunks so far."""

    def __init__(self, view: View, stream_id: int) -> None:
        self._view = view
        self._stream_id = stream_id
        self._begun: set[int] = set()  # whose upload began in them

    def note(self, position: StreamPosition, chunk: Chunk) -> None:
        """One chunk as if it were one commit: it goes up as a whole."""
        records = [r for r in chunk.records() if not is_bookkeeping(r.type_id, r.segment_id, r.payload)]
        if not records:
            return
        self._begun |= {r.segment_id for r in records if r.type_id == RecordType.UPLOAD_STARTED}
        others: list[Mutation] = []
        foretold: list[Mutation] = []
        for rows in batches_in((r.type_id, r.payload) for r in records):
            (foretold if self._is_foretold(rows) else others).extend(rows)
        touched, told = touches_of(others), touches_of(foretold)
        touches = Touches(touched.all_inos(), touched.named, touched.published | told.published)
        needed = bool(others) or any(r.type_id not in _UPLOAD_DONE for r in records)
        size_bytes = chunk.end - CHUNK_HEADER_LEN
        position.note(chunk.end_position.ordinal, records[0].timestamp_ms, size_bytes, touches, needed=needed)

    def _is_foretold(self, rows: list[Mutation]) -> bool:
        """Whether the batch does nothing but publish objects whose uploads the remote's log has as begun, or say how
        far a job is."""
        tables = {(number, key[:1]) for number, key, _ in rows}
        if tables != {_JOB} and (_OBJECT not in tables or not tables <= _BESIDE | {_OBJECT}):
            return False
        changed = [value for number, key, value in rows if (number, key[:1]) == _OBJECT]
        return all(value is not None and self._is_announced(t.OBJECTS.decode(value)) for value in changed)

    def _is_announced(self, row: ObjectRow) -> bool:
        chunks = [self._view.get(self._stream_id, t.CHUNKS, chunk_id) for chunk_id in row.data_chunks]
        names = [parse_key(chunk.key) if chunk is not None and chunk.key else None for chunk in chunks]
        return row.state == ObjectState.PUBLISHED and all(
            isinstance(name, ChunkBlobKey) and name.chunk_id == chunk_id and chunk_id not in self._begun
            for name, chunk_id in zip(names, row.data_chunks, strict=True)
        )
