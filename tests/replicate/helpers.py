"""A catalog, its writer and a LogReplicator on a directory remote; and a store that fails, denies and loses objects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from aof2.engine.catalog import ops as o
from aof2.engine.catalog import snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import (
    ROOT_INO,
    ChunkRow,
    DentryRow,
    InodeRow,
    ObjectRow,
    ObjectState,
    TenantRow,
)
from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.writer import SealedChunk
from aof2.engine.remote.errors import RemoteAuthError, RemoteUnavailableError
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.uploader import LogReplicator, ReplicateOptions
from aof2.engine.settings import Settings
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.volume import Volume as EngineVolume
from aof2.engine.volume import open_volume as open_engine
from tests.catalog.helpers import Volume, open_volume, settings

TENANT = 1
TENANTS = {TENANT: "default"}
WRITES = ("put_blob", "put_if_absent", "replace_if_match", "compose", "delete")


class Weather:
    """A store in front of another: unavailable or denied for as long as told, and it counts what is written."""

    def __init__(self, inner: RemoteStore) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.down = False
        self.denied = False
        self.fail_writes = 0
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name in ("stats", "close"):
            return real

        def call(*args: object, **kw: object) -> object:
            with self._lock:
                self.calls[name] = self.calls.get(name, 0) + 1
                if self.denied:
                    raise RemoteAuthError(f"{name}: denied")
                if self.down:
                    raise RemoteUnavailableError(f"{name}: away", retryable=False)
                if name in WRITES and self.fail_writes:
                    self.fail_writes -= 1
                    raise RemoteUnavailableError(f"{name}: away", retryable=False)
            return real(*args, **kw)

        return call

    @property
    def writes(self) -> int:
        return sum(self.calls.get(name, 0) for name in WRITES)


def open_directory(root: Path, env: Env | None = None) -> RemoteStore:
    (root / "remote").mkdir(parents=True, exist_ok=True)
    return open_remote(env or Env(), RemoteSettings(url=f"file://{root / 'remote'}", retries=0))


def keys_of(store: RemoteStore, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def content_of(store: RemoteStore, key: str) -> bytes:
    return store.get_blob(key)[1]


class Events:
    """From the writer's thread to the trio thread, as the volume does it."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self.replicator: LogReplicator | None = None
        self.due: list[int] = []

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._sealed, stream_id, chunk)

    def _sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        if self.replicator is not None:
            self.replicator.sealed(stream_id, chunk)

    def changed(self, stream_id: int) -> None:
        pass

    def snapshot_due(self, stream_id: int) -> None:
        self.due.append(stream_id)


DRAIN_HANGS_S = 120.0  # beside tests that fill the disk, one fsync has taken half a minute


class Rig:
    """A catalog volume whose chunks seal as soon as a commit is over, with its replicator."""

    def __init__(self, root: Path, volume: Volume, store: Any, replicator: LogReplicator) -> None:
        self.root = root
        self.volume = volume
        self.env = volume.env
        self.catalog = volume.catalog
        self.writer = volume.writer
        self.store = store
        self.replicator = replicator
        self.fenced: list[str] = []

    async def write(self, *works: Callable[[Batch], object], stream_id: int = TENANT) -> None:
        """Each work in a commit of its own, sealed and uploaded."""
        for work in works:
            await trio.to_thread.run_sync(lambda w=work: self.writer.call(stream_id, w, sync=True))
            await self.settle()

    async def settle(self) -> None:
        with trio.fail_after(DRAIN_HANGS_S):
            await self.replicator.drain()

    async def snapshot(self, stream_id: int = TENANT) -> None:
        await trio.to_thread.run_sync(self.snapshot_now, stream_id)
        self.replicator.snapshot_taken(stream_id)
        await self.settle()

    def snapshot_now(self, stream_id: int = TENANT) -> None:
        snapshots.take(self.env, self.catalog, self.writer, self.volume.directory(stream_id), stream_id)

    def local_bytes(self) -> int:
        return sum(f.stat().st_size for f in (self.root / "state").rglob("*") if f.suffix in (".mlog", ".bin", ".asl"))


def open_state(root: Path, env: Env | None = None, events: Events | None = None, **log: object) -> Volume:
    return open_volume(
        root / "state",
        streams=(0, TENANT),
        env=env,
        log=settings(**{"rotation_period_ms": 1, **log}),
        events=events,
    )


