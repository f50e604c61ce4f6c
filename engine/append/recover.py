"""What a crash left of segments that were being written: whole records, in order, and nothing else.

    a segment that the catalog has already          its file goes
    backing files of a seal that did not come about  they go; the segment is sealed again
    a torn tail                                      it is cut
    a segment that does not begin where the one before it ended
                                                     nothing of it was committed: it is put aside
    a segment that the log lost                      it is named again
    a segment of a stream that the log lost          it is put aside
    a name in the log without a file                 it is given up

Invariants
- Every record that was committed is there, once, in order; of those that were only acknowledged, a prefix.
- It takes as long as there are segments that are not sealed, however many others there are.

Owner: called once, on a worker thread, at open, before anything else looks. A crash leaves what it begins again with.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aof2.engine import namespace
from aof2.engine.append import rows
from aof2.engine.append.rows import Ids, Position
from aof2.engine.append.segment import next_logical
from aof2.engine.append.streams import FOLDER
from aof2.engine.segment import model, repair
from aof2.engine.segment.format import Pointer
from aof2.engine.segment.model import SealedSegment
from aof2.engine.segment.pointer import load_pointer
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.state import AnySegment, StreamState, WarningKind

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

# Segments wait for their seal beside the next one, torn tails are what a kill leaves, and a pointer to what the catalog
# has is removed.
EXPECTED: Final = (
    WarningKind.UNSEALED_OLDER,
    WarningKind.POINTER_MISSING,
    WarningKind.POINTER_STALE,
    WarningKind.TORN_TAIL,
)


def recover(volume: Volume, tenants: Mapping[int, str]) -> None:
    """Every segment of these tenants that is not sealed is found again, or given up."""
    for stream_id, tenant in tenants.items():
        _recover_tenant(volume, stream_id, tenant)
    volume.writer.flush()


def _recover_tenant(volume: Volume, stream_id: int, tenant: str) -> None:
    with volume.catalog.view() as view:
        named = rows.open_segments(view, stream_id)
    for ids in named.values():
        _remove_unfinished(volume, tenant, ids)
    found: set[int] = set()
    root = volume.state_dir / FOLDER / tenant
    for folder in sorted(root.iterdir(), key=lambda path: path.name) if root.is_dir() else ():
        if folder.name.isdigit() and folder.is_dir():
            found |= _recover_stream(volume, stream_id, folder, named)
    for segment_id, ids in named.items():
        if segment_id not in found:
            volume.writer.call(stream_id, partial(rows.drop_segment, ids=ids))


def _remove_unfinished(volume: Volume, tenant: str, ids: Ids) -> None:
    """Backing files without rows."""
    for ino in (ids.payload_ino, ids.index_ino):
        volume.hot.unlink(volume.hot.path(tenant, ino, rows.GENERATION))


def _recover_stream(volume: Volume, stream_id: int, folder: Path, named: Mapping[int, Ids]) -> set[int]:
    """The segments of one stream that go on."""
    ino = int(folder.name)
    with volume.catalog.view() as view:
        row = namespace.inode(view, stream_id, ino)
        position = rows.position_of(view, stream_id, ino)
    if row is None or not stat.S_ISDIR(row.mode):
        _remove_folder(volume, folder)
        return set()
    _remove_sealed(volume, folder, position)
    left = _in_order(volume, recover_stream(volume.env, folder, stream_id=ino, expects=EXPECTED), position)
    kept = _segments(left)
    for segment in kept:
        if segment.segment_id not in named:
            work = partial(rows.open_segment, stream_ino=ino, base_offset=_base(segment), segment_id=segment.segment_id)
            volume.writer.call(stream_id, work)
    for older in left.unsealed:
        repair.trim(volume.env, older)
    if kept or left.damaged:
        volume.streams_left[ino] = left
    return {segment.segment_id for segment in (*kept, *left.damaged)}


def _remove_sealed(volume: Volume, folder: Path, position: Position) -> None:
    """Files of segments that the catalog has, and the pointer to one of them."""
    for path in folder.iterdir():
        segment_id = model.parse_segment_name(path.name)
        if segment_id is not None and segment_id <= position.segment_id:
            volume.env.files.unlink(path)
    pointer = load_pointer(folder)
    if isinstance(pointer, Pointer) and pointer.segment_id <= position.segment_id:
        volume.env.files.unlink(folder / model.POINTER_NAME)


def _in_order(volume: Volume, left: StreamState, position: Position) -> StreamState:
    """Without what does not follow: records that reached the disk before those in front of them were ever committed."""
    at, kept = position.next_logical, set()
    for segment in _segments(left):
        if _base(segment) != at:
            break
        kept.add(segment.segment_id)
        at = next_logical(segment) if isinstance(segment, SealedSegment) else segment.next_logical_offset
    for segment in _segments(left):
        if segment.segment_id not in kept:
            aside = repair.put_aside(volume.env, segment.path)
            extra = {"path": str(aside), "base_offset": _base(segment), "expected": at}
            log.warning("records that were never committed follow a gap: put aside", extra=extra)
    active = left.active if left.active is not None and left.active.segment_id in kept else None
    return replace(
        left,
        sealed=tuple(one for one in left.sealed if one.segment_id in kept),
        unsealed=tuple(one for one in left.unsealed if one.segment_id in kept),
        active=active,
    )


def _segments(left: StreamState) -> list[AnySegment]:
    last = [left.active] if left.active is not None else []
    return sorted((*left.sealed, *left.unsealed, *last), key=lambda segment: segment.segment_id)


def _base(segment: AnySegment) -> int:
    return segment.header.base_offset


def _remove_folder(volume: Volume, folder: Path) -> None:
    """Of a stream that is gone: removed, or lost with the power. Its inode number may come again, so what holds records
    must not be taken for that stream's: it is put aside, and said."""
    for path in list(folder.iterdir()):
        if repair.TORN in path.name:
            continue
        if model.parse_segment_name(path.name) is not None and path.stat().st_size:
            aside = repair.put_aside(volume.env, path)
            log.warning("records of a stream that is gone: put aside", extra={"path": str(aside)})
        else:
            volume.env.files.unlink(path)
    with contextlib.suppress(OSError):
        folder.rmdir()
