"""A file larger than the cache, the process killed or the power cut at every named point of its way out."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.files import Files, parts, seal, stream_of
from aof2.engine.local.hot import fallocate
from aof2.engine.settings import Settings
from tests.files.helpers import FakeKernel, content, publish, row_of, run_files, top, write
from tests.files.test_parts import evict, read_all, verified
from tests.files.test_room import BLOCK, CHUNK, create, data_of, settings_of
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

POINTS = (*parts.CRASH_POINTS, *seal.CRASH_POINTS)
STEP = 4 * BLOCK
WHOLE = data_of(12 * CHUNK)
OVER = b"written over" * 3
OVER_AT = CHUNK + 100


def crash_settings(root: Path, remote: Path) -> Settings:
    remote.mkdir(parents=True, exist_ok=True)
    settings = settings_of(root, "budget", hot_bytes=5 * CHUNK, timeout_s=10.0)
    return msgspec.structs.replace(settings, remote=msgspec.structs.replace(settings.remote, url=f"file://{remote}"))


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        for n, at in enumerate(range(0, len(WHOLE), STEP)):
            await write(files, kernel, fh, at, WHOLE[at : at + STEP])
            acks.tell({"answered": at + STEP})
            if n % 16 == 7:
                await files.durability.fsync(ino)
                acks.tell({"synced": at + STEP})
        await write(files, kernel, fh, OVER_AT, OVER)
        acks.tell({"over": 1})
        await files.release(fh)
        await publish(files)
        acks.tell({"synced": len(WHOLE), "published": 1})

    run_files(crash_settings(root, acks.path.with_name("remote")), body, env=env)


def told(crash: Crash, what: str) -> int:
    return max((a[what] for a in crash.acks if isinstance(a, dict) and what in a), default=0)


def check(root: Path, remote: Path, *, length: int, over: bool, maybe_over: bool) -> None:
    """The first `length` bytes are there; the file goes on, is sealed and uploaded, and the checker is content."""
    settings = crash_settings(root, remote)

    async def body(files: Files, kernel: FakeKernel) -> None:
        with files.volume.catalog.view() as view:
            entries = [e for (_, name), e in view.scan(stream_of(top(files.volume)), t.DENTRIES) if name == b"a"]
        if not entries:
            assert not length
            return
        ino = entries[0].ino
        fh = await files.open(ino, os.O_RDWR)
        file = files.known.get(ino)
        assert file is not None
        size = file.stat().st_size
        assert size >= length
        got = bytearray(await read_all(files, kernel, fh, size))
        expected = bytearray(WHOLE)
        if over or (maybe_over and got[OVER_AT : OVER_AT + len(OVER)] == OVER):
            expected[OVER_AT : OVER_AT + len(OVER)] = OVER
        assert got[:length] == expected[:length]
        await write(files, kernel, fh, size, b"on it goes")
        got += b"on it goes"
        await files.release(fh)
        await publish(files)
        row = row_of(files, ino)
        assert (row.state, row.sha256) == (ObjectState.PUBLISHED, hashlib.sha256(got).digest())
        await evict(files, ino)
        assert await content(files, ino) == got
        await files.volume.hydrator.quiesce()
        assert files.volume.quota.usage.used_bytes <= settings.cache.hot_bytes

    run_files(settings, body)
    verified(settings)


def holes_of(live: Path, found: Path) -> None:
    """A disk after power loss has holes where nothing was written; a copy has zeros."""
    for path in (found / "state" / "hot_cache").rglob("*"):
        name = path.relative_to(found)
        if not path.is_file() or not (live / name).exists():
            continue
        with open(path, "r+b") as copy:
            for at in range(0, path.stat().st_size, 4096):
                if copy.seek(at) == at and not any(copy.read(4096)):
                    fallocate(copy.fileno(), 3, at, 4096)


@pytest.mark.expects_warnings
def test_every_point(tmp_path: Path) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    rng = random.Random(5)
    killed_at: set[str] = set()
    for n, (point, nth) in enumerate(crash_cases(hits, POINTS, per_point_max=3)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        if not crash.killed:
            continue  # parts are taken as room is needed: this run took fewer
        killed_at.add(point)
        shutil.copytree(base / "remote", base / "remote2")
        disk = PowerLoss(crash).disk(base / "disk", rng)
        holes_of(crash.root, disk)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        over, answered = bool(told(crash, "over")), told(crash, "answered")
        published = bool(told(crash, "published"))
        check(disk, base / "remote2", length=told(crash, "synced"), over=published, maybe_over=True)
        check(crash.root, base / "remote", length=answered, over=over, maybe_over=answered == len(WHOLE))
        shutil.rmtree(base)
    assert killed_at == set(POINTS)
