"""Opening the catalog: trust it or throw it away, then bring it up to the end of the logs.

The rows know the log position they are at. Trusted rows need only the tail after it; rows that cannot be trusted (power
lost, other boot, damaged, deleted) are rebuilt from each stream's newest snapshot and the log after it. Either way the
result is the same rows. Start-up time depends on the length of the tails, not on the number of rows, when they are
trusted.

A damaged log is one stream's trouble. In this order: its files are fetched from the remote (the `Mender` given); where
the rows are trusted and know what the damaged place held, the log goes on behind it; else the stream is quarantined,
its rows are what replays, and it gets no writer. The others open.

Owner: the thread that opens the volume, before any other exists. A crash while opening is a crash before opening: the
rows are applied chunk by chunk with their position.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from aof2 import native
from aof2.engine.catalog import snapshots
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, Mutation, decode_event
from aof2.engine.catalog.behind import start_behind
from aof2.engine.catalog.fold import load_pending
from aof2.engine.catalog.store import MAP_BYTES, Catalog, closed_cleanly, discard, trusted
from aof2.engine.catalog.touched import touched_files
from aof2.engine.catalog.writer import StreamState, apply_mutations, put_positions
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest.batch import Event
from aof2.engine.manifest.examine import committed_part, survey
from aof2.engine.manifest.gone import find_gone, set_aside
from aof2.engine.manifest.quarantine import lift, quarantine, read_quarantine
from aof2.engine.manifest.reader import Chunk, ChunkFile, Stream, parse_chunk, read_file
from aof2.engine.manifest.snapshot import Snapshot, newest_snapshot, usable_snapshots
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter

log = logging.getLogger(__name__)

_SNAPSHOT_KEY: Final = re.compile(r"snapshot_(\d+)\.bin$")
CRASH_POINTS: Final = ("catalog.recover.loaded", "catalog.recover.replayed")

# What becomes of a commit's changes: in a transaction, of a catalog and a stream.
Apply = Callable[[Any, Catalog, int, Iterable[Mutation]], None]


class Mender(Protocol):
    """Makes a stream's folder whole again from another copy."""

    def mend(self, directory: Path, stream_id: int) -> Sequence[object]:
        """What was mended; nothing where no other copy can be had."""


@dataclass
class Opened:
    """An open catalog, the streams' writers, and what it took."""

    catalog: Catalog
    streams: dict[int, StreamState] = field(default_factory=dict)
    rebuilt: bool = False
    replayed_records: int = 0
    replay_s: float = 0.0
    quarantined: dict[int, fmt.ManifestIntegrityError] = field(default_factory=dict)
    mended: dict[int, list[object]] = field(default_factory=dict)
    unknown_events: int = 0
    _clean: bool = False


def stream_ids(manifest_dir: Path) -> list[int]:
    """The streams that have a folder."""
    if not manifest_dir.exists():
        return []
    return sorted(int(n) for n in os.listdir(manifest_dir) if n.isdecimal() and str(int(n)) == n)  # noqa: PTH208


def open_catalog(
    env: Env,
    catalog_dir: Path,
    manifest_dir: Path,
    settings: LogSettings,
    *,
    map_bytes: int = MAP_BYTES,
    mender: Mender | None = None,
) -> Opened:
    """The catalog, up to date with every stream's log, and a writer for each."""
    started_s = env.monotonic_s()
    opened = _open_rows(env, catalog_dir, map_bytes)
    try:
        if not _catch_up(env, opened, manifest_dir, mender):
            # Rows that do not fit the logs are no better than none.
            log.warning("catalog does not fit its logs and is rebuilt", extra={"directory": str(catalog_dir)})
            opened.catalog.abandon()
            discard(catalog_dir)
            mended = opened.mended
            opened = Opened(Catalog.open(env, catalog_dir, map_bytes=map_bytes), rebuilt=True, mended=mended)
            _catch_up(env, opened, manifest_dir, mender)
        for stream_id in stream_ids(manifest_dir):
            if stream_id not in opened.quarantined:
                opened.streams[stream_id] = open_stream(env, opened.catalog, manifest_dir, settings, stream_id)
    except BaseException:
        for stream in opened.streams.values():
            stream.log.close()
        opened.catalog.abandon()
        raise
    opened.replay_s = env.monotonic_s() - started_s
    return opened


