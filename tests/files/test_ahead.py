"""Chunks of a large file set off while the next ones are hashed; the file is written to, removed, killed meanwhile."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.files import Files, ahead, seal, stream_of
from aof2.engine.jobs import prune
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.tiering import hashing
from aof2.engine.tiering import publish as publishing
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, small_settings
from tests.files.helpers import FakeKernel, content, make, publish, row_of, run_files, scribble, top
from tests.files.test_costs import waited_for
from tests.files.test_parts import evict, verified
from tests.files.test_room import CHUNK, data_of
from tests.support.crash import Acks, PowerLoss, crash_cases, hits_of, run_until_crash

DATA = data_of(4 * CHUNK - 100)
PATIENCE_S = 30


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "LARGE_BYTES", 2 * CHUNK)


class Halt:
    """Hashing stands before this chunk, once, until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()
        chunk = hashing.Hasher.chunk

        def halted(hasher: hashing.Hasher, at: int, whole: Any) -> hashing.ChunkDigest:
            if at == index and not self.go.is_set():
                self.arrived.set()
                assert self.go.wait(PATIENCE_S)
            return chunk(hasher, at, whole)

        monkeypatch.setattr(hashing.Hasher, "chunk", halted)


class Puts:
    """The keys of blobs that are put; `before` is called first, with key and size."""

    def __init__(
        self,
        volume: Volume,
        monkeypatch: pytest.MonkeyPatch,
        before: Callable[[str, int], object] = lambda _key, _size: None,
    ) -> None:
        self.keys: list[str] = []
        put = volume.bare_remote.put_blob

        def counted(key: str, source: Any, size: int, **sums: Any) -> str:
            before(key, size)
            etag = put(key, source, size, **sums)
            self.keys.append(key)
            return etag

        monkeypatch.setattr(volume.bare_remote, "put_blob", counted)

    async def until(self, count: int) -> None:
        with trio.fail_after(PATIENCE_S):
            while len(self.keys) < count:
                await trio.sleep(0.01)


def abandoned(volume: Volume) -> list[str]:
    """Blobs that garbage collection would clear away, however long it waits."""
    stream_id = stream_of(top(volume))
    return [key for _, key in prune.find_abandoned(volume.catalog, stream_id, volume.env.now_ms() + 1)]


async def is_as_written(files: Files, ino: int, data: bytes) -> None:
    row = row_of(files, ino)
    assert (row.state, row.sha256) == (ObjectState.PUBLISHED, hashlib.sha256(data).digest())
    await evict(files, ino)
    assert await content(files, ino) == data


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_chunk_sets_off_while_the_next_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    settings = small_settings(tmp_path, compression=compression)
    halt = Halt(monkeypatch, 2)

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch)
        ino = await make(files, b"a", DATA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.sealer.seal_now)
            await puts.until(2)
            assert row_of(files, ino).state == ObjectState.DIRTY
            halt.go.set()
        await publish(files)
        assert len(set(puts.keys)) == len(puts.keys) == 4
        assert not abandoned(files.volume)
        await is_as_written(files, ino, DATA)

    run_files(settings, body)
    verified(settings)


def test_written_to_while_its_first_chunks_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)
    halt = Halt(monkeypatch, 2)

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch)
        ino = await make(files, b"a", DATA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.sealer.seal_now)
            await puts.until(2)
            fh = await files.open(ino, os.O_RDWR)
            halt.go.set()
        scribble(files, ino, b"other", CHUNK + 7)
        await files.release(fh)
        await publish(files)
        # The first chunk is as it was, and found there.
        assert len(set(puts.keys)) == len(puts.keys) == 5
        data = bytearray(DATA)
        data[CHUNK + 7 : CHUNK + 12] = b"other"
        await is_as_written(files, ino, bytes(data))
        second = hashlib.sha256(DATA[CHUNK : 2 * CHUNK]).hexdigest()
        assert abandoned(files.volume) == [key for key in puts.keys[:2] if second in key]

    run_files(settings, body)
    verified(settings)


