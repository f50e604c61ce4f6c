"""Killed at every named point: what was begun is finished, nothing is done twice, nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import JobState, JobType, ObjectState
from aof2.engine.env import Env
from aof2.engine.jobs import checkpoint, download, prune, verify, worker
from aof2.engine.jobs import rewrite as rewrite_packs
from aof2.engine.tiering import packs, publish, repack
from aof2.engine.verify.findings import Severity
from aof2.engine.verify.run import verify as verify_volume
from tests.engine.helpers import read_object, small_settings, unlink_object
from tests.support.crash import is_killed

from .helpers import CHUNK, TENANT, World, run_world
from .test_prune import content, rewrite
from .test_verify import flip

Body = Callable[[World], Awaitable[None]]
START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class CrashEnv(Env):
    """Ends the process at the nth pass of a point, once armed; counts them all."""

    def __init__(self, point: str | None = None, nth: int = 1, *, now_ms: int = START_MS) -> None:
        super().__init__(seed=1, now_ms=lambda: now_ms)
        self.point = point
        self.left = nth
        self.armed = False
        self.hits: Counter[str] = Counter()

    def failpoint(self, name: str) -> None:
        if not self.armed:
            return
        self.hits[name] += 1
        if name == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def armed(body: Body) -> Body:
    async def run(w: World) -> None:
        assert isinstance(w.v.env, CrashEnv)
        w.v.env.armed = True
        await body(w)
        w.v.env.armed = False

    return run


def run_killed(root: Path, body: Body, point: str, nth: int, now_ms: int) -> bool:
    """Runs the body in a child until it is killed at the point; False: it never got there."""
    env = CrashEnv(point, nth, now_ms=now_ms)
    return is_killed(lambda: run_world(small_settings(root), armed(body), env=env, record=root / "calls"), point)


def cases(hits: Counter[str], points: tuple[str, ...]) -> list[tuple[str, int]]:
    """First, middle and last pass of every point; a point that is never passed is a hole in the matrix."""
    missing = [p for p in points if p not in hits]
    assert not missing, f"the body never passes {missing}"
    return [(p, nth) for p in points for nth in sorted({1, (hits[p] + 1) // 2, hits[p]})]


def prepared(root: Path, body: Body, *, start: bool = True) -> None:
    run_world(small_settings(root), body, env=CrashEnv(), start=start)


def matrix(tmp_path: Path, body: Body, points: tuple[str, ...], after: Body, *, now_ms: int = START_MS) -> None:
    """Counts the passes of an undisturbed run, kills copies of the prepared volume at each, and lets `after` look."""
    count = tmp_path / "count"
    shutil.copytree(tmp_path / "prepared", count)
    env = CrashEnv(now_ms=now_ms)
    run_world(small_settings(count), armed(body), env=env)
    for point, nth in cases(env.hits, points):
        root = tmp_path / f"{point}-{nth}"
        shutil.copytree(tmp_path / "prepared", root)
        killed = run_killed(root, body, point, nth, now_ms)
        assert killed or nth > 1, f"{point} was not passed {nth} times"
        run_world(small_settings(root), after, env=CrashEnv(now_ms=now_ms), record=root / "calls")
        check_clean(root)
        shutil.rmtree(root)


def check_clean(root: Path) -> None:
    """What verify says of the volume afterwards; audit and manifest uploads are not part of these volumes."""
    report = verify_volume(small_settings(root), deep_remote=True)
    bad = [f for f in report.findings if f.severity is not Severity.NOTE]
    assert not bad, bad


def puts(root: Path) -> list[str]:
    lines = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    return [line.removeprefix("put ") for line in lines if line.startswith("put ")]


async def all_over(w: World) -> None:
    """Their rows say so, and their executors are through: a row can be seen before its commit is synced."""
    runner = w.jobs.runner
    await w.until(
        lambda: not runner.running and w.all_jobs() and all(row.state == JobState.DONE for row in w.all_jobs())
    )


def test_packs(tmp_path: Path) -> None:
    data = {f"f{i}": content(i, 30 + 50 * i) for i in range(9)} | {"empty": b"", "twin": content(3, 180)}
    data["large"] = content(77, CHUNK + 5)
    keys: dict[str, tuple[int, int, int]] = {}

    async def prepare(w: World) -> None:
        for name, piece in data.items():
            keys[name] = await w.put(name, piece)

    async def body(w: World) -> None:
        await w.jobs.checkpoint(TENANT)
        await all_over(w)

    async def after(w: World) -> None:
        await w.jobs.checkpoint(TENANT)
        await all_over(w)
        assert all(row.state == ObjectState.PUBLISHED for row in w.rows(t.OBJECTS).values())
        assert w.remote_blobs() == sorted({blob.key for blob in w.rows(t.BLOBS).values()})
        assert len(w.rows(t.PACKS)) == 1
        assert w.quota_is_even()
        with w.v.catalog.view() as view:
            assert not load_index(view, TENANT).pending_uploads
        await w.v.evict(list(keys.values()))
        for name, piece in data.items():
            assert await read_object(w.v, keys[name], 0, len(piece) + 1) == piece

    prepared(tmp_path / "prepared", prepare, start=False)
    # Its plan announces the pack, where a place is free for it: then no commit of the packer does.
    points = tuple(point for point in packs.CRASH_POINTS if point != "packs.announced")
    matrix(tmp_path, body, (*worker.CRASH_POINTS, *checkpoint.CRASH_POINTS, *points), after)


def test_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two new packs for what is left of three; then the old ones go."""
    files: dict[tuple[int, int, int], bytes] = {}

    async def prepare(w: World) -> None:
        for first in (0, 20, 40):
            for i in range(first, first + 12):
                key, piece = await w.put(f"f{i}", content(i, 300 + i)), content(i, 300 + i)
                if not i % 4:
                    files[key] = piece
            await w.jobs.checkpoint(TENANT)
        await all_over(w)
        for i in (i for first in (0, 20, 40) for i in range(first, first + 12) if i % 4):
            await unlink_object(w.v, "default", f"f{i}".encode())

    async def release(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))

    async def body(w: World) -> None:
        await w.wait(TENANT, await w.jobs.rewrite(TENANT, now=True))

    async def check(w: World) -> None:
        blobs = w.rows(t.BLOBS)
        assert len(blobs) == len(files) == 9
        with w.v.catalog.view() as view:
            assert not load_index(view, TENANT).needs_repair
        await w.v.evict(list(files))
        for key, piece in files.items():
            assert await read_object(w.v, key, 0, len(piece) + 1) == piece

    async def after(w: World) -> None:
        await w.until(lambda: not w.jobs.runner.running)
        await w.wait(TENANT, await w.jobs.rewrite(TENANT, now=True))
        await check(w)
        packs_here = w.rows(t.PACKS)
        assert sorted(row.members for row in packs_here.values())[:3] == [0, 0, 0]
        assert len({blob.key for blob in w.rows(t.BLOBS).values()}) <= 3
        with w.v.catalog.view() as view:
            pending = {key for _, key in load_index(view, TENANT).pending_uploads}
        assert set(w.remote_blobs()) == {*packs_here, *pending}

    async def collect(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))

    async def collected(w: World) -> None:
        await w.until(lambda: not w.jobs.runner.running)
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        await check(w)
        assert w.remote_blobs() == sorted(w.rows(t.PACKS))
        assert all(row.members for row in w.rows(t.PACKS).values())
        with w.v.catalog.view() as view:
            index = load_index(view, TENANT)
        assert not index.pending_uploads and not index.pending_deletes

    monkeypatch.setattr(repack, "PACK_BYTES_MAX", 3000)
    root = tmp_path / "prepared"
    prepared(root, prepare)
    for hours in (1, 2):
        run_world(small_settings(root), release, env=CrashEnv(now_ms=START_MS + hours * HOUR_MS))
    matrix(tmp_path, body, rewrite_packs.CRASH_POINTS, after, now_ms=START_MS + 2 * HOUR_MS)
    run_world(small_settings(root), body, env=CrashEnv(now_ms=START_MS + 2 * HOUR_MS))
    shutil.rmtree(tmp_path / "count")
    matrix(tmp_path, collect, prune.CRASH_POINTS[1:], collected, now_ms=START_MS + 4 * HOUR_MS)


