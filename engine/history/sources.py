"""Where a log is: chunks, bundles and snapshots of this disk, those of the remote, or the old ones there and the new
ones here.

Retention takes the local copies of what a snapshot covers and the remote has; so this disk alone knows hours or days,
both together all there is. Where the beginning is nowhere any more, the history begins at the oldest snapshot that lies
in what there is, and what that says is where the sums begin.

Invariants
- Chunks come in order and verified. A damaged one is told in `notes` and passed over: what it held is missing in the
  tables, the rest is right.
- One chunk, or one bundle, is in memory at a time.

Owner: one thread. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest.examine import Survey, examine
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LogPosition
from aof2.engine.manifest.reader import Chunk
from aof2.engine.manifest.snapshot import Snapshot, usable_snapshots
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import Inventory, RemoteLog, list_streams


class Part(NamedTuple):
    """A chunk of the log from a byte on."""

    chunk: Chunk
    from_offset: int

    @property
    def log_bytes(self) -> int:
        return self.chunk.end - self.from_offset


class Log:
    """The logs of a volume. `manifest_dir`, `store`: where they are looked for; either may be None."""

    def __init__(self, manifest_dir: Path | None, store: RemoteStore | None) -> None:
        self._dir = manifest_dir if manifest_dir is not None and manifest_dir.is_dir() else None
        self._store = store
        self.notes: list[str] = []
        self.whole = True  # each stream that was begun goes back to its first record
        self._there: dict[int, Inventory] = list_streams(store) if store is not None else {}

    def streams(self) -> list[int]:
        here = stream_ids(self._dir) if self._dir is not None else []
        return sorted({*here, *self._there})

    def start(self, stream_id: int) -> Snapshot | None:
        """What there was when the history begins; None: it begins with the log."""
        first = self._first_index(stream_id)
        if first == 0:
            return None
        self.whole = False
        oldest: Snapshot | None = None
        for snapshot in self._snapshots(stream_id):
            if first is None or snapshot.position.chunk_index >= first:
                oldest = snapshot
        if oldest is None and first:
            self.notes.append(
                f"stream {stream_id}: the log begins at chunk {first}, and no snapshot says what was before"
            )
        return oldest

    def parts(self, stream_id: int, since: LogPosition | None = None) -> Iterator[Part]:
        """The stream's records, from a position on."""
        local = self._survey(stream_id)
        first_here = local.chunks[0].index if local is not None and local.chunks else None
        since_chunk = since.chunk_index if since is not None else 0
        for chunk in self._remote_chunks(stream_id, since_chunk, first_here):
            yield Part(chunk, chunk.goes_on_at(since))
        for examined in examine(local) if local is not None else ():
            self.notes += [f.message for f in (examined.gap, examined.damage) if f is not None]
            if examined.chunk is not None and examined.chunk.index >= since_chunk:
                at = examined.chunk.goes_on_at(since)
                yield Part(examined.chunk, at if at <= examined.chunk.end else CHUNK_HEADER_LEN)

    def _survey(self, stream_id: int) -> Survey | None:
        directory = self._dir / str(stream_id) if self._dir is not None else None
        return Survey(directory) if directory is not None and directory.is_dir() else None

    def _first_index(self, stream_id: int) -> int | None:
        """The oldest chunk behind which none is missing, as far as names tell; None: there is no chunk."""
        local = self._survey(stream_id)
        known = {chunk.index for chunk in local.chunks} if local is not None else set()
        if stream_id in self._there:
            known |= self._there[stream_id].chunk_indexes()
        return min(known, default=None)

    def _remote_chunks(self, stream_id: int, since_chunk: int, before: int | None) -> Iterator[Chunk]:
        if self._store is None or stream_id not in self._there:
            return
        log = RemoteLog(self._store, stream_id, self._there[stream_id])
        for index in sorted(log.inventory.chunk_indexes()):
            if index < since_chunk or (before is not None and index >= before):
                continue
            try:
                yield log.chunk(index)[1]
            except (CorruptError, UnsupportedError, RemoteMissingError) as e:
                self.notes.append(str(e))

    def _snapshots(self, stream_id: int) -> Iterator[Snapshot]:
        """Newest first."""
        local = self._dir / str(stream_id) if self._dir is not None else None
        if local is not None and local.is_dir():
            yield from usable_snapshots(local)
        if self._store is None or stream_id not in self._there:
            return
        log = RemoteLog(self._store, stream_id, self._there[stream_id])
        for snapshot_id in sorted(log.inventory.snapshots, reverse=True):
            try:
                yield log.snapshot(snapshot_id)[1]
            except Aof2Error as e:
                self.notes.append(str(e))
