"""A second state folder, fed only from the remote: its rows are the writer's rows, as far as the log got there.

Each `catch_up` lists the streams, fetches the chunks after the ones it has (from objects or bundles), and replays them
into its own catalog. Where chunks are gone for good, dropped after a snapshot that covers them, it goes on from that
snapshot: the stream's rows are replaced by it in one transaction. A mounted follower (`engine/follow`) tails besides:
`take_next` asks for one chunk, and lists nothing.

A folder whose log is not the remote's any more (the volume was restored to an earlier end) takes the newest snapshot
there anew; it says so.

Residency. Where the writer had its bytes says nothing about this machine. Of a folder that is not mounted, residency
rows and the identities of backing files are cleared after every replay and its byte counters are zero, in the catalog
only (the log here is the writer's, byte for byte). A mounted follower replays around its own (`follow/ownrows.py`). A
folder that is to be opened as a volume gets the same as a batch in its log: see `restore`, `follow/takeover.py`.

Invariants
- Nothing is placed in the folder that is not verified; files get their names by rename, after fsync.
- Chunks are placed in order, so the folder never has a hole behind which replay would stop unnoticed.
- The remote is only read. One process a folder (the lock that a volume takes, too).

Owner: blocking; one thread at a time a stream; what touches rows goes through `alone`, to the catalog thread of a
mounted one. A crash leaves whole chunks that the next `catch_up` replays, and rows whose residency it clears before
anything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from aof2.engine.catalog import snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Mutation
from aof2.engine.catalog.recovery import apply_chunk, replay_stream, stream_ids
from aof2.engine.catalog.store import MAP_BYTES, Catalog, discard, trusted
from aof2.engine.catalog.writer import apply_mutations
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, ReadOnlyError, UnsupportedError
from aof2.engine.manifest.chunk import as_downloaded, as_uploaded
from aof2.engine.manifest.format import (
    CHUNK_HEADER_LEN,
    LogPosition,
    ManifestGapError,
    ManifestIntegrityError,
    chunk_key,
    chunk_name,
)
from aof2.engine.manifest.reader import Chunk, parse_chunk
from aof2.engine.manifest.snapshot import Snapshot, list_snapshots, local_snapshots, snapshot_name
from aof2.engine.objects import HOT_BYTES, WARM_BYTES
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.fence import VolumeRecord, read_volume
from aof2.engine.remote.keys import manifest_snapshot_key
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import load_identity, remember_found
from aof2.engine.replicate.listing import Inventory, RemoteLog, list_stream, list_streams
from aof2.engine.replicate.stream import chunk_indexes

log = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL_CHUNKS_MAX: Final = 64
CRASH_POINTS: Final = (
    "replicate.follow.chunk",
    "replicate.follow.snapshot",
    "replicate.follow.jumped",
    "replicate.follow.replayed",
    "replicate.follow.reset",
)


class StreamFollowed(msgspec.Struct, frozen=True, kw_only=True):
    """What one `catch_up` did for a stream, and how far it is. `missing` says why it is not further."""

    stream_id: int
    position: LogPosition | None
    chunks_fetched: int = 0
    records: int = 0
    snapshot_id: int | None = None
    """The snapshot that replay started from this time, or jumped to over dropped chunks."""
    missing: list[str] = msgspec.field(default_factory=list)
    remote_chunk_last: int = -1
    remote_snapshot_last: int = 0
    """The highest numbers that are taken on the remote, whether or not they could be used."""


class Rows(Protocol):
    """How the writer's commits and snapshots come into the rows."""

    def apply(self, txn: Any, catalog: Catalog, stream_id: int, mutations: Iterable[Mutation]) -> None: ...

    def load(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        """Into empty rows."""

    def jump(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        """Instead of what there is."""

    def clear(self, txn: Any, catalog: Catalog, stream_id: int) -> None:
        """Nothing is left; a jump, or the log's beginning, comes next."""


class AsLogged:
    """The rows are exactly the log's."""

    def apply(self, txn: Any, catalog: Catalog, stream_id: int, mutations: Iterable[Mutation]) -> None:
        apply_mutations(txn, catalog, stream_id, mutations)

    def load(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        snapshots.load(txn, catalog, stream_id, snapshot)

    def jump(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        self.clear(txn, catalog, stream_id)
        self.load(txn, catalog, stream_id, snapshot)

    def clear(self, txn: Any, catalog: Catalog, stream_id: int) -> None:
        snapshots.clear(txn, catalog, stream_id)


def _at_once(work: Callable[[], T]) -> T:
    return work()


class LogFolder:
    """The logs of a folder that follows, and the rows they make."""

    def __init__(
        self,
        env: Env,
        store: RemoteStore,
        state_dir: Path,
        catalog: Catalog,
        rows: Rows,
        *,
        clear_residency: bool = False,
    ) -> None:
        self.env = env
        self.state_dir = state_dir
        self.catalog = catalog
        self.alone: Callable[[Callable[[], int | None]], int | None] = _at_once
        self._store = store
        self._rows = rows
        self._clear_residency = clear_residency
        self._reset_due: set[int] = set()

    def replay_all(self) -> None:
        """The rows are up to the end of the logs here; what those lack, the next catch-up fetches."""
        for stream_id in stream_ids(self.state_dir / "manifest"):
            self._reset_due.add(stream_id)
            self._replay(stream_id, [])

    # -- following ---------------------------------------------------------------------------------------------

    def check_volume(self) -> VolumeRecord:
        """The remote's volume, which must be the one this folder follows; RemoteMissingError, FencedError."""
        found = read_volume(self._store)
        if found is None:
            raise RemoteMissingError("volume.json: the remote holds no volume; is it the right url?")
        known = load_identity(self.state_dir)
        if known is None:
            remember_found(self.env, self.state_dir, found[0])
        elif known.volume_uuid != found[0].volume_uuid:
            theirs, ours = found[0].volume_uuid, known.volume_uuid
            raise FencedError(f"the remote holds volume {theirs}, this state_dir follows {ours}")
        return found[0]

    def catch_up(self) -> list[StreamFollowed]:
        """Brings every stream as far as the remote has it.

        TransientError when the remote is away: call again. UnsupportedError: a newer AOF2 writes there, upgrade.
        """
        self.check_volume()
        return [self.follow(stream_id, found) for stream_id, found in sorted(list_streams(self._store).items())]

    def catch_up_stream(self, stream_id: int) -> StreamFollowed:
        """The same for one stream, by a listing of its own."""
        return self.follow(stream_id, list_stream(self._store, stream_id))

    def take_next(self, stream_id: int) -> Chunk | None:
        """The chunk that comes next, placed and replayed, by one GET; None: there is none, or not by itself.

        ManifestIntegrityError: it is not what follows here; `catch_up_stream` says what is.
        """
        position = self.position(stream_id)
        directory = self._directory(stream_id)
        index = position.chunk_index if position else 0
        while (directory / chunk_name(index)).exists():
            index += 1
        key = chunk_key(stream_id, index)
        try:
            _, data = self._store.get_blob(key)
        except RemoteMissingError:
            return None
        chunk = parse_chunk(data, path=key, last=False, expect_index=index)
        if chunk is None or not chunk.header.sealed or chunk.end != len(data):
            raise ManifestIntegrityError("not a whole sealed chunk", path=key, chunk_index=index)
        begins = index != (position.chunk_index if position else 0)
        if begins and chunk.header.base_record != (position.ordinal if position else 0):
            raise ManifestGapError("it does not begin where the log here ends", path=key, chunk_index=index)
        self.env.make_dirs(directory)
        self.env.replace_file(directory / chunk_name(index), as_downloaded(data), mode=0o400)
        self.env.failpoint("replicate.follow.chunk")
        self.alone(partial(apply_chunk, self.catalog, stream_id, chunk, position, apply=self._rows.apply))
        self.env.failpoint("replicate.follow.replayed")
        return chunk

    def has_snapshot_after(self, stream_id: int, snapshot_id: int) -> bool:
        """Whether the writer stored another one, behind which it may have bundled or deleted chunks. One HEAD."""
        return self._store.head_blob(manifest_snapshot_key(stream_id, snapshot_id + 1)) is not None

    def follow(self, stream_id: int, inventory: Inventory) -> StreamFollowed:
        """Brings a stream as far as the remote has it, by what was listed of it."""
        directory = self._directory(stream_id)
        self.env.make_dirs(directory)
        remote = RemoteLog(self._store, stream_id, inventory)
        position = self.position(stream_id)
        missing: list[str] = []
        if position is not None and (why := self._parted(remote, directory, position)):
            log.warning("the log of the remote is another one now; its snapshot is taken anew", extra={"why": why})
            missing.append(why)
            self._begin_anew(directory, stream_id)
            position = None
        used: int | None = None
        fetched = 0
        if position is None and (started := self._jump(remote, stream_id, None, missing)) is not None:
            used, position = started
        while True:
            count, gap = self._fetch_from(remote, directory, position)
            fetched += count
            if gap is None:
                break
            self._replay(stream_id, missing)  # what came before the gap counts if nothing else is found
            position = self.position(stream_id) or position
            jumped = self._jump(remote, stream_id, position, missing)
            if jumped is None:
                missing.append(gap)
                break
            used, position = jumped
        records = self._replay(stream_id, missing)
        self._drop_old(remote, directory, missing)
        return StreamFollowed(
            stream_id=stream_id,
            position=self.position(stream_id),
            chunks_fetched=fetched,
            records=records,
            snapshot_id=used,
            missing=missing,
            remote_chunk_last=max(remote.inventory.chunk_indexes(), default=-1),
            remote_snapshot_last=max(remote.inventory.snapshots, default=0),
        )

    def _usable(self, remote: RemoteLog, missing: list[str], *, after: int) -> Iterator[tuple[bytes, Snapshot]]:
        """Snapshots past chunk `after`, newest first, that are whole and whose chunk can be had."""
        for snapshot_id in sorted(remote.inventory.snapshots, reverse=True):
            try:
                data, snapshot = remote.snapshot(snapshot_id)
            except (CorruptError, UnsupportedError, RemoteMissingError) as e:
                missing.append(f"snapshot {snapshot_id}: {e}")
                continue
            if snapshot.position.chunk_index > after and remote.follows(snapshot.position):
                yield data, snapshot

    def _fetch_from(self, remote: RemoteLog, directory: Path, position: LogPosition | None) -> tuple[int, str | None]:
        """Places chunks from `position` on; how many, and what stopped it before the end."""
        index = position.chunk_index if position else 0
        fetched = 0
        while True:
            path = directory / chunk_name(index)
            if path.exists():
                index += 1
                continue
            if not remote.inventory.has_chunk(index):
                later = [i for i in remote.inventory.chunk_indexes() if i > index]
                return fetched, f"chunks {index} to {min(later) - 1} are not on the remote" if later else None
            try:
                data, _ = remote.chunk(index)
            except CorruptError as e:
                return fetched, str(e)
            self.env.replace_file(path, as_downloaded(data), mode=0o400)
            self.env.failpoint("replicate.follow.chunk")
            fetched += 1
            index += 1

    def _jump(
        self, remote: RemoteLog, stream_id: int, position: LogPosition | None, missing: list[str]
    ) -> tuple[int, LogPosition] | None:
        """Makes the stream's rows those of the newest snapshot past `position`; None when there is none."""
        directory = self._directory(stream_id)
        for data, snapshot in self._usable(remote, missing, after=position.chunk_index if position else -1):
            snapshot_id = snapshot.snapshot_id
            self._place_snapshot(directory, snapshot_id, data)
            self.alone(partial(self._load, stream_id, snapshot))
            self._reset_due.add(stream_id)
            self.env.failpoint("replicate.follow.jumped")
            _unlink_chunks(self.env, directory, before=snapshot.position.chunk_index)
            log.info("follower jumped", extra={"stream_id": stream_id, "snapshot_id": snapshot_id})
            return snapshot_id, snapshot.position
        return None

    def _load(self, stream_id: int, snapshot: Snapshot) -> None:
        with self.catalog.writing() as txn:
            self._rows.jump(txn, self.catalog, stream_id, snapshot)

    def _parted(self, remote: RemoteLog, directory: Path, position: LogPosition) -> str:
        """Why the log here is not the beginning of the one there; "" where it is, or where that cannot be told."""
        there = remote.inventory.chunk_indexes()
        here = chunk_indexes(directory)
        newest = max((index for index in here if index in there), default=None)
        if newest is not None:
            try:
                theirs, _ = remote.chunk(newest)
            except (CorruptError, UnsupportedError):
                return ""
            ours = as_uploaded((directory / chunk_name(newest)).read_bytes())
            if theirs[CHUNK_HEADER_LEN:] != ours[CHUNK_HEADER_LEN:]:
                return f"chunk {newest} of stream {remote.stream_id} holds other records there than here"
        ends = max(there, default=-1)
        if here and ends < max(here) and not self._has_later(remote, position):
            return f"the log of stream {remote.stream_id} is at chunk {max(here)} here, at {ends} there"
        return ""

    @staticmethod
    def _has_later(remote: RemoteLog, position: LogPosition) -> bool:
        """Whether a snapshot there stands for what is here: its chunks are gone, and none came after it."""
        for snapshot_id in sorted(remote.inventory.snapshots, reverse=True):
            with contextlib.suppress(CorruptError, UnsupportedError, RemoteMissingError):
                return remote.snapshot(snapshot_id)[1].position.ordinal >= position.ordinal
        return False

    def _begin_anew(self, directory: Path, stream_id: int) -> None:
        """The rows go, then the log here: a snapshot, or the log's beginning, takes their place."""
        self.alone(partial(self._clear, stream_id))
        _unlink_chunks(self.env, directory, before=1 << 63)
        for snapshot_id in list_snapshots(directory):
            self.env.files.unlink(directory / snapshot_name(snapshot_id))
        self.env.files.fsync_dir(directory)

    def _clear(self, stream_id: int) -> None:
        with self.catalog.writing() as txn:
            self._rows.clear(txn, self.catalog, stream_id)

    def _place_snapshot(self, directory: Path, snapshot_id: int, data: bytes) -> None:
        self.env.replace_file(directory / snapshot_name(snapshot_id), data)
        self.env.failpoint("replicate.follow.snapshot")

    def take_snapshot(self, stream_id: int) -> None:
        """The newest snapshot of what is here takes the place of older chunks, as on the writer's disk."""
        remote = RemoteLog(self._store, stream_id)
        self._drop_old(remote, self._directory(stream_id), [], chunks_max=0)

    def _drop_old(
        self, remote: RemoteLog, directory: Path, missing: list[str], *, chunks_max: int | None = None
    ) -> None:
        """Keeps the folder small: with many chunks here, a newer snapshot takes the place of the older ones."""
        position = self.position(int(directory.name))
        most = LOCAL_CHUNKS_MAX if chunks_max is None else chunks_max
        if len(chunk_indexes(directory)) <= most or position is None:
            return
        known = {s.snapshot_id for s in local_snapshots(directory)}
        for data, snapshot in self._usable(remote, missing, after=-1):
            if snapshot.position.ordinal > position.ordinal:
                continue
            snapshot_id = snapshot.snapshot_id
            if snapshot_id not in known:
                self._place_snapshot(directory, snapshot_id, data)
            _unlink_chunks(self.env, directory, before=snapshot.position.chunk_index)
            for old in list_snapshots(directory):
                if old < snapshot_id:
                    self.env.files.unlink(directory / snapshot_name(old))
            return

    def _replay(self, stream_id: int, missing: list[str]) -> int:
        """The folder's chunks into the rows; then this machine's residency, which is none."""
        before = self.position(stream_id)
        records = 0
        replay = partial(
            replay_stream,
            self.env,
            self.catalog,
            self._directory(stream_id),
            stream_id,
            apply=self._rows.apply,
            load=self._rows.load,
        )
        try:
            records = self.alone(replay) or 0
        except ManifestIntegrityError as e:
            missing.append(str(e))
        self.env.failpoint("replicate.follow.replayed")
        if self._clear_residency and (stream_id in self._reset_due or self.position(stream_id) != before):
            reset_residency(self.catalog, stream_id)
            self._reset_due.discard(stream_id)
            self.env.failpoint("replicate.follow.reset")
        return records

    def _directory(self, stream_id: int) -> Path:
        return self.state_dir / "manifest" / str(stream_id)

    def position(self, stream_id: int) -> LogPosition | None:
        with self.catalog.view() as view:
            return view.position(stream_id)


class Follower:
    """A folder that follows without being mounted; the folder's lock and its catalog are its own. Opening asks the
    remote nothing."""

    def __init__(
        self,
        env: Env,
        store: RemoteStore,
        state_dir: Path,
        *,
        map_bytes: int = MAP_BYTES,
        clear_residency: bool = True,
    ) -> None:
        """`clear_residency` off: the rows are exactly the log's. For a caller that clears them in the log itself."""
        self._lock_fd = _lock(env, state_dir)
        try:
            directory = state_dir / "catalog"
            if not trusted(directory):
                discard(directory)
            self.catalog = Catalog.open(env, directory, map_bytes=map_bytes)
            self._folder = LogFolder(env, store, state_dir, self.catalog, AsLogged(), clear_residency=clear_residency)
            self._folder.replay_all()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        if self._lock_fd >= 0:
            self.catalog.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_volume(self) -> VolumeRecord:
        """See `LogFolder`."""
        return self._folder.check_volume()

    def catch_up(self) -> list[StreamFollowed]:
        """See `LogFolder`."""
        return self._folder.catch_up()


def reset_residency(catalog: Catalog, stream_id: int) -> None:
    """Nothing of the stream is on this machine: one transaction on the rows alone."""
    with catalog.writing() as txn:
        view = catalog.view_of(txn)
        mutations: list[Mutation] = [(t.WARM.number, t.WARM.key(i), None) for i, _ in view.scan(stream_id, t.WARM)]
        mutations += [(t.RESIDENCY.number, t.RESIDENCY.key(i), None) for i, _ in view.scan(stream_id, t.RESIDENCY)]
        for key, row in view.scan(stream_id, t.OBJECTS):
            if row.backing is not None:
                cleared = msgspec.structs.replace(row, backing=None)
                mutations.append((t.OBJECTS.number, t.OBJECTS.key(key), t.encode(cleared)))
        for counter in (HOT_BYTES, WARM_BYTES):
            if view.get(stream_id, t.COUNTERS, counter):
                mutations.append((t.COUNTERS.number, t.COUNTERS.key(counter), t.encode(0)))
        apply_mutations(txn, catalog, stream_id, mutations)


def _unlink_chunks(env: Env, directory: Path, *, before: int) -> None:
    for index in chunk_indexes(directory):
        if index < before:
            env.files.unlink(directory / chunk_name(index))
    env.files.fsync_dir(directory)


def _lock(env: Env, state_dir: Path) -> int:
    env.make_dirs(state_dir)
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ReadOnlyError(f"{state_dir}: another aof2 process has this folder open; stop it first") from None
    return fd