def test_checkpoint(tmp_path: Path) -> None:
    data = {"a": content(1, 3 * CHUNK + 5), "b": content(2, 100), "c": content(1, CHUNK), "d": b""}
    keys: dict[str, tuple[int, int, int]] = {}

    async def prepare(w: World) -> None:
        for name, piece in data.items():
            keys[name] = await w.put(name, piece)

    async def body(w: World) -> None:
        await w.jobs.checkpoint(TENANT)
        await all_over(w)

    async def after(w: World) -> None:
        await w.jobs.checkpoint(TENANT)
        await all_over(w)
        assert len(w.all_jobs()) == 1
        assert all(row.state == ObjectState.PUBLISHED for row in w.rows(t.OBJECTS).values())
        (job,) = w.all_jobs()
        assert job.done == job.total
        record = puts(w.v.state_dir.parent)
        assert len(record) == len(set(record))
        assert set(record) <= set(w.remote_blobs())  # a put that ended as the process did is in nobody's record
        assert w.remote_blobs() == sorted(blob.key for blob in w.rows(t.BLOBS).values())
        assert w.quota_is_even()
        await w.v.evict(list(keys.values()))
        for name, piece in data.items():
            assert await read_object(w.v, keys[name], 0, len(piece)) == piece

    prepared(tmp_path / "prepared", prepare, start=False)
    points = (*worker.CRASH_POINTS, *checkpoint.CRASH_POINTS, *publish.CRASH_POINTS)
    matrix(tmp_path, body, points, after)