@contextlib.asynccontextmanager
async def rig(
    root: Path, *, env: Env | None = None, store: Any = None, options: ReplicateOptions | None = None
) -> AsyncIterator[Rig]:
    env = env or Env()
    events = Events(trio.lowlevel.current_trio_token())
    volume = await trio.to_thread.run_sync(lambda: open_state(root, env, events))
    store = store if store is not None else Weather(open_directory(root, env))
    fenced: list[str] = []
    replicator = LogReplicator(
        env,
        store,
        volume.catalog,
        volume.writer,
        root / "state",
        tenants=lambda: TENANTS,
        on_fenced=fenced.append,
        options=options or ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01),
    )
    events.replicator = replicator
    made = Rig(root, volume, store, replicator)
    made.fenced = fenced
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(replicator.run)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(volume.close)


def run_rig(root: Path, body: Callable[[Rig], Awaitable[None]], **kw: Any) -> None:
    async def main() -> None:
        async with rig(root, **kw) as made:
            await body(made)

    trio.run(main)


# -- what is written ---------------------------------------------------------------------------------------------


def make_tenant(b: Batch) -> None:
    b.put(t.TENANTS, TENANT, TenantRow(TENANT, "default", 0, b.now_ms))


def make_file(number: int) -> Callable[[Batch], None]:
    def work(b: Batch) -> None:
        b.put(t.INODES, number, InodeRow(number, 0o100644, generation=1))
        b.put(t.DENTRIES, (ROOT_INO, b"f%d" % number), DentryRow(number, 0o100644))

    return work


def sha(number: int) -> bytes:
    return number.to_bytes(32, "big")


def sealed(number: int) -> Callable[[Batch], None]:
    """An object of one chunk; both have the inode's number."""

    def work(b: Batch) -> None:
        make_file(number)(b)
        b.apply(o.UpsertChunk(ChunkRow(number, number, 1, 0, 10, sha(number))))
        b.record(p.SegmentOpened(0, 1), segment_id=number)
        b.put(
            t.OBJECTS, (number, 1), ObjectRow(number, 1, ObjectState.SEALED, 10, chunks=(number,), sha256=sha(number))
        )

    return work


def in_state(number: int, state: ObjectState) -> Callable[[Batch], None]:
    def work(b: Batch) -> None:
        row = ObjectRow(number, 1, state, 10, chunks=(number,), sha256=sha(number), published_ms=5)
        b.put(t.OBJECTS, (number, 1), row)

    return work


def purged(number: int) -> Callable[[Batch], None]:
    return lambda b: b.delete(t.OBJECTS, (number, 1))


# -- the whole volume --------------------------------------------------------------------------------------------


class Replicated:
    """An engine volume and its replicator, wired as the volume does it."""

    def __init__(self, volume: EngineVolume, replicator: LogReplicator) -> None:
        self.volume = volume
        self.replicator = replicator
        self.fenced: list[str] = []

    async def settle(self) -> None:
        with trio.fail_after(60):
            await self.replicator.drain()

    async def snapshot(self, stream_id: int) -> None:
        directory = self.volume.manifest_dir / str(stream_id)
        v = self.volume
        await trio.to_thread.run_sync(lambda: snapshots.take(v.env, v.catalog, v.writer, directory, stream_id))
        self.replicator.snapshot_taken(stream_id)
        await self.settle()


def run_replicated(
    settings: Settings, body: Callable[[Replicated], Awaitable[None]], *, env: Env | None = None
) -> None:
    async def main() -> None:
        async with open_engine(settings, env=env, parts=("jobs",)) as volume:
            fenced: list[str] = []
            replicator = LogReplicator(
                volume.env,
                volume.bare_remote,
                volume.catalog,
                volume.writer,
                settings.volume.state_dir,
                tenants=volume.tenant_names,
                on_fenced=fenced.append,
                options=ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=4),
            )
            volume.replicator.sealed = replicator.sealed  # type: ignore[method-assign]
            made = Replicated(volume, replicator)
            made.fenced = fenced
            async with trio.open_nursery() as nursery:
                await nursery.start(replicator.run)
                await body(made)
                nursery.cancel_scope.cancel()

    trio.run(main)
