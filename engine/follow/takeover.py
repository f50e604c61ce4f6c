"""A folder that followed becomes the writer's: the warm standby takes over, with what it has on its disk.

    the writer left cleanly, or `--take` → claim → the log's end, listed → own rows written down → mark: taking
    → catalog thrown away, made of the log alone → (opened as any writer's) → own rows as commits of its log → mark gone

Until the claim, nothing here or there has changed. A writer that is taken from notices within the replicator's
heartbeat and writes no more; what it put until then is read before the folder goes on (`SETTLE_S`).

Invariants
- The writer is fenced before the log's end is read for the last time.
- The rows are made of the log and nothing else before this machine writes to it; residency of this machine is in the
  log from then on, as restore puts that of an empty one.

Owner: blocking; the thread that opens the volume, under the folder's lock. A crash leaves the mark: the next mount goes
on where it says.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.catalog.store import Catalog, discard, trusted
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, ReadOnlyError
from aof2.engine.follow.heartbeat import delete_heartbeat
from aof2.engine.follow.mark import OWN_DIR, FollowerMark, load_mark, own_dir_of, remove_mark, save_mark
from aof2.engine.follow.ownlog import load_own, open_own, save_own
from aof2.engine.follow.ownrows import OwnChunk, OwnRows, place_own
from aof2.engine.manifest import payloads as p
from aof2.engine.opening import VOLUME_STREAM
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.fence import VolumeRecord, read_volume
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import claimed_by, load_identity, remember_found, take_claim
from aof2.engine.replicate.follow import LogFolder
from aof2.engine.replicate.listing import list_streams
from aof2.engine.replicate.lost import TenantSalvage
from aof2.engine.replicate.restore import restore_audit
from aof2.engine.settings import Settings

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

# What a writer that is fenced may take to notice: the replicator asks every 10 s while it writes.
SETTLE_S: Final = 12.0
SETTLE_LOOK_S: Final = 1.0
PAGE: Final = 2048  # chunks a commit
CRASH_POINTS: Final = ("follow.take.claimed", "follow.take.saved", "follow.take.marked", "follow.take.logged")


class NotLeftError(ReadOnlyError):
    """The volume has a writer. Wait until it unmounts, take over from it, or follow on."""


def become_writer(env: Env, settings: Settings, remote: RemoteStore, *, take: bool = False) -> None:
    """Nothing, unless the folder follows. NotLeftError: there is a writer, and it was not to be taken over from."""
    state_dir = settings.volume.state_dir
    mark = load_mark(state_dir)
    if mark is None or mark.taking:
        if mark is not None:
            _forget_rows(state_dir)
        return
    if not settings.manifest.enabled:
        raise ReadOnlyError(f"{state_dir}: this state_dir follows; mount it with -o follow, which is read-only, too")
    catalog = _open_rows(env, state_dir)
    try:
        own = OwnRows()
        folder = LogFolder(env, remote, state_dir, catalog, own)
        folder.replay_all()
        found = folder.check_volume()
        left = _has_left(found)
        ours = (known := load_identity(state_dir)) is not None and known.made(found)  # a take-over that a crash ended
        if not (left or ours or take):
            raise NotLeftError(
                f"{state_dir}: this state_dir follows, and the volume has a writer ({claimed_by(found)}); mount with "
                "-o follow, or with --take to take the volume over from that writer, which can write no more then"
            )
        log.info("a follower takes the volume over", extra={"left": left, "from": found.writer_id, "host": found.host})
        if not ours:
            remember_found(env, state_dir, found)
        take_claim(env, remote, state_dir)
        env.failpoint("follow.take.claimed")
        _read_to_the_end(env, remote, folder, found, wait=not left)
        with catalog.view() as view:
            tenants = [tenant_id for tenant_id, _ in view.scan(VOLUME_STREAM, t.TENANTS)]
        for stream_id in (VOLUME_STREAM, *tenants):
            folder.take_snapshot(stream_id)
        for stream_id in tenants:
            open_own(env, catalog, state_dir, stream_id).log.close()
            save_own(env, catalog, state_dir, stream_id, of_log=False)
        env.failpoint("follow.take.saved")
        save_mark(env, state_dir, msgspec.structs.replace(mark, taking=True))
        env.failpoint("follow.take.marked")
    finally:
        catalog.close()
    _forget_rows(state_dir)


def _open_rows(env: Env, state_dir: Path) -> Catalog:
    directory = state_dir / "catalog"
    if not trusted(directory):
        discard(directory)
    return Catalog.open(env, directory)


def _forget_rows(state_dir: Path) -> None:
    """They are made anew of the writer's log alone."""
    discard(state_dir / "catalog")