def open_stream(env: Env, catalog: Catalog, manifest_dir: Path, settings: LogSettings, stream_id: int) -> StreamState:
    """A writer on the stream's log, which the rows are up to date with. Creates the folder of a new stream."""
    with catalog.view() as view:
        position = view.position(stream_id)
        fold = load_pending(view, stream_id)
    writer = ManifestLogWriter.open(env, manifest_dir / str(stream_id), settings, start=position)
    return StreamState(stream_id, writer, fold)


def _open_rows(env: Env, directory: Path, map_bytes: int) -> Opened:
    rebuilt, clean = not trusted(directory), closed_cleanly(directory)
    if rebuilt:
        discard(directory)
    try:
        return Opened(Catalog.open(env, directory, map_bytes=map_bytes), rebuilt=rebuilt, _clean=clean)
    except CorruptError as e:
        log.warning("catalog is rebuilt", extra={"error": str(e)})
        discard(directory)
        return Opened(Catalog.open(env, directory, map_bytes=map_bytes), rebuilt=True)


def _catch_up(env: Env, opened: Opened, manifest_dir: Path, mender: Mender | None) -> bool:
    """Replays every stream; False when trusted rows turn out not to fit."""
    for stream_id in stream_ids(manifest_dir):
        directory = manifest_dir / str(stream_id)
        error = _replay_mending(env, opened, directory, stream_id, mender)
        if error is None:
            if read_quarantine(directory) is not None:
                log.warning("quarantine lifted: the log replays again", extra={"stream_id": stream_id})
                lift(env, directory)
            continue
        if not opened.rebuilt and _go_on_behind(env, opened, directory, stream_id):
            continue
        # Rows that do not fit a sound log are rebuilt from it. Where it is the log that is damaged, the rows may
        # be all there is: they stay, and the stream takes no more.
        if not opened.rebuilt and _is_sound(directory):
            return False
        _set_apart(env, opened, directory, stream_id, error)
    return True


def _replay_mending(
    env: Env, opened: Opened, directory: Path, stream_id: int, mender: Mender | None
) -> fmt.ManifestIntegrityError | None:
    """Replays the stream, after mending it if it takes that; what is still wrong then."""
    error = _replay(env, opened, directory, stream_id)
    if mender is None or (error is None and not _ends_empty(directory)):
        return error
    mended = mender.mend(directory, stream_id)
    if not mended:
        return error
    opened.mended.setdefault(stream_id, []).extend(mended)
    if opened.rebuilt:
        # They may be of an older snapshot than the one that came back.
        with opened.catalog.writing() as txn:
            snapshots.clear(txn, opened.catalog, stream_id)
    return _replay(env, opened, directory, stream_id)


def _replay(env: Env, opened: Opened, directory: Path, stream_id: int) -> fmt.ManifestIntegrityError | None:
    try:
        opened.replayed_records += replay_stream(env, opened.catalog, directory, stream_id, counts=opened)
    except fmt.ManifestIntegrityError as e:
        return e
    return None


def _ends_empty(directory: Path) -> bool:
    """Whether the last chunk has its name and holds no commit: no crash of the process leaves that."""
    chunks = Stream(directory).chunks
    return bool(chunks) and not any(read_file(chunks[-1].path, length=fmt.CHUNK_HEADER_LEN))


