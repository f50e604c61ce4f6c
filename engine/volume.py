"""The volume: every part of the engine, opened in the right order, and what users of the engine call.

    fence → catalog → streams → tiers → background tasks        (open)
    tasks stopped → settled → snapshot → clean catalog          (close)

Invariants
- One process a state folder (flock on it); one writer a remote (the fence). A fenced volume is read-only.
- Nothing is opened before the settings are checked, and nothing across fork.
- A remote that is away does not keep a volume from opening: what is here is served, uploads wait.

Owner: the trio task that entered `open_volume`; its nursery owns every background task.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial

import msgspec
import trio

from aof2.engine import objects, opening, packrows, segments
from aof2.engine.aio import open_nursery, soon
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.recovery import Opened, open_catalog, replay_stream
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, InodeRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, FatalIOError, ReadOnlyError
from aof2.engine.follow.following import Following
from aof2.engine.follow.heartbeat import Followers, watch_forever
from aof2.engine.follow.opening import Followed, open_followed
from aof2.engine.follow.ownlog import save_own
from aof2.engine.follow.takeover import become_writer, log_own
from aof2.engine.follow.target import WHY as WHY_FOLLOWS
from aof2.engine.follow.target import FollowerTarget
from aof2.engine.foreground import Foreground
from aof2.engine.janitor import Janitor, prune_every_s
from aof2.engine.jobs.prune import Retention
from aof2.engine.jobs.rewrite import Rules
from aof2.engine.jobs.service import Jobs
from aof2.engine.jobs.worker import Changes
from aof2.engine.kinds import registry
from aof2.engine.local.disk import Disk
from aof2.engine.local.handles import HandleTable, Key, ObjectHandle
from aof2.engine.local.hot import HotCache
from aof2.engine.local.warm import WarmStore
from aof2.engine.logsnapshots import LogSnapshots
from aof2.engine.manifest.writer import SealedChunk
from aof2.engine.observe.http import serving
from aof2.engine.observe.metrics import StorageMetrics
from aof2.engine.pagecache import PageCache
from aof2.engine.quota import StorageQuota
from aof2.engine.quota.accounts import disk_space, limit_for_data
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.limiter import ReadLimiters
from aof2.engine.remote.metered import GuardedStore, MeteredStore
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.mend import record_mended
from aof2.engine.replicate.position import Replication
from aof2.engine.replicate.tail import read_tail
from aof2.engine.replicate.uploader import LogReplicator
from aof2.engine.segment.state import StreamState
from aof2.engine.settings import Settings
from aof2.engine.shadows import Shadows
from aof2.engine.telemetry import connect
from aof2.engine.tenants import Tenants
from aof2.engine.tiering import noting
from aof2.engine.tiering.coldscan import ColdScanner
from aof2.engine.tiering.evict import Evictor
from aof2.engine.tiering.fetch import BlobFetcher
from aof2.engine.tiering.hydrate import Hydrator
from aof2.engine.tiering.publish import Publisher, sweep_scratch
from aof2.engine.tiering.recent import Recent
from aof2.engine.tiering.windows import HELD_BYTES
from aof2.engine.verify.scrub import Scrubber

log = logging.getLogger(__name__)

# Chunks uploaded at once. Each holds several parts in memory; two keep a link busy.
UPLOADS_MAX = 2
WINDOWS_SHARE = 8  # of page_cache_bytes, for packs as they came
PARTS = ("replicator", "jobs", "scrubber")
LOG_WANTED_EVERY_S = 0.1
# What a stop waits for the remote with the log's last chunks; they are uploaded at the next start otherwise.
DRAIN_MAX_S = 10.0
DRAIN_AGAIN_S = 0.01


class _Events:
    """What the writer thread tells, on its way to the trio thread."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._soon = partial(soon, trio.lowlevel.current_trio_token())

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        self._soon(partial(self._volume.replicator.sealed, stream_id, chunk))

    def snapshot_due(self, stream_id: int) -> None:
        self._soon(partial(self._volume.log_snapshots.due, stream_id))

    def changed(self, stream_id: int) -> None:
        self._soon(self._volume.feed_changed.fire)


