"""`aof2 bench engine`: the tiers against bare boto3, bare pread, and their own size.

A SeaweedFS server is started for the run; uploads and downloads of the engine take turns with a bare boto3 transfer of
the same bytes in the same way (8 MiB parts or ranges, as many at once, into a new file that is synced at the end). Only
ratios have targets; each side counts with its best time.

Owner: the calling thread; the volume runs on trio inside it. Everything is in one temporary folder, removed at the end.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from aof2.engine import namespace
from aof2.engine.catalog import ops as o
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.local.handles import Key
from aof2.engine.settings import Settings
from aof2.engine.settings.model import CacheSettings, FilesTenant, MetricsSettings, VolumeSettings
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.units import MinFree
from aof2.engine.volume import Volume, open_volume
from aof2.fs.bench.measure import Measurement, compared, run_parts
from aof2.fs.bench.objects import backing_path, create_object, put_object, seal_object
from aof2.fs.bench.seaweed import Seaweed, running_seaweed
from aof2.fs.bench.work import PART_BYTES, fetch

MIB: Final = 1 << 20
TENANT: Final = "default"


class Sizes(NamedTuple):
    object_bytes: int
    rounds: int
    reads: int
    operations: int
    chunks_few: int
    chunks_many: int
    pass_bytes: int


FULL: Final = Sizes(512 * MIB, 5, 2000, 20_000, 1_000, 100_000, 4096 * MIB)
QUICK: Final = Sizes(64 * MIB, 1, 200, 2_000, 100, 2_000, 128 * MIB)


def run(*, quick: bool, on_progress: Callable[[int, int], None]) -> list[Measurement]:
    """Every measurement, in order."""
    # Memory first: what the other measurements leave in the allocator, the baselines' too, is not the engine's.
    parts = (memory, transfers, resident_reads, operations, reopening)
    return run_parts([partial(part, QUICK if quick else FULL) for part in parts], on_progress)


# -- volumes -----------------------------------------------------------------------------------------------------


def _settings(root: Path, *, hot_bytes: int, url: str = "", endpoint_url: str = "") -> Settings:
    (root / "remote").mkdir(exist_ok=True)
    return Settings(
        volume=VolumeSettings(mountpoint=root / "mnt", state_dir=root / "state"),
        remote=RemoteSettings(url=url or f"file://{root / 'remote'}", endpoint_url=endpoint_url),
        cache=CacheSettings(hot_bytes=hot_bytes, page_cache_bytes=64 * MIB, min_free=MinFree()),
        metrics=MetricsSettings(listen=""),
        tenants={TENANT: FilesTenant(compression="none")},
    )


def _in_volume(settings: Settings, body: Callable[[Volume], Any]) -> Any:
    async def main() -> Any:
        async with open_volume(settings) as volume:
            return await body(volume)

    return trio.run(main)


@contextmanager
def _s3(root: Path) -> Iterator[Seaweed]:
    """A server, its keys in the environment as any AWS client finds them."""
    with running_seaweed(root / "weed") as server:
        old = {name: os.environ.get(name) for name in server.environ()}
        os.environ.update(server.environ())
        try:
            yield server
        finally:
            for name, value in old.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


# -- upload and download -----------------------------------------------------------------------------------------


class _Transfers:
    """The same bytes through the engine and through bare boto3, in turns.

    Before each timing, written pages are on disk and as much memory as the transfer needs was just in use and is free:
    a virtual machine gives free memory back to its host, and first use of what came back costs more than a download.
    """

    def __init__(self, v: Volume, client: Any, bucket: str, root: Path, size: int) -> None:
        self.times: dict[str, list[float]] = {"up": [], "down": [], "bare up": [], "bare down": []}
        self._v = v
        self._client = client
        self._bucket = bucket
        self._root = root
        self._size = size

    async def round(self, n: int) -> None:
        # Never the same bytes twice: content that is already in the remote is not uploaded.
        fresh = os.urandom(self._size)
        if n % 2:
            key = await self._upload(n, fresh)
            await self._bare_upload(n, fresh)
        else:
            await self._bare_upload(n, fresh)
            key = await self._upload(n, fresh)
        del fresh
        await self._v.evict([key])
        await self._hydrate(key)
        await self._bare_download(n)
        await self._bare_download(n)
        await self._hydrate(key)

    async def _upload(self, n: int, data: bytes) -> Key:
        await self._forget_memory()
        key = await put_object(self._v, TENANT, b"object%d" % n, data)
        # Uploads start when asked, or half a second later.
        self.times["up"].append(await _timed(self._v.checkpoint, TENANT))
        return key

    async def _bare_upload(self, n: int, data: bytes) -> None:
        await self._forget_memory()
        work = partial(_bare_upload, self._client, self._bucket, f"bare{n}", data)
        self.times["bare up"].append(await _timed(trio.to_thread.run_sync, work))

    async def _hydrate(self, key: Key) -> None:
        """Into a new file: nothing of the object is here, before and after."""
        await self._forget_memory()
        self.times["down"].append(await _timed(_fill, self._v, key))
        await self._v.evict([key])

    async def _bare_download(self, n: int) -> None:
        """Into a new file, too."""
        target = self._root / "bare"
        await self._forget_memory()
        work = partial(_bare_download, self._client, self._bucket, f"bare{n}", target)
        self.times["bare down"].append(await _timed(trio.to_thread.run_sync, work))
        target.unlink()

    async def _forget_memory(self) -> None:
        await trio.to_thread.run_sync(os.sync)
        await trio.to_thread.run_sync(_use_memory, self._size + self._size // 4)


def _use_memory(size: int) -> None:
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def transfers(sizes: Sizes, root: Path) -> list[Measurement]:
    with _s3(root) as server:
        client = server.client(max_pool_connections=32, s3={"addressing_style": "path"})
        url = f"s3://{server.bucket}/volume"
        settings = _settings(root, hot_bytes=4 * sizes.object_bytes, url=url, endpoint_url=server.endpoint_url)

        async def body(v: Volume) -> dict[str, list[float]]:
            both = _Transfers(v, client, server.bucket, root, sizes.object_bytes)
            for n in range(sizes.rounds):
                await both.round(n)
            return both.times

        rates = {name: sizes.object_bytes / min(times) for name, times in _in_volume(settings, body).items()}
    size = f"{sizes.object_bytes // MIB} MiB"
    return [
        compared(f"hydrate {size} from S3, verified, to disk", "B/s", rates["down"], "boto3, parallel ranges",
                 rates["bare down"], at_least=0.9),
        compared(f"upload {size} to S3, no compression", "B/s", rates["up"], "boto3, multipart",
                 rates["bare up"], at_least=0.9),
    ]  # fmt: skip


async def _timed(work: Callable[..., Awaitable[object]], *args: Any) -> float:
    start = time.perf_counter()
    await work(*args)
    return time.perf_counter() - start


async def _fill(v: Volume, key: Key) -> None:
    async with v.opened_object(key) as handle:
        await v.hydrator.fill(handle)


async def _read_all(v: Volume, key: Key) -> None:
    """A sequential reader, as an application is one."""
    async with v.opened_object(key) as handle:
        for offset in range(0, handle.size, MIB):
            await v.hydrator.read(handle, offset, MIB)


def _bare_upload(client: Any, bucket: str, key: str, data: bytes) -> None:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    view = memoryview(data)

    def part(number: int) -> dict[str, Any]:
        body = bytes(view[(number - 1) * PART_BYTES : number * PART_BYTES])
        answer = client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(part, range(1, -(-len(data) // PART_BYTES) + 1)))
    client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})


def _bare_download(client: Any, bucket: str, key: str, target: Path) -> None:
    with open(target, "xb") as f:
        fetch(client, bucket, key, f.fileno())
        os.fsync(f.fileno())


# -- resident reads ----------------------------------------------------------------------------------------------


def resident_reads(sizes: Sizes, root: Path) -> list[Measurement]:
    """1 MiB at random offsets of an object that is all here and in the kernel's cache."""
    size = min(sizes.object_bytes, 256 * MIB)
    offsets = [random.Random(2).randrange(size // MIB) * MIB for _ in range(sizes.reads)]  # noqa: S311

    async def body(v: Volume) -> tuple[float, float]:
        key = await put_object(v, TENANT, b"o", bytes(size))
        fd = os.open(backing_path(v, key), os.O_RDONLY)
        try:
            async with v.opened_object(key) as handle:
                ours, theirs = [], []
                for _ in range(max(2, sizes.rounds)):
                    start = time.perf_counter()
                    for offset in offsets:
                        os.pread(fd, MIB, offset)
                    theirs.append(time.perf_counter() - start)
                    start = time.perf_counter()
                    for offset in offsets:
                        await v.hydrator.read(handle, offset, MIB)
                    ours.append(time.perf_counter() - start)
                return min(ours), min(theirs)
        finally:
            os.close(fd)

    ours, theirs = _in_volume(_settings(root, hot_bytes=2 * size), body)
    total = len(offsets) * MIB
    return [compared("resident random 1 MiB reads", "B/s", total / ours, "pread", total / theirs, at_least=0.7)]


# -- the catalog -------------------------------------------------------------------------------------------------


def operations(sizes: Sizes, root: Path) -> list[Measurement]:
    """Creates from many threads at once, each waiting for its own durable answer in a window of its own."""

    async def body(v: Volume) -> float:
        tenant_id = v.tenants.named(TENANT).tenant_id
        work = partial(_create_many, v, tenant_id, sizes.operations)
        return await _timed(trio.to_thread.run_sync, work)

    elapsed = _in_volume(_settings(root, hot_bytes=1024 * MIB), body)
    rate = sizes.operations / elapsed
    return [
        Measurement(
            what="catalog operations under group commit, durable",
            unit="ops/s",
            value=rate,
            target=10_000,
            target_text="at least 10 k",
            ok=rate >= 10_000,
        )
    ]


def _create_many(v: Volume, tenant_id: int, count: int) -> None:
    parent = namespace.root_ino(tenant_id)
    each = count // 4

    def one(n: int) -> None:
        window: list[Any] = []
        for i in range(each):
            work = partial(namespace.create, parent=parent, name=b"f%d-%d" % (n, i), chunk_bytes=64 * MIB)
            window.append(v.writer.submit(tenant_id, work, sync=True))
            if len(window) == 256:
                window.pop(0).result()
        for future in window:
            future.result()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))


