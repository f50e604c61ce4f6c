"""Killed at every named point of a delivery, deliverer and writer alike: each job is there once and whole."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.append import arriving as arriving_records
from aof2.engine.env import Env
from aof2.engine.files import arriving as arriving_files
from aof2.engine.inbox import Inbox, intake, job, sweep
from aof2.engine.settings import Settings
from aof2.engine.settings.model import RemoteSettings
from tests.inbox.helpers import Arena, lines, put_all, run, settings_of, troubles
from tests.support.crash import Acks, PowerLoss, crash_cases, hits_of, run_until_crash

POINTS = (
    *job.CRASH_POINTS,
    *intake.CRASH_POINTS,
    *sweep.CRASH_POINTS,
    *arriving_files.CRASH_POINTS,
    *arriving_records.CRASH_POINTS,
)
FIRST = {"a": b"first a", "x/b": b"first b" * 3000}
SECOND = {"a": b"second a", "c": b"second c" * 90_000}
RECORDS = lines("record", 300)
JOBS = ("first", "records", "second")


def settings_in(root: Path, remote: Path) -> Settings:
    remote.mkdir(exist_ok=True)
    return msgspec.structs.replace(settings_of(root), remote=RemoteSettings(url=f"file://{remote}"))


async def deliver(a: Arena, env: Env, name: str) -> None:
    """One of the jobs, to its answer."""
    await a.intake.look()
    tenant = "events" if name == "records" else "default"
    inbox = await trio.to_thread.run_sync(lambda: Inbox(a.store, tenant, env=env))
    to, mode = ("clicks", "append") if name == "records" else ("out", "overwrite" if name == "second" else "append")
    opened = inbox.open_job(name, to=to, mode=mode)  # type: ignore[arg-type]
    if name == "records":
        await trio.to_thread.run_sync(opened.put_records, RECORDS)
        await trio.to_thread.run_sync(opened.commit)
    else:
        await trio.to_thread.run_sync(put_all, opened, FIRST if name == "first" else SECOND)
    await a.intake.look()
    assert await trio.to_thread.run_sync(opened.answer) is not None


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(a: Arena) -> None:
        for name in JOBS:
            await deliver(a, env, name)
            acks.tell({"done": name})

    run(settings_in(root, acks.path.with_name("remote")), body, env=env)


@pytest.mark.expects_warnings
def test_every_point(tmp_path: Path) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    killed_at: set[str] = set()
    rng = random.Random(16)
    for n, (point, nth) in enumerate(crash_cases(hits, POINTS, per_point_max=3)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        assert crash.killed
        killed_at.add(point)
        done = [a["done"] for a in crash.acks if isinstance(a, dict) and "done" in a]
        shutil.copytree(base / "remote", base / "remote2", dirs_exist_ok=True)
        disk = PowerLoss(crash).disk(base / "disk", rng)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        for root, remote in ((disk, base / "remote2"), (crash.root, base / "remote")):
            check(root, remote, done)
    assert killed_at == set(POINTS)


def check(root: Path, remote: Path, done: list[str]) -> None:
    settings = settings_in(root, remote)

    async def body(a: Arena) -> None:
        await a.intake.look()
        if done == ["first"]:
            assert set(FIRST) == set(a.tree("out")) or set(SECOND) == set(a.tree("out"))
        if "records" in done:
            assert await a.world.sealed() == b"".join(RECORDS)
        for name in JOBS:  # by a deliverer that does not know how far it got
            await deliver(a, Env(), name)
        assert a.tree("out") == sorted(SECOND)
        for path, data in SECOND.items():
            assert await a.read(f"out/{path}") == data
        assert await a.world.sealed() == b"".join(RECORDS)
        assert not [key for key in a.listed() if ".knock" in key or key.endswith(".refused")]

    run(settings, body)
    assert troubles(settings) == []