class Volume:
    """An open volume. Made by `open_volume`."""

    def __init__(
        self,
        env: Env,
        settings: Settings,
        opened: Opened,
        remote: RemoteStore,
        fence: Fence | None = None,
        followed: Followed | None = None,
    ) -> None:
        cache, engine = settings.cache, settings.engine
        state_dir = settings.volume.state_dir
        self.env = env
        self.settings = settings
        self.state_dir = state_dir
        self.opened = opened
        self.catalog = opened.catalog
        self.tenants = Tenants(opened.catalog)
        self.tenant_names = self.tenants.names
        self.metrics = StorageMetrics(now_ms=env.now_ms)
        self.bare_remote = remote
        self.remote: RemoteStore = GuardedStore(env, remote, self.metrics, lambda: self.replicator.fence)
        self.manifest_dir = state_dir / "manifest"
        make_target = CatalogTarget if followed is None else FollowerTarget
        self.target = make_target(env, opened.catalog, opened.streams, _Events(self) if followed is None else None)
        self.target.enabled = settings.manifest.enabled
        self.replication = Replication(env, self._were_published)
        if isinstance(self.target, FollowerTarget):
            self.target.save = partial(save_own, env, opened.catalog, state_dir)
        if followed is None:
            self.target.replay = lambda stream_id: replay_stream(
                env, opened.catalog, self.manifest_dir / str(stream_id), stream_id
            )
        self.disk = Disk(state_dir, cache.min_free)
        self.target.read_only_streams = opening.damage_of(opened, self.manifest_dir)
        self.writer = CatalogWriter(self.target, commit_period_ms=settings.manifest.commit_period_ms)
        self.hot = HotCache(env, state_dir / "hot_cache")
        self.pages = PageCache(cache.page_cache_bytes)
        self.quota = StorageQuota(
            limit_for_data(cache.hot_bytes),
            tenants={
                name: None if s.quota_bytes is None else limit_for_data(s.quota_bytes)
                for name, s in settings.tenants.items()
            },
            min_free=cache.min_free,
            disk=partial(disk_space, state_dir),
            on_exhausted=self.metrics.storage_quota_exhausted_total.inc,
            on_over=lambda: self.evictor.over(),
        )
        self.handles = HandleTable()
        self.foreground = Foreground()
        self.recent = Recent(
            env,
            self.catalog,
            state_dir,
            self.tenant_names,
            hot_bytes=cache.hot_bytes,
            warm_bytes=cache.warm_bytes,
            block_bytes=engine.block_bytes,
            low_water=cache.low_water,
            writes=settings.manifest.enabled,
        )
        warm, lock = self.recent.warm, self.recent.warm_lock
        self.warm = WarmStore(
            env, state_dir / "warm", cache.warm_bytes, warm, lock, self.tenant_names, engine.block_bytes
        )
        self.evictor = Evictor(
            self.catalog,
            self.writer,
            self.hot,
            self.handles,
            self.quota,
            self.tenant_names,
            self.recent,
            lambda key: self.hydrator.settle_object(key),
            limit_bytes=cache.hot_bytes,
            low_water=cache.low_water,
            block_bytes=engine.block_bytes,
            warm=self.warm,
            keeps_warm=lambda name: self._compression_of(name) != "none",
            restorable=self._is_restorable,
            went=lambda ino: self.hydrator.fetcher.windows.went(ino),
        )
        self.hydrator = Hydrator(
            self.catalog,
            self.writer,
            self.hot,
            self.handles,
            BlobFetcher(
                self.remote,
                block_bytes=engine.block_bytes,
                windows_bytes=min(HELD_BYTES, cache.page_cache_bytes // WINDOWS_SHARE),
            ),
            self.evictor,
            self.pages,
            self.recent.hot,
            block_bytes=engine.block_bytes,
            parallel=settings.remote.parallel,
            warm=self.warm,
            metrics=self.metrics,
            recently_evicted=self.evictor.recently_evicted,
            on_miss=self.recent.hot.missed,
        )
        self.limiters = ReadLimiters(env, bytes_per_s=cache.cold_scan_bytes_per_s, parallel=cache.cold_scan_parallel)
        self.cold = ColdScanner(
            self.hydrator,
            self.hydrator.fetcher,
            self.limiters.of,
            warm=self.warm,
            metrics=self.metrics,
        )
        self.publisher = Publisher(
            self.catalog,
            self.writer,
            self.hot,
            self.remote,
            self.quota,
            state_dir / "checkpoint_scratch",
            block_bytes=engine.block_bytes,
            parallel=UPLOADS_MAX,
            room=self.evictor,
            purge_after_ms=int(settings.retention.purge_after_s * 1000),
        )
        self.replicator = LogReplicator(
            env,
            MeteredStore(env, remote, self.metrics),
            self.catalog,
            self.writer,
            state_dir,
            tenants=self.tenant_names,
            on_fenced=self._fenced,
            fence=fence,
            replication=self.replication,
        )
        self.followers = Followers(env, self.remote)
        self.jobs = Jobs(
            self.publisher,
            self.hydrator,
            self.evictor,
            tenants=self.tenant_names,
            compression_of=self._compression_of,
            retention=Retention(
                settings.retention.checkpoints,
                int(settings.retention.purge_after_s * 1000),
                int(settings.retention.undelete_window_s * 1000),
            ),
            rewriting=Rules(settings.retention.pack_live_share, settings.retention.rewrite_bytes_per_s),
            blocked=self.cold.holds,
            replicated=lambda tenant_id: self.replicated(self.log_ends([tenant_id])),
            metrics=self.metrics,
            foreground=self.foreground,
            followers=self.followers,
            prune_every_s=prune_every_s(settings),
            pack_after_s=settings.remote.pack_after_s,
        )
        self.scrubber = Scrubber(env, self.hydrator, self.tenant_names, self.opened_object, cache.scrub_every_s)
        self.following = (
            Following(self, followed.folder, followed.own, followed.mark, away=followed.away) if followed else None
        )
        self.paused = ""  # why no changes are taken for now
        self.janitor = Janitor(self)
        self.shadows = Shadows(self)
        self.log_snapshots = LogSnapshots(env, self.catalog, self.writer, self.manifest_dir, self._snapshot_taken)
        self.feed_changed = Changes()
        self.metrics_port = 0
        self.fenced = ""  # why another machine is the volume's writer now
        # Ends writing in its own order; without one it ends at once.
        self.on_fenced: Callable[[str], None] | None = None
        self.replicating = False
        self._log_wanted_s = float("-inf")  # when room last asked for the log to be uploaded
        self.unborn_from: dict[int, int] = {}  # by stream: from this inode on, files may be there before their rows
        self.dirty_inos: list[int] = []  # files that were being written when the volume was last closed
        self.streams_left: dict[int, StreamState] = {}  # by inode: streams with segments that were, and are not sealed

    def _compression_of(self, tenant: str) -> str:
        return self.settings.tenants[tenant].compression if tenant in self.settings.tenants else "none"

    def _fenced(self, reason: str) -> None:
        """Another machine took the volume over: what is here stays, nothing more is taken."""
        self.fenced = reason
        if self.on_fenced is not None:
            self.on_fenced(reason)
        else:
            self.target.turn_read_only(reason)

    @property
    def read_only_reason(self) -> str:
        """Why nothing is written any more; "" while it is."""
        return self.fenced or self.target.read_only_reason or self.paused or (WHY_FOLLOWS if self.following else "")

    def check_writable(self, stream_id: int) -> None:
        """ReadOnlyError where the tenant takes no writes, or the volume none any more."""
        reason = self.read_only_reason or self.target.read_only_streams.get(stream_id)
        if reason:
            raise ReadOnlyError(f"read-only: {reason}")

    # -- tenants -----------------------------------------------------------------------------------------------

    def writable_tenants(self) -> dict[int, str]:
        """Those whose log is whole."""
        return {s: name for s, name in self.tenants.names().items() if s not in self.target.read_only_streams}

    def prepare(self) -> None:
        """What was mended is in the logs, and the tenants of the settings are there. Blocks; before the tasks start."""
        self.tenants.load()
        if self.following or not self.settings.manifest.enabled:
            return  # read-only: what there is is served, nothing is made
        for stream_id, mended in self.opened.mended.items():
            if stream_id in self.target.streams:
                self.writer.call(stream_id, partial(record_mended, mended=mended), sync=True)
        self.tenants.ensure(self.env, self.settings, self.target, self.writer)

    def restore_quota(self) -> None:
        """Used bytes as the catalog counts them: no walk of the cache."""
        used_bytes: dict[str, int] = {}
        uncounted: list[tuple[int, Callable[[Batch], None]]] = []
        with self.catalog.view() as view:
            for tenant_id, row in self.tenants.rows.items():
                used_bytes[row.name] = view.get(tenant_id, t.COUNTERS, objects.HOT_BYTES) or 0
                if view.get(tenant_id, t.COUNTERS, objects.PENDING_BYTES) is None:
                    uncounted.append((tenant_id, objects.count_pending_anew))
                if not packrows.is_counted(view, tenant_id):
                    uncounted.append((tenant_id, packrows.count_anew))
            self.warm.restore(
                ((tenant_id, chunk_id), stored_bytes)
                for tenant_id in self.tenants.rows
                for chunk_id, stored_bytes in view.scan(tenant_id, t.WARM)
            )
        self.quota.restore(used_bytes)
        for tenant_id, count in uncounted:
            if self.settings.manifest.enabled and not self.following and tenant_id in self.target.streams:
                self.writer.call(tenant_id, count)

    # -- objects -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def opened_object(self, key: Key) -> AsyncIterator[ObjectHandle]:
        handle = await self.hydrator.open(key, self.tenants.rows[key[0]].name)
        try:
            yield handle
        finally:
            self.hydrator.close(handle)

    def _were_published(self, stream_id: int, keys: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """As far as the catalog shows: without the commit under way. On the writer thread."""
        with self.catalog.view() as view:
            rows = view.get_many(stream_id, t.OBJECTS, keys)
        return [k for k, row in zip(keys, rows, strict=True) if row is not None and row.state == ObjectState.PUBLISHED]

    # -- durability --------------------------------------------------------------------------------------------

    def find_positions(self) -> None:
        """Which part of each log the remote does not have. Blocks; before the first commit."""
        with self.catalog.view() as view:
            for stream_id in self.target.streams:
                tail = read_tail(view, self.manifest_dir / str(stream_id), stream_id)
                self.replication.opened(stream_id, tail)

    def _is_restorable(self, stream_id: int, ino: int, generation: int) -> bool:
        """Whether the remote's log has the object's publication. Where it has not, room waits for it: it goes up now,
        not by its timer, though not for each object."""
        if not self.replicating or self.replication.has_published(stream_id, ino, generation):
            return True
        now_s = trio.current_time()
        if now_s - self._log_wanted_s >= LOG_WANTED_EVERY_S:
            self._log_wanted_s = now_s
            self.replication.want(self.replication.ends([stream_id]))
        return False

    def log_ends(self, tenant_ids: Collection[int]) -> dict[int, int]:
        """Where the logs of these tenants, and the volume's own, end now."""
        return self.replication.ends({opening.VOLUME_STREAM, *tenant_ids})

    def needed_log_ends(self, tenant_ids: Collection[int]) -> dict[int, int]:
        """Up to where the remote must have them for all that is published to be durable."""
        return self.replication.needed_ends({opening.VOLUME_STREAM, *tenant_ids})

    def is_durable(self, view: View, inode: InodeRow) -> bool:
        """Whether the remote alone, copied now, restores the file: bytes, attributes, names and parents."""
        obj = view.get(inode.ino >> INO_STREAM_SHIFT, t.OBJECTS, (inode.ino, inode.generation))
        if obj is not None and obj.state not in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED):
            return False
        if obj is not None and segments.needs_repair(view, inode.ino >> INO_STREAM_SHIFT, obj.data_chunks):
            return False
        return self.replication.has_all_of(view, inode)

    async def checkpoint(self, tenant: str, *, wait: bool = True) -> int:
        """Publishes everything sealed so far; how many objects. With `wait`, until the remote alone restores them."""
        tenant_id = self.tenants.named(tenant).tenant_id
        done = await self.jobs.checkpoint(tenant_id, wait=wait)
        if wait:
            await self.replicated(self.needed_log_ends([tenant_id]))
        return done

    async def replicated(self, ends: Mapping[int, int]) -> None:
        """Until the remote has these logs up to there, as long as they are uploaded at all."""
        while self.replicating and not self.replicator.ended:
            change = self.replication.next()
            if self.replication.has(ends):
                return
            self.replication.want(ends)
            await change.wait()

    async def evict(self, keys: list[Key]) -> tuple[int, list[Key]]:
        """Drops every local copy of these objects; the bytes freed, and what was in use or not durable."""
        await self.hydrator.quiesce()
        for key in keys:
            self.pages.drop_object(key[1], key[2])
        return await self.evictor.evict(keys)

    # -- background --------------------------------------------------------------------------------------------

    async def _snapshot_taken(self, stream_id: int) -> None:
        self.metrics.note_snapshot(stream_id, self.env.now_ms())
        await self.shadows.save()
        self.replicator.snapshot_taken(stream_id)

    async def start(self, nursery: trio.Nursery, parts: Collection[str]) -> None:
        await nursery.start(self.hydrator.run)
        await nursery.start(self.recent.run)
        await nursery.start(self.evictor.run)
        await nursery.start(self.log_snapshots.run)
        await nursery.start(self.evictor.doomed.run)
        if self.env.reserve is not None:
            nursery.start_soon(opening.keep_reserve, self.env.reserve)
        for name in PARTS:
            if name in parts:
                await nursery.start(getattr(self, name).run)
        if self.settings.manifest.shadow and self.settings.manifest.enabled and not self.following:
            await nursery.start(self.shadows.run)
        self.replicating = "replicator" in parts
        if parts:
            nursery.start_soon(self.janitor.run)
            nursery.start_soon(noting.keep_noting, self)
        if self.replicating:
            nursery.start_soon(watch_forever, self.followers)
        if self.following:
            await nursery.start(self.following.run)
            nursery.start_soon(self.janitor.sweep_orphans)


@contextlib.asynccontextmanager
async def open_volume(
    settings: Settings,
    *,
    env: Env | None = None,
    parts: Collection[str] = PARTS,
    follow: bool = False,
    take: bool = False,
) -> AsyncIterator[Volume]:
    """Opens the volume and runs it until the block ends. `parts`: the components that run by themselves. `follow`: as
    another machine's writer leaves it in the remote. `take`: a folder that followed becomes the writer's, also where
    the writer has not left."""
    env = env or Env()
    if follow or not settings.manifest.enabled:
        parts = ()  # a volume without its log writes nothing
    claims = "replicator" in parts
    opening.ignore_lease_breaks()
    with contextlib.ExitStack() as locked:
        locked.callback(os.close, opening.lock_state_dir(settings.volume.state_dir))
        env.reserve = opening.open_reserve(env, settings)
        with contextlib.ExitStack() as unused:  # what is let go of where the volume does not come up
            remote = open_remote(env, settings.remote)
            unused.callback(remote.close)
            followed = await trio.to_thread.run_sync(open_followed, env, settings, remote) if follow else None
            if not follow:
                await trio.to_thread.run_sync(partial(become_writer, env, settings, remote, take=take))
            opened = (
                followed.opened
                if followed
                else await trio.to_thread.run_sync(_open_catalog, env, settings, remote, claims)
            )
            unused.callback(opening.close_unused, opened)
            if not follow:
                opening.ensure_volume_stream(env, opened, settings)
            fence = await trio.to_thread.run_sync(opening.claim_now, env, settings, remote, opened) if claims else None
            unused.pop_all()
        volume = Volume(env, settings, opened, remote, fence, followed)
        if not follow:
            await trio.to_thread.run_sync(volume.find_positions)
        volume.writer.start()
        try:
            await trio.to_thread.run_sync(volume.prepare)
            if settings.manifest.enabled and settings.manifest.shadow and not follow:
                await trio.to_thread.run_sync(volume.shadows.attach)
            if settings.manifest.enabled and not follow:
                await trio.to_thread.run_sync(log_own, volume)
            if settings.manifest.enabled:
                volume.hot.leave_access_times()
                with contextlib.suppress(OSError):  # a full disk: what leaves is deleted
                    volume.hot.spares.load()
            if settings.manifest.enabled and not follow:
                await trio.to_thread.run_sync(_recover_tenants, volume)
            await trio.to_thread.run_sync(volume.recent.load)
            volume.restore_quota()
            connect(volume, volume.metrics)
            await trio.to_thread.run_sync(sweep_scratch, settings.volume.state_dir / "checkpoint_scratch", ())
            with serving(volume.metrics.render, settings.metrics.listen) as volume.metrics_port:
                async with open_nursery() as nursery:
                    await volume.start(nursery, parts)
                    yield volume
                    await _wind_down(volume, drain="replicator" in parts)
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _close(volume)


def _open_catalog(env: Env, settings: Settings, remote: RemoteStore, mends: bool) -> Opened:
    state_dir = settings.volume.state_dir
    return open_catalog(
        env,
        state_dir / "catalog",
        state_dir / "manifest",
        opening.log_settings(settings),
        mender=opening.find_mender(env, settings, remote) if mends else None,
    )


def _recover_tenants(volume: Volume) -> None:
    """Each kind brings its tenants to where they can be served; those whose log is damaged stay as they are."""
    writable = volume.writable_tenants()
    for number, tenants in volume.tenants.by_kind().items():
        registry.by_number(number).recover(volume, {s: name for s, name in tenants.items() if s in writable})


async def _wind_down(volume: Volume, *, drain: bool) -> None:
    """While the tasks still run: what is here is recorded, snapshotted, and sent as far as the remote lets us."""
    # What cannot be recorded is fetched again, what is not snapshotted is replayed.
    # What lands later is not in the log that the remote has of a clean end.
    with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):
        with trio.move_on_after(DRAIN_MAX_S):
            await volume.hydrator.wind_down()
        await volume.hydrator.settle()
        if drain:
            await noting.note_uses(volume)
            log.info("taking snapshots of the log")
            await volume.log_snapshots.take_all(volume.target.streams)
    if drain:
        log.info("sending the end of the log")
        with trio.move_on_after(DRAIN_MAX_S):
            await _send_log(volume)
        for lag in volume.replication.lags(volume.tenant_names()):
            if lag.lag_records:
                log.warning("the log's end is not in the remote", extra=msgspec.structs.asdict(lag))


def _save_own(volume: Volume) -> None:
    for stream_id in volume.target.streams:
        save_own(volume.env, volume.catalog, volume.state_dir, stream_id)


async def _send_log(volume: Volume) -> None:
    """Until the remote has the log's end, and says so. A job under way may publish meanwhile: then once more."""
    while True:
        await volume.replicator.drain()
        with contextlib.suppress(Aof2Error, OSError):  # without the mark, restore says that it is not there
            await volume.replicator.leave()
        if volume.replicator.ended or volume.replicator.is_there:
            return
        await trio.sleep(DRAIN_AGAIN_S)


async def _close(volume: Volume) -> None:
    log.info("closing the volume")
    with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):
        await volume.hydrator.settle()
        await volume.shadows.save()
    await volume.evictor.doomed.delete_all()
    await volume.recent.save(closed=True)
    volume.handles.close_all()
    if volume.following:
        await volume.following.leave()
    await trio.to_thread.run_sync(volume.writer.close)
    if volume.following:
        with contextlib.suppress(OSError):  # its log says the same
            await trio.to_thread.run_sync(_save_own, volume)
    volume.bare_remote.close()
    await trio.to_thread.run_sync(volume.catalog.close)


__all__ = ["ObjectState", "Volume", "open_volume"]