def test_prune(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(3)]
    newest: dict[str, tuple[tuple[int, int, int], bytes]] = {}

    async def prepare(w: World) -> None:
        for i, name in enumerate(names):
            key = await w.put(name, content(i, CHUNK + i))
            for generation in range(1, 4):
                await w.jobs.checkpoint(TENANT)
                newest[name] = (key, content(10 * generation + i, CHUNK + i))
                key = await rewrite(w, key, newest[name][1])
                newest[name] = (key, newest[name][1])
        await w.put("gone", content(99, 2 * CHUNK))
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"gone")
        await all_over(w)

    async def release(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))

    async def body(w: World) -> None:
        # Once for the rows, and, with the clock standing still, a purge time of its own for the blobs.
        await w.wait(TENANT, await w.jobs.prune(TENANT))

    async def after(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        await all_over(w)
        assert w.remote_blobs() == sorted(blob.key for blob in w.rows(t.BLOBS).values())
        assert len(w.rows(t.OBJECTS)) == 6
        assert all(blob.refs == 1 for blob in w.rows(t.BLOBS).values())
        with w.v.catalog.view() as view:
            assert load_index(view, TENANT).pending_deletes == set()
        assert w.quota_is_even()
        await w.v.evict([key for key, _ in newest.values()])
        for key, piece in newest.values():
            assert await read_object(w.v, key, 0, len(piece)) == piece

    root = tmp_path / "prepared"
    prepared(root, prepare)
    run_released = CrashEnv(now_ms=START_MS + HOUR_MS)
    rows_too = tmp_path / "rows"
    shutil.copytree(root, rows_too)
    run_world(small_settings(root), release, env=run_released)
    matrix(tmp_path, body, prune.CRASH_POINTS[1:], after, now_ms=START_MS + 2 * HOUR_MS)
    # And the first half: killed while rows are released.
    shutil.rmtree(root)
    shutil.rmtree(tmp_path / "count")
    rows_too.rename(root)

    async def after_release(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        assert len(w.rows(t.OBJECTS)) == 6
        assert w.quota_is_even()

    matrix(tmp_path, body, prune.CRASH_POINTS[:1], after_release, now_ms=START_MS + HOUR_MS)


@pytest.mark.expects_warnings
def test_verify_and_rebuild(tmp_path: Path) -> None:
    data = content(5, 6 * CHUNK)
    keys: list[tuple[int, int, int]] = []

    async def prepare(w: World) -> None:
        keys.append(await w.put("a", data))
        await w.jobs.checkpoint(TENANT)
        await all_over(w)
        names = w.remote_blobs()
        flip(tmp_path / "prepared" / "remote" / names[1])
        (tmp_path / "prepared" / "remote" / names[4]).unlink()

    async def body(w: World) -> None:
        await w.wait(TENANT, await w.jobs.verify(TENANT))

    async def after(w: World) -> None:
        await w.wait(TENANT, await w.jobs.verify(TENANT))
        await all_over(w)
        with w.v.catalog.view() as view:
            assert load_index(view, TENANT).needs_repair == []
        await w.v.evict(keys)
        assert await read_object(w.v, keys[0], 0, len(data)) == data

    prepared(tmp_path / "prepared", prepare)
    matrix(tmp_path, body, (*verify.CRASH_POINTS, *publish.REBUILD_CRASH_POINTS), after)


def test_download(tmp_path: Path) -> None:
    data = {name: content(i, CHUNK + 1) for i, name in enumerate("abc")}
    keys: dict[str, tuple[int, int, int]] = {}

    async def prepare(w: World) -> None:
        for name, piece in data.items():
            keys[name] = await w.put(name, piece)
        await w.jobs.checkpoint(TENANT)
        await all_over(w)
        await w.v.evict(list(keys.values()))

    async def body(w: World) -> None:
        await w.wait(TENANT, await w.jobs.download(TENANT))

    async def after(w: World) -> None:
        await w.wait(TENANT, await w.jobs.download(TENANT))
        assert sum(row.type == JobType.DOWNLOAD_CHECKPOINT for row in w.all_jobs()) <= 2
        assert w.quota_is_even()
        w.remote.calls.clear()
        for name, piece in data.items():
            assert await read_object(w.v, keys[name], 0, len(piece)) == piece
        assert w.remote.calls == []

    prepared(tmp_path / "prepared", prepare)
    matrix(tmp_path, body, download.CRASH_POINTS, after)


def test_many_kills_in_a_row(tmp_path: Path) -> None:
    """A random point each time; the work is over in the end, and no blob was put twice."""
    rng = random.Random(7)
    points = (*worker.CRASH_POINTS, *checkpoint.CRASH_POINTS, *publish.CRASH_POINTS)
    root = tmp_path / "volume"

    async def prepare(w: World) -> None:
        for i in range(12):
            await w.put(f"f{i}", content(i, CHUNK + 1))

    async def body(w: World) -> None:
        await w.jobs.checkpoint(TENANT)
        await all_over(w)

    prepared(root, prepare, start=False)
    for _ in range(12):
        run_killed(root, body, rng.choice(points), rng.randint(1, 4), START_MS)
    run_world(small_settings(root), body, record=root / "calls")
    record = puts(root)
    assert len(record) == len(set(record)) <= 24
    check_clean(root)