def _has_left(found: VolumeRecord) -> bool:
    """Whether no machine writes the volume: its writer unmounted cleanly."""
    return bool(found.closed_at_ms)


def _read_to_the_end(env: Env, remote: RemoteStore, folder: LogFolder, left: VolumeRecord, *, wait: bool) -> None:
    """Of every stream. FencedError: yet another machine took the volume over meanwhile."""
    until_s = env.monotonic_s() + (SETTLE_S if wait else 0.0)
    while True:
        before = _chunks_there(remote)
        for done in folder.catch_up():
            if done.missing:
                raise ReadOnlyError(
                    f"the log of stream {done.stream_id} cannot be read to its end ({'; '.join(done.missing)}); "
                    "use `aof2 restore --from URL` with a fresh state_dir"
                )
            ends = left.closed_at.get(done.stream_id, 0)
            if not wait and done.position is not None and done.position.ordinal < ends:
                raise ReadOnlyError(f"the log of stream {done.stream_id} in the remote ends before record {ends}")
        if env.monotonic_s() >= until_s and _chunks_there(remote) == before:
            break
        if wait:
            time.sleep(SETTLE_LOOK_S)
    now = read_volume(remote)
    if now is None:
        raise RemoteMissingError("volume.json: the remote holds no volume any more")
    if now[0].writer_epoch > left.writer_epoch + 1:
        raise FencedError(f"another machine has taken this volume over meanwhile: {claimed_by(now[0])}")


def _chunks_there(remote: RemoteStore) -> dict[int, int]:
    return {s: max(found.chunk_indexes(), default=-1) for s, found in list_streams(remote).items()}


# -- as commits of the log ------------------------------------------------------------------------------------------


def log_own(volume: Volume) -> None:
    """What the follower had on this disk, into the log; the mark goes. Blocks; before the tasks start."""
    mark = load_mark(volume.state_dir)
    if mark is None:
        return
    for stream_id in stream_ids(volume.state_dir / OWN_DIR):
        saved = load_own(own_dir_of(volume.state_dir, stream_id))
        if stream_id not in volume.target.streams:
            continue
        _salvage(volume, stream_id)
        for chunks, pins in _pages(saved.own.chunks, saved.own.pins) if saved is not None else ():
            volume.writer.call(stream_id, partial(_place, chunks=chunks, pins=pins), sync=True)
    volume.writer.flush()
    volume.env.failpoint("follow.take.logged")
    remove_mark(volume.env, volume.state_dir)
    shutil.rmtree(volume.state_dir / OWN_DIR, ignore_errors=True)
    _remove_heartbeat(volume, mark)


def _pages(chunks: list[OwnChunk], pins: dict[int, int]) -> Iterator[tuple[list[OwnChunk], dict[int, int]]]:
    yield chunks[:PAGE], pins
    for at in range(PAGE, len(chunks), PAGE):
        yield chunks[at : at + PAGE], {}


def _salvage(volume: Volume, stream_id: int) -> None:
    """What the last writer had alone is gone, as after a restore; where its bytes and pins were says nothing here."""
    tenant = volume.tenant_names()[stream_id]
    restore_audit(volume.env, volume.bare_remote, volume.state_dir, stream_id, tenant)
    found = TenantSalvage(volume.catalog, volume.writer, volume.bare_remote, stream_id, tenant).run()
    for lost in found.lost:
        log.warning("the last writer had it alone", extra={"path": lost.path, "why": lost.why, "outcome": lost.outcome})
    volume.writer.call(stream_id, _unpin_all)


def _unpin_all(b: Batch) -> None:
    for ino, _ in b.scan(t.PINS):
        b.delete(t.PINS, ino)


def _place(b: Batch, chunks: list[OwnChunk], pins: dict[int, int]) -> None:
    lost = {own.chunk_id for own in place_own(b, chunks, pins)}
    for own in chunks:
        chunk = b.get(t.CHUNKS, own.chunk_id)
        if own.chunk_id in lost or chunk is None:
            continue
        if own.mask:
            objects.hydrated(b, own.chunk_id, objects.mask_bytes(own.mask, chunk.length, objects.block_bytes_of(chunk)))
        if own.warm_bytes:
            b.record(p.CompressionStarted(0), segment_id=own.chunk_id)
            b.record(p.CompressionDone(own.warm_bytes, 0), segment_id=own.chunk_id)


def _remove_heartbeat(volume: Volume, mark: FollowerMark) -> None:
    try:
        delete_heartbeat(volume.bare_remote, mark.id)
    except (Aof2Error, OSError) as e:  # it ends by itself
        log.debug("the heartbeat stays a while", extra={"error": str(e)})
