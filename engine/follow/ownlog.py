"""A follower's own log: what moved between the tiers of this machine, and what is pinned, apart from the writer's log.

    own/<stream>/<index>.mlog   a manifest log as any other: tier records, and the rows that are this machine's
    own/<stream>/own.bin        those rows at one position of it: {position, Own}; chunks before it are history alone

The rows know how far they have it (in `meta`, beside the position of the writer's log). Rows that were thrown away are
made of the writer's log first, then of this one.

Invariants
- Nothing but rows of this machine's comes out of it: of an object, the identity of its backing file alone.
- What it says of a chunk that the writer's rows do not have is passed over.

Owner: the thread that opens the volume; then the catalog's writer thread. A crash leaves a log that is ahead of the
rows by a group at most.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Mutation, mutations_in
from aof2.engine.catalog.fold import StreamFold
from aof2.engine.catalog.recovery import replay_stream
from aof2.engine.catalog.rows import Row
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import StreamState, apply_mutations
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.follow.mark import load_mark, own_dir_of
from aof2.engine.follow.ownrows import Own, OwnRows, dump_own, is_own, put_own
from aof2.engine.manifest.format import LogPosition, chunk_name
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from aof2.engine.replicate.stream import chunk_indexes

log = logging.getLogger(__name__)

OWN_NAME: Final = "own.bin"
POSITION_PREFIX: Final = b"\xff\xff\xff\xffo"
HISTORY_CHUNKS: Final = 16  # of what `own.bin` covers, kept for `why`
SETTINGS: Final = LogSettings(chunk_capacity=1 << 20, rotation_period_ms=3_600_000)
CRASH_POINTS: Final = ("follow.own.saved",)

_OBJECTS: Final = (t.OBJECTS.number, t.OBJECTS.tag)


class OwnAt(Row, frozen=True):
    """The content of own.bin. `position` None: of no log, and newer than all of it (`takeover.py`)."""

    position: tuple[int, int, int] | None
    own: Own


def own_position(view: View, stream_id: int) -> LogPosition | None:
    """How far the rows have this log."""
    data = view.raw("meta", POSITION_PREFIX + t.STREAM.pack(stream_id))
    return None if data is None else LogPosition(*msgspec.msgpack.decode(data, type=tuple[int, int, int]))


def put_own_position(txn: Any, catalog: Catalog, stream_id: int, position: LogPosition) -> None:
    txn.put(POSITION_PREFIX + t.STREAM.pack(stream_id), t.encode(tuple(position)), db=catalog.db("meta"))


def load_own(directory: Path) -> OwnAt | None:
    try:
        return msgspec.msgpack.decode((directory / OWN_NAME).read_bytes(), type=OwnAt)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        log.warning("what this follower had on its disk is looked for anew", extra={"error": str(e)})
        return None


def open_own(env: Env, catalog: Catalog, state_dir: Path, stream_id: int) -> StreamState:
    """The stream's own log, open for writing, with rows that have all of it. Blocks."""
    directory = own_dir_of(state_dir, stream_id)
    env.make_dirs(directory)
    try:
        _replay(catalog, directory, stream_id)
    except Aof2Error as e:
        # Only what is here anyway is lost: it is fetched again.
        log.warning("a follower's own log is begun anew", extra={"stream_id": stream_id, "error": str(e)})
        shutil.rmtree(directory)
        env.make_dirs(directory)
        with catalog.writing() as txn:
            txn.delete(POSITION_PREFIX + t.STREAM.pack(stream_id), db=catalog.db("meta"))
    with catalog.view() as view:
        position = own_position(view, stream_id)
    writer = ManifestLogWriter.open(env, directory, SETTINGS, start=position)
    return StreamState(stream_id, writer, StreamFold(stream_id))


def replay_here(
    env: Env, catalog: Catalog, state_dir: Path, stream_id: int, *, upto: LogPosition | None = None
) -> None:
    """The rows that a folder has of a stream, out of its logs, wherever they are rebuilt beside it: a writer's, or a
    follower's with what is its own. `replay_stream` says what is raised."""
    directory = state_dir / "manifest" / str(stream_id)
    if load_mark(state_dir) is None:
        replay_stream(env, catalog, directory, stream_id, upto=upto, quiet=True)
        return
    own = OwnRows()
    replay_stream(env, catalog, directory, stream_id, upto=upto, quiet=True, apply=own.apply, load=own.load)
    own_dir = own_dir_of(state_dir, stream_id)
    if own_dir.is_dir():
        _replay(catalog, own_dir, stream_id)


