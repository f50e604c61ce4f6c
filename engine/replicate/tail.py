"""The part of a stream's log that the remote does not have, read from the folder: what `position.py` starts from, and
what `status` says while no daemon runs.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from aof2.engine.catalog.batch import mutations_in
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.manifest.chunk import is_bookkeeping
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LogPosition, ManifestIntegrityError
from aof2.engine.manifest.reader import Chunk, Stream, chunk_headers
from aof2.engine.replicate.position import Replication, StreamPosition, touches_of
from aof2.engine.replicate.stream import state_of

NEVER: Final = 1 << 62  # an ordinal that no log reaches


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
        for chunk in Stream(directory).read(start):
            _note(position, chunk)
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


def _note(position: StreamPosition, chunk: Chunk) -> None:
    """One chunk as if it were one commit: it goes up as a whole."""
    records = [r for r in chunk.records() if not is_bookkeeping(r.type_id, r.segment_id, r.payload)]
    if records:
        touches = touches_of(mutations_in((r.type_id, r.payload) for r in records))
        position.note(chunk.end_position.ordinal, records[0].timestamp_ms, chunk.end - CHUNK_HEADER_LEN, touches)
