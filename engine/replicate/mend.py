"""A stream's folder made whole again from its copy on the remote.

    damaged snapshots · damaged bundles · damaged and missing chunks   → the same from the remote, checked, put in place
    no snapshot that the log can be replayed from                      → the newest of the remote's that it can

Invariants
- Nothing is placed that is not whole by its own checksums and does not continue the records before and after it.
- What is replaced is kept in `state_dir/quarantine/<stream>/`. A chunk or snapshot that is whole is never touched.
- Only what is complete on the remote comes from there: the chunk being written is not.
- Reads only, there.

Owner: recovery, before there is a writer; the stream's upload task, for sealed chunks and snapshots; repair. A crash
leaves some of it mended: each file is whole or as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import StreamFold
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, TransientError, UnsupportedError
from aof2.engine.manifest.batch import LOG_MENDED
from aof2.engine.manifest.chunk import as_downloaded
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import BUNDLE_NAME, ChunkHeader, ManifestGapError, chunk_name, unpack_chunk_header
from aof2.engine.manifest.gone import set_aside
from aof2.engine.manifest.reader import Chunk, ChunkFile, parse_chunk
from aof2.engine.manifest.snapshot import Snapshot, list_snapshots, load_snapshot, snapshot_name, usable_snapshots
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import RemoteLog

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("replicate.mend.aside", "replicate.mend.placed")
_ABSENT: Final = (CorruptError, UnsupportedError, ManifestGapError, RemoteMissingError)


class Mended(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One file that was damaged or missing. `placed`: a good copy is there now; else it is only out of the way."""

    stream_id: int
    name: str
    what: str
    placed: bool
    aside: str = ""


class RemoteMender:
    """See the module's text. A remote that is away mends nothing, and says why in `away`."""

    def __init__(self, env: Env, store: RemoteStore, state_dir: Path) -> None:
        self.env = env
        self.away = ""
        self._store = store
        self._state_dir = state_dir

    def mend(self, directory: Path, stream_id: int, *, last: int = -1) -> list[Mended]:
        """What was damaged or missing and is mended, or at least out of the way.

        `last`: the log must reach to this chunk; without one, to the last that is here.
        """
        try:
            work = _Work(self.env, RemoteLog(self._store, stream_id), self._state_dir, directory)
            done = list(work.run(last))
        except TransientError as e:
            self.away = str(e)
            return []
        for one in done:
            log.warning(
                "log file mended from the remote" if one.placed else "damaged log file set aside",
                extra={"stream_id": stream_id, "file": one.name, "damage": one.what, "kept": one.aside},
            )
        return done


def needs_mending(catalog: Catalog, directory: Path, stream_id: int) -> bool:
    """Whether anything of the folder is damaged, or missing by what the rest of it says. Reads all of it."""
    with catalog.view() as view:
        fold = StreamFold(stream_id)
        fold.reload(view)
    if fold.snapshot is not None and fold.snapshot[0] not in list_snapshots(directory):
        return True
    found = survey(directory)
    if found.damage or any(one.damage is not None or one.gap is not None for one in examine(found)):
        return True
    return any(not _loads(directory, snapshot_id) for snapshot_id in list_snapshots(directory))


def _loads(directory: Path, snapshot_id: int) -> bool:
    try:
        load_snapshot(directory, snapshot_id)
    except CorruptError:
        return False
    except (UnsupportedError, FileNotFoundError):
        pass  # a newer version's, or retention was here
    return True


def mend_running(
    env: Env, store: RemoteStore, catalog: Catalog, writer: CatalogWriter, state_dir: Path, stream_id: int
) -> list[Mended]:
    """Mends what a start had no need of: chunks and snapshots behind where the rows were. Says so in the log."""
    directory = state_dir / "manifest" / str(stream_id)
    if not needs_mending(catalog, directory, stream_id):
        return []
    mended = RemoteMender(env, store, state_dir).mend(directory, stream_id)
    if mended:
        writer.call(stream_id, partial(record_mended, mended=mended), sync=True)
    return mended


def record_mended(b: Batch, *, mended: Sequence[object]) -> None:
    """What was mended, in the log that it was mended in."""
    b.records.add_event(b.now_ns & (1 << 63) - 1, LOG_MENDED, msgspec.msgpack.encode(mended))