def reopening(sizes: Sizes, root: Path) -> list[Measurement]:
    """How opening a volume grows with what is in it, after a clean stop."""
    seconds: dict[int, float] = {}
    for count in (sizes.chunks_few, sizes.chunks_many):
        folder = root / str(count)
        folder.mkdir()
        settings = _settings(folder, hot_bytes=1024 * MIB)
        _in_volume(settings, partial(_add_chunks, count=count))
        tries = [_time_open(settings) for _ in range(max(3, sizes.rounds))]
        seconds[count] = min(tries)
    few, many = seconds[sizes.chunks_few], seconds[sizes.chunks_many]
    return [
        Measurement(
            what=f"reopening with {sizes.chunks_many:,} chunks",
            unit="s",
            value=many,
            baseline=f"with {sizes.chunks_few:,}",
            baseline_value=few,
            ratio=many / few,
            target=3,
            target_text="less than 3",
            ok=many < 3 * few,
        )
    ]


def _time_open(settings: Settings) -> float:
    started = time.perf_counter()

    async def body(_: Volume) -> float:
        return time.perf_counter() - started

    return float(_in_volume(settings, body))


async def _add_chunks(v: Volume, count: int) -> None:
    tenant_id = v.tenants.named(TENANT).tenant_id

    def add(b: Batch, first: int, last: int) -> None:
        for n in range(first, last):
            b.apply(o.UpsertChunk(ChunkRow(n, n, 1, 0, 64 * MIB, n.to_bytes(32, "big"), n, bytes(512))))

    for first in range(1, count + 1, 500):
        work = partial(add, first=first, last=min(first + 500, count + 1))
        await trio.to_thread.run_sync(partial(v.writer.call, tenant_id, work))


