"""Cold scans of open files: how much at a time, how much in memory, what garbage collection leaves alone."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.files import Files, stream_of
from aof2.engine.files.cold import COLD_SCAN
from aof2.engine.settings import Settings
from aof2.engine.tiering.coldread import ColdReads
from tests.engine.helpers import KIB, small_settings
from tests.files.helpers import FakeKernel, make, publish, run_files, top

CHUNK = 256 * KIB


def scans(tmp_path: Path, **cache: object) -> Settings:
    settings = small_settings(tmp_path, compression="none")
    return msgspec.structs.replace(settings, cache=msgspec.structs.replace(settings.cache, **cache))


async def mark(files: Files, ino: int) -> None:
    work = partial(namespace.set_xattr, ino=ino, name=COLD_SCAN, value=b"1")
    await result_of(files.volume.writer.submit(stream_of(ino), work))
    files.cold.marked(ino, b"1")


async def cold_files(files: Files, count: int, size: int) -> dict[int, bytes]:
    """Files that only the remote has, below a directory that is marked."""
    datas = {
        await make(files, b"f%d" % i, data): data for i in range(count) for data in [random.Random(i).randbytes(size)]
    }
    await publish(files)
    await files.volume.evict([(stream_of(ino), ino, 1) for ino in datas])
    await mark(files, top(files.volume))
    return datas


class Watched:
    """How many requests read from the remote at once."""

    def __init__(self, files: Files, monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
        self._lock = threading.Lock()
        self._now = self.most = self.requests = 0
        self._together = threading.Event()
        self._enough = enough
        store = files.volume.hydrator.fetcher.remote
        monkeypatch.setattr(store, "get_range", partial(self._get_range, store.get_range))

    def _get_range(self, get_range: Callable[..., bytes], *args: object) -> bytes:
        with self._lock:
            self._now += 1
            self.requests += 1
            self.most = max(self.most, self._now)
            if self._now >= self._enough:
                self._together.set()
        try:
            self._together.wait(1.0)  # until so many are there as may be
            return get_range(*args)
        finally:
            with self._lock:
                self._now -= 1


async def scan(files: Files, ino: int, wanted: bytes, step: int) -> None:
    fh = await files.open(ino, os.O_RDONLY)
    try:
        assert files.cold.is_cold(fh)
        got = bytearray()
        while part := await files.handle(fh).read_bytes(len(got), step):
            got += part
        assert got == wanted
    finally:
        await files.release(fh)


def test_so_many_requests_at_once_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        datas = await cold_files(files, 6, 3 * CHUNK)
        watched = Watched(files, monkeypatch, enough=2)
        async with trio.open_nursery() as nursery:
            for ino, data in datas.items():
                nursery.start_soon(scan, files, ino, data, 24 * KIB)
        assert watched.most == 2
        limiter = files.volume.limiters.of("default")
        assert limiter.admitted_bytes == sum(map(len, datas.values()))
        assert limiter.running == limiter.waiting == 0

    run_files(scans(tmp_path, cold_scan_parallel=2), body)


def test_one_scan_uses_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        [(ino, data)] = (await cold_files(files, 1, 24 * CHUNK)).items()
        watched = Watched(files, monkeypatch, enough=3)
        await scan(files, ino, data, 24 * KIB)
        assert watched.most == 3
        assert files.volume.limiters.of("default").admitted_bytes == len(data)

    run_files(scans(tmp_path, cold_scan_parallel=3), body)


def test_bandwidth_is_waited_for(tmp_path: Path) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        datas = await cold_files(files, 3, CHUNK)
        async with trio.open_nursery() as nursery:
            for ino, data in datas.items():
                nursery.start_soon(scan, files, ino, data, CHUNK)
        assert files.volume.limiters.of("default").waits > 0

    run_files(scans(tmp_path, cold_scan_bytes_per_s=CHUNK, cold_scan_parallel=8), body)


def test_memory_is_bounded_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More scans than the buffer has room for: slower, right, and never over it."""

    async def body(files: Files, _: FakeKernel) -> None:
        datas = await cold_files(files, 8, 4 * CHUNK)
        room = 2 * files.volume.settings.engine.block_bytes
        reads = files.cold.reads = ColdReads(files.volume.cold, buffer_bytes=room)
        most = 0
        drop = reads._drop

        def counted(slots: list[object]) -> None:
            nonlocal most
            drop(slots)
            most = max(most, reads.buffered_bytes)

        monkeypatch.setattr(reads, "_drop", counted)
        async with trio.open_nursery() as nursery:
            for ino, data in datas.items():
                nursery.start_soon(scan, files, ino, data, 10_007)
        assert most <= room + files.volume.settings.engine.block_bytes * 64
        assert reads.buffered_bytes == 0
        assert files.volume.pages.used_bytes == 0
        assert files.volume.quota.usage.used_bytes == 0

    run_files(scans(tmp_path), body)


def test_blobs_of_an_open_scan_stay(tmp_path: Path) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        [(ino, data)] = (await cold_files(files, 1, 2 * CHUNK)).items()
        with files.volume.catalog.view() as view:
            keys = [blob.key for _, blob in view.scan(stream_of(ino), t.BLOBS)]
        fhs = [await files.open(ino, os.O_RDONLY) for _ in range(2)]
        assert await files.handle(fhs[0]).read_bytes(0, 10) == data[:10]
        await files.release(fhs[0])
        assert keys and all(files.volume.cold.holds(key) for key in keys)
        await files.release(fhs[1])
        assert not any(files.volume.cold.holds(key) for key in keys)

    run_files(scans(tmp_path), body)


def test_a_damaged_or_missing_blob_is_an_error_and_no_bytes(tmp_path: Path) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        [(ino, _data)] = (await cold_files(files, 1, 2 * CHUNK)).items()
        for blob in (tmp_path / "remote").rglob("*.blob"):
            blob.unlink()
        fh = await files.open(ino, os.O_RDONLY)
        with pytest.raises(Exception, match="no such object"):
            await files.handle(fh).read_bytes(0, 10)
        await files.release(fh)
        assert files.cold.reads.buffered_bytes == 0

    run_files(scans(tmp_path), body)