def _go_on_behind(env: Env, opened: Opened, directory: Path, stream_id: int) -> bool:
    """The rows know everything the damaged place held: a snapshot of them takes its place. Whether they do."""
    with opened.catalog.view() as view:
        position = view.position(stream_id)
        in_remote = load_pending(view, stream_id).log_objects
    found = survey(directory)
    last = max((chunk.index for chunk in found.chunks), default=-1)
    if position is None or last > position.chunk_index:
        return False
    # Where the file of the position's chunk is gone, the rows are what is left of it.
    if last == position.chunk_index and not _has_less(found.chunks[-1], position, opened._clean):
        return False
    state_dir = directory.parent.parent
    snapshot_last = max((int(match[1]) for key in in_remote if (match := _SNAPSHOT_KEY.search(key))), default=0)
    start_behind(
        env,
        opened.catalog,
        directory,
        stream_id,
        chunk_index=max(last, position.chunk_index) + 1,
        ordinal=position.ordinal,
        snapshot_last=snapshot_last,
        away=partial(set_aside, env, state_dir, directory.name),
    )
    if read_quarantine(directory) is not None:
        lift(env, directory)
    log.warning(
        "the end of a log was damaged; the catalog had all of it, and the log goes on behind a snapshot",
        extra={"stream_id": stream_id, "chunk_index": position.chunk_index, "ordinal": position.ordinal},
    )
    return True


def _has_less(where: ChunkFile, position: fmt.LogPosition, clean: bool) -> bool:
    """Whether the log's last chunk is damaged, and nothing was committed to it that the rows do not have.

    After a clean stop they have everything. After the end of the process they may lack the last group, but for what
    the chunk's own header says was committed.
    """
    try:
        if parse_chunk(where.read(), path=str(where.path), last=True, expect_index=where.index) is not None:
            return False  # a sound log that ends earlier: it is the log that counts
    except (Aof2Error, OSError):
        pass
    if clean:
        return True
    try:
        head = fmt.unpack_chunk_header(read_file(where.path, length=fmt.CHUNK_HEADER_LEN), path=str(where.path))
    except (Aof2Error, OSError):
        return False
    return head.chunk_index == where.index and head.committed_len <= position.chunk_offset


def _set_apart(env: Env, opened: Opened, directory: Path, stream_id: int, error: fmt.ManifestIntegrityError) -> None:
    """The stream stays as far as it replays, without a writer; what is gone is written down with its mark."""
    with opened.catalog.view() as view:
        position = view.position(stream_id)
    _apply_committed_part(opened, directory, stream_id, position)
    with opened.catalog.view() as view:
        position = view.position(stream_id)
        gone = find_gone(directory, position)
        files = touched_files(view, directory, stream_id, position)
    log.error(
        "a damaged log makes its tenant read-only",
        extra={"stream_id": stream_id, "error": str(error), "gone": gone.text, "files": files[:10]},
    )
    quarantine(env, directory, error, gone=gone.text, files=files)
    opened.quarantined[stream_id] = error


def _apply_committed_part(opened: Opened, directory: Path, stream_id: int, position: fmt.LogPosition | None) -> None:
    """The whole commits of the damaged chunk that are before the damage."""
    first, ordinal = (position.chunk_index, position.ordinal) if position else (0, 0)
    for where in survey(directory).chunks:
        part = committed_part(where) if where.index in (first, first + 1) else None
        if part is None or part.end_position.ordinal <= ordinal:
            continue
        at_start = position is not None and part.index == first
        if not at_start and part.header.base_record != ordinal:
            continue
        with contextlib.suppress(fmt.ManifestIntegrityError):
            apply_chunk(opened.catalog, stream_id, part, position)
            return


def _is_sound(directory: Path) -> bool:
    """Whether the log can be replayed by itself, from its newest snapshot on."""
    snapshot = newest_snapshot(directory)
    try:
        for _ in _chunks(directory, snapshot.position if snapshot else None):
            pass
    except fmt.ManifestIntegrityError:
        return False
    return True