# -- memory ------------------------------------------------------------------------------------------------------


def memory(sizes: Sizes, root: Path) -> list[Measurement]:
    """Anonymous memory of the process while data many times the caches goes through: in, up, out, back."""
    object_bytes = min(256 * MIB, sizes.pass_bytes // 4)
    count = max(2, sizes.pass_bytes // object_bytes // 2)

    async def body(v: Volume) -> int:
        keys = []
        for n in range(count):
            keys.append(await _written(v, n, object_bytes))
            await v.checkpoint(TENANT)
        for key in keys:
            await v.evict([key])
            await _read_all(v, key)
        return v.settings.cache.page_cache_bytes

    with _s3(root) as server, _watched_memory() as seen:
        url = f"s3://{server.bucket}/volume"
        settings = _settings(root, hot_bytes=3 * object_bytes, url=url, endpoint_url=server.endpoint_url)
        page_cache = _in_volume(settings, body)
    limit = page_cache + 300 * MIB
    grown = max(seen)
    moved = 2 * count * object_bytes
    return [
        Measurement(
            what=f"anonymous memory during a pass of {moved // MIB:,} MiB",
            unit="B",
            value=grown,
            baseline="page_cache_bytes + 300 MiB",
            baseline_value=limit,
            ratio=grown / limit,
            target=1,
            target_text="at most 1",
            ok=grown <= limit,
        )
    ]


async def _written(v: Volume, n: int, size: int) -> Key:
    """An object of bytes that do not repeat, written in pieces so that the bench itself stays small."""
    key = await create_object(v, TENANT, b"big%d" % n)
    piece = random.Random(n).randbytes(MIB)  # noqa: S311

    def write() -> None:
        with open(backing_path(v, key), "r+b") as f:
            f.writelines(i.to_bytes(8, "little") + piece[8:] for i in range(size // MIB))

    await trio.to_thread.run_sync(write)
    await seal_object(v, key)
    return key


@contextmanager
def _watched_memory() -> Iterator[list[int]]:
    """RssAnon again and again, from a thread of its own."""
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(_anonymous_bytes())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        try:
            yield seen
        finally:
            stop.set()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