def test_changed_under_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is not what was hashed: it is no blob, under no name."""
    settings = small_settings(tmp_path, compression="none")
    halt = Halt(monkeypatch, 2)
    arrived, gate = threading.Event(), threading.Event()

    def wait(_key: str, _size: int) -> None:
        arrived.set()
        assert gate.wait(PATIENCE_S)

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch, wait)
        ino = await make(files, b"a", DATA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.sealer.seal_now)
            assert await trio.to_thread.run_sync(arrived.wait, PATIENCE_S)
            fh = await files.open(ino, os.O_RDWR)
            for at in (5, CHUNK + 5):
                scribble(files, ino, b"other", at)
            gate.set()
            halt.go.set()
        await files.release(fh)
        assert not puts.keys
        await publish(files)
        await is_as_written(files, ino, Path(files.volume.hot.path("default", ino, 1)).read_bytes())

    run_files(settings, body)
    verified(settings)


def test_removed_while_its_first_chunks_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)
    halt = Halt(monkeypatch, 2)

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch)
        ino = await make(files, b"a", DATA)
        unlink = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=files.known.is_open)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.sealer.seal_now)
            await puts.until(2)
            files.removal.removed(await result_of(files.volume.writer.submit(stream_of(ino), unlink)))
            halt.go.set()
        await publish(files)
        assert len(puts.keys) == 2
        assert sorted(abandoned(files.volume)) == sorted(puts.keys)

    run_files(settings, body)
    verified(settings)


def test_what_fails_ahead_is_left_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)
    halt = Halt(monkeypatch, 2)
    failed = threading.Event()

    def fail_once(key: str, _size: int) -> None:
        if not failed.is_set():
            failed.set()
            raise RemoteUnavailableError(f"put of {key}: not now")

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch, fail_once)
        ino = await make(files, b"a", DATA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.sealer.seal_now)
            assert await trio.to_thread.run_sync(failed.wait, PATIENCE_S)
            halt.go.set()
        await publish(files)
        assert len(set(puts.keys)) == len(puts.keys) == 4
        await is_as_written(files, ino, DATA)

    run_files(settings, body)
    verified(settings)


def test_what_is_there_already_does_not_set_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)

    async def body(files: Files, _: FakeKernel) -> None:
        await make(files, b"a", DATA)
        await publish(files)
        puts = Puts(files.volume, monkeypatch)
        ino = await make(files, b"b", DATA)
        await publish(files)
        assert not puts.keys
        await is_as_written(files, ino, DATA)

    run_files(settings, body)
    verified(settings)


def test_a_small_file_does_not_wait_for_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PIECE_BYTES", 64 * KIB)
    arrived, gate = threading.Event(), threading.Event()

    def wait(_key: str, size: int) -> None:
        if size > 64 * KIB:
            arrived.set()
            assert gate.wait(PATIENCE_S)

    async def body(files: Files, _: FakeKernel) -> None:
        puts = Puts(files.volume, monkeypatch, wait)
        large = await make(files, b"large", DATA)
        await files.sealer.seal_now()
        assert await trio.to_thread.run_sync(arrived.wait, PATIENCE_S)
        small = await make(files, b"small", b"small")
        with trio.fail_after(PATIENCE_S / 2):
            await waited_for(files, "small")
        assert len(puts.keys) == 1
        gate.set()
        await publish(files)
        await is_as_written(files, large, DATA)
        await is_as_written(files, small, b"small")

    run_files(small_settings(tmp_path, compression="none"), body)


# -- crashes -----------------------------------------------------------------------------------------------------

POINTS = (*ahead.CRASH_POINTS, *seal.CRASH_POINTS)


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]
    settings = small_settings(root, remote_url=f"file://{remote_of(acks)}")

    async def body(files: Files, _: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await files.durability.fsync(ino)
        acks.tell({"synced": 1})
        await publish(files)
        acks.tell({"published": 1})

    run_files(settings, body, env=env)


def remote_of(acks: Acks) -> Path:
    remote = acks.path.with_name("remote")
    remote.mkdir(parents=True, exist_ok=True)
    return remote


def check(root: Path, remote: Path, synced: bool) -> None:
    settings = small_settings(root, remote_url=f"file://{remote}")

    async def body(files: Files, _: FakeKernel) -> None:
        with files.volume.catalog.view() as view:
            entries = [e for (_, name), e in view.scan(stream_of(top(files.volume)), t.DENTRIES) if name == b"a"]
        assert entries or not synced
        for entry in entries:
            await publish(files)
            data = await content(files, entry.ino)
            assert data == DATA or not synced
            await is_as_written(files, entry.ino, data)

    run_files(settings, body)
    verified(settings)


@pytest.mark.expects_warnings
def test_every_point(tmp_path: Path) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    rng = random.Random(5)
    for n, (point, nth) in enumerate(crash_cases(hits, POINTS, per_point_max=3)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        if not crash.killed:
            continue  # as many chunks set off as there is time for
        shutil.copytree(base / "remote", base / "remote2")
        synced = any("synced" in ack for ack in crash.acks if isinstance(ack, dict))
        disk = PowerLoss(crash).disk(base / "disk", rng)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        check(disk, base / "remote2", synced)
        check(crash.root, base / "remote", synced)
        shutil.rmtree(base)