class _Work:
    def __init__(self, env: Env, remote: RemoteLog, state_dir: Path, directory: Path) -> None:
        self._env = env
        self._remote = remote
        self._state_dir = state_dir
        self._directory = directory

    def run(self, last: int) -> Iterator[Mended]:
        yield from self._snapshots()
        yield from self._bundles()
        here = {chunk.index: chunk for chunk in survey(self._directory).chunks}
        newest = next(usable_snapshots(self._directory), None)
        if newest is None and min(here, default=0) > 0 and not self._remote.inventory.has_chunk(0):
            fetched = self._fetch_snapshot(max(last, *here, -1))
            if fetched is not None:
                newest = fetched[1]
                yield fetched[0]
        start = newest.position.chunk_index if newest is not None else 0
        if newest is not None:
            start = min(start, min(here, default=start))
        yield from self._chunks(here, start, max(last, *here, -1))

    # -- snapshots ---------------------------------------------------------------------------------------------

    def _snapshots(self) -> Iterator[Mended]:
        for snapshot_id in list_snapshots(self._directory):
            try:
                load_snapshot(self._directory, snapshot_id)
            except CorruptError as e:
                name = snapshot_name(snapshot_id)
                try:
                    data = self._remote.snapshot(snapshot_id)[0]
                except _ABSENT:
                    data = None
                yield self._replace(name, str(e), data)
        newest_there = max(self._remote.inventory.snapshots, default=0)
        if newest_there > max(list_snapshots(self._directory), default=0):
            # Taken here, and gone from here: a restored folder has the one it started from.
            here = survey(self._directory).chunks
            fetched = self._fetch_snapshot(max((chunk.index for chunk in here), default=-1))
            if fetched is not None:
                yield fetched[0]

    def _fetch_snapshot(self, last_here: int) -> tuple[Mended, Snapshot] | None:
        """The newest of the remote's whose place the log here goes past."""
        for snapshot_id in sorted(self._remote.inventory.snapshots, reverse=True):
            try:
                data, snapshot = self._remote.snapshot(snapshot_id)
            except _ABSENT:
                continue
            if snapshot.position.chunk_index <= last_here + 1:
                return self._replace(snapshot_name(snapshot_id), "missing", data), snapshot
        return None

    # -- chunks ------------------------------------------------------------------------------------------------

    def _bundles(self) -> Iterator[Mended]:
        """A damaged bundle goes: its chunks are looked for one by one."""
        for finding in survey(self._directory).damage:
            for path in sorted(self._directory.iterdir()):
                if BUNDLE_NAME.fullmatch(path.name) and str(path) in finding.message:
                    yield self._replace(path.name, finding.message, None)

    def _chunks(self, here: dict[int, ChunkFile], start: int, last: int) -> Iterator[Mended]:
        expected: int | None = None
        for index in range(start, last + 1):
            chunk, what = self._read(here.get(index), last=index == last)
            if chunk is None and not what and self._remote.inventory.has_chunk(index):
                what = "it holds no commit, and the remote has it complete"
            disorder = chunk is not None and expected is not None and chunk.header.base_record != expected
            if disorder:
                what = "it does not continue the records before it"
            if what:
                fetched = self._fetch(index, expected, self._base_of(here.get(index + 1)))
                if fetched is not None:
                    yield self._replace(chunk_name(index), what, as_downloaded(fetched[0]), where=here.get(index))
                    chunk = fetched[1]
            expected = chunk.end_position.ordinal if chunk is not None and not (disorder and what) else None

    @staticmethod
    def _read(where: ChunkFile | None, *, last: bool) -> tuple[Chunk | None, str]:
        """The chunk, and what is wrong with it; both empty for the last one without a commit."""
        if where is None:
            return None, "missing"
        try:
            return parse_chunk(where.read(), path=str(where.path), last=last, expect_index=where.index), ""
        except (CorruptError, OSError) as e:
            return None, str(e)

    @staticmethod
    def _base_of(where: ChunkFile | None) -> int | None:
        """Where the next chunk's records start, if its header can be read."""
        try:
            header: ChunkHeader | None = unpack_chunk_header(where.read()) if where is not None else None
        except (Aof2Error, OSError):
            return None
        return header.base_record if header is not None and where and header.chunk_index == where.index else None

    def _fetch(self, index: int, expected: int | None, following: int | None) -> tuple[bytes, Chunk] | None:
        try:
            data, chunk = self._remote.chunk(index)
        except _ABSENT:
            return None
        fits_before = expected is None or chunk.header.base_record == expected
        fits_after = following is None or chunk.end_position.ordinal == following
        # Where a neighbour's own header is what is damaged, one side is enough.
        return (data, chunk) if fits_before and (fits_after or expected is not None) else None

    # -- placing -----------------------------------------------------------------------------------------------

    def _replace(self, name: str, what: str, data: bytes | None, *, where: ChunkFile | None = None) -> Mended:
        """Puts the good bytes in the place of the bad ones, which are kept; without good ones they only go."""
        path = self._directory / name
        kept = ""
        if path.exists() and (where is None or where.path == path):
            kept = str(set_aside(self._env, self._state_dir, self._directory.name, path))
            self._env.failpoint("replicate.mend.aside")
        if data is not None:
            self._env.replace_file(path, data, mode=0o400)
            self._env.failpoint("replicate.mend.placed")
        return Mended(stream_id=self._remote.stream_id, name=name, what=what, placed=data is not None, aside=kept)