def _replay(catalog: Catalog, directory: Path, stream_id: int) -> None:
    with catalog.view() as view:
        position = own_position(view, stream_id)
    saved = load_own(directory) if position is None else None
    if saved is not None:
        with catalog.writing() as txn:
            put_own(txn, catalog, stream_id, saved.own)
            position = LogPosition(*saved.position) if saved.position is not None else None
            if position is not None:
                put_own_position(txn, catalog, stream_id, position)
    changed = False
    for chunk in Stream(directory).read(position):
        records = ((r.type_id, r.payload) for r in chunk.records(chunk.goes_on_at(position)))
        with catalog.writing() as txn:
            _merge(txn, catalog, stream_id, mutations_in(records))
            put_own_position(txn, catalog, stream_id, chunk.end_position)
        changed = True
    if changed:
        with catalog.writing() as txn:
            _count_anew(txn, catalog, stream_id)


def _merge(txn: Any, catalog: Catalog, stream_id: int, mutations: Iterable[Mutation]) -> None:
    """What the log says of this machine, into the rows as they are now. The last word on a row counts."""
    last = {(number, key): value for number, key, value in mutations}
    view = catalog.view_of(txn)
    out: list[Mutation] = []
    for (number, key), value in last.items():
        slot = (number, key[:1])
        if slot == _OBJECTS and value is not None:
            row = view.get(stream_id, t.OBJECTS, t.OBJECTS.unpack_key(key[1:]))
            if row is not None:
                backing = t.OBJECTS.decode(value).backing
                out.append((number, key, t.encode(msgspec.structs.replace(row, backing=backing))))
        elif is_own(number, key) and (number != t.CHUNKS.number or _has_chunk(view, stream_id, key)):
            out.append((number, key, value))
    apply_mutations(txn, catalog, stream_id, out)


def _has_chunk(view: View, stream_id: int, key: bytes) -> bool:
    return view.get(stream_id, t.CHUNKS, t.RESIDENCY.unpack_key(key[1:])) is not None


def _count_anew(txn: Any, catalog: Catalog, stream_id: int) -> None:
    hot = warm = 0
    view = catalog.view_of(txn)
    for chunk_id, here in view.scan(stream_id, t.RESIDENCY):
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        if chunk is not None:
            hot += objects.chunk_disk_bytes(here.mask, chunk, objects.block_bytes_of(chunk)) if here.mask else 0
            warm += here.warm_bytes
    counts = ((objects.HOT_BYTES, hot), (objects.WARM_BYTES, warm))
    known = [(name, value) for name, value in counts if value or view.get(stream_id, t.COUNTERS, name) is not None]
    rows = [(t.COUNTERS.number, t.COUNTERS.key(name), t.encode(value)) for name, value in known]
    apply_mutations(txn, catalog, stream_id, rows)


def save_own(env: Env, catalog: Catalog, state_dir: Path, stream_id: int, *, of_log: bool = True) -> Own:
    """Writes down what is this machine's, and deletes what that covers of the log. The log is synced before. Blocks.
    `of_log` off: it stands for all of the log, wherever that ends."""
    directory = own_dir_of(state_dir, stream_id)
    with catalog.view() as view:
        position = own_position(view, stream_id)
        own = dump_own(view, stream_id)
    env.make_dirs(directory)
    at = (position.chunk_index, position.chunk_offset, position.ordinal) if position is not None and of_log else None
    env.replace_file(directory / OWN_NAME, t.encode(OwnAt(at, own)))
    env.failpoint("follow.own.saved")
    if position is not None:
        for index in chunk_indexes(directory):
            if index < position.chunk_index - HISTORY_CHUNKS:
                env.files.unlink(directory / chunk_name(index))
        env.files.fsync_dir(directory)
    return own