def replay_stream(
    env: Env,
    catalog: Catalog,
    directory: Path,
    stream_id: int,
    *,
    upto: fmt.LogPosition | None = None,
    counts: Opened | None = None,
    quiet: bool = False,
    apply: Apply = apply_mutations,
    load: Callable[[Any, Catalog, int, Snapshot], None] = snapshots.load,
) -> int:
    """Brings one stream's rows up to the end of its log, or to `upto`; how many records that took. Nothing is written
    to the log's folder. `apply` and `load` bring commits and a snapshot into the rows.

    ManifestIntegrityError: the log is damaged, or does not reach `upto`. FileNotFoundError: retention took a chunk
    meanwhile; start again.
    """
    with catalog.view() as view:
        position = view.position(stream_id)
    if position is None:
        level = logging.DEBUG if quiet else logging.WARNING
        position = _load_snapshot(catalog, directory, stream_id, upto, level, load)
        env.failpoint("catalog.recover.loaded")
    began = at = position.ordinal if position else 0
    if upto is not None and at >= upto.ordinal:
        return 0
    reached = position is None or position.chunk_offset == fmt.CHUNK_HEADER_LEN
    for chunk in _chunks(directory, position):
        reached = True
        part = _cut(chunk, upto)
        apply_chunk(catalog, stream_id, part, position, counts, apply=apply)
        env.failpoint("catalog.recover.replayed")
        at = part.end_position.ordinal
        if upto is not None and at >= upto.ordinal:
            break
    if upto is not None and at < upto.ordinal:
        what = f"the log ends at record {at}, {upto.ordinal} were written"
        raise fmt.ManifestGapError(what, path=str(directory), chunk_index=upto.chunk_index)
    if not reached and position is not None:
        what = f"it holds no commit, though the catalog knows {position.ordinal} records"
        raise fmt.ManifestGapError(what, path=str(directory), chunk_index=position.chunk_index)
    return at - began


def _load_snapshot(
    catalog: Catalog,
    directory: Path,
    stream_id: int,
    upto: fmt.LogPosition | None,
    level: int,
    load: Callable[[Any, Catalog, int, Snapshot], None],
) -> fmt.LogPosition | None:
    """The newest snapshot that is whole and not past `upto`, into the rows."""
    for snapshot in usable_snapshots(directory, level=level):
        if upto is None or snapshot.position.ordinal <= upto.ordinal:
            with catalog.writing() as txn:
                load(txn, catalog, stream_id, snapshot)
            return snapshot.position
    return None


def _cut(chunk: Chunk, upto: fmt.LogPosition | None) -> Chunk:
    """The chunk up to a position, which must be where one of its records starts, or its end."""
    if upto is None or chunk.end_position.ordinal <= upto.ordinal:
        return chunk
    count = upto.ordinal - chunk.header.base_record
    at = chunk.rows.offset[count] if count > 0 else fmt.CHUNK_HEADER_LEN
    if count < 0 or (upto.chunk_index == chunk.index and at != upto.chunk_offset):
        what = f"no record starts at byte {upto.chunk_offset}, where record {upto.ordinal} should"
        raise fmt.ManifestIntegrityError(what, path=chunk.path, chunk_index=chunk.index, offset=upto.chunk_offset)
    rows = native.ManifestRows(*(column[:count] for column in chunk.rows))
    return replace(chunk, rows=rows, count=count, end=at)


def _chunks(directory: Path, position: fmt.LogPosition | None) -> Iterator[Chunk]:
    first = True
    for chunk in Stream(directory).read(position):
        if first and position is None and chunk.header.base_record != 0:
            what = f"the log starts at record {chunk.header.base_record} and no snapshot covers what came before"
            raise fmt.ManifestGapError(what, path=str(directory), chunk_index=chunk.index - 1)
        first = False
        yield chunk


def apply_chunk(
    catalog: Catalog,
    stream_id: int,
    chunk: Chunk,
    position: fmt.LogPosition | None,
    counts: Opened | None = None,
    *,
    apply: Apply = apply_mutations,
) -> None:
    """One chunk's records and row changes in one transaction, with the position after them."""
    with catalog.writing() as txn:
        view = catalog.view_of(txn)
        fold = load_pending(view, stream_id)
        fold.view = view

        def on_event(event: Event) -> None:
            if event.schema_id == EVENT_SCHEMA_ID:
                apply(txn, catalog, stream_id, decode_event(event.body))

        fold.on_event = on_event
        fold.apply_chunk(chunk, chunk.goes_on_at(position))
        if counts is not None:
            counts.unknown_events += sum(fold.unknown_schemas.values())
        fold.flush(txn, catalog.db("segments"))
        put_positions(txn, catalog, {stream_id: chunk.end_position})
