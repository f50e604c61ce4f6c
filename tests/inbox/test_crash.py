"""Killed at every named point of a delivery, deliverer and writer alike: each job is there once and whole."""

from __future__ import annotations

import random
import shutil
import zlib
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
from tests.support.crash import Acks, PowerLoss, run_until_crash

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
NTH = {"inbox.checked": 2, "inbox.files.published": 2, "inbox.replicated": 3, "inbox.answered": 2, "inbox.knocked": 3}


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
@pytest.mark.parametrize("point", POINTS)
def test_a_crash(tmp_path: Path, point: str) -> None:
    """After a kill, or after power loss with the catalog lost."""
    crash = run_until_crash(workload, tmp_path, point, NTH.get(point, 1))
    assert crash.killed
    done = [a["done"] for a in crash.acks if isinstance(a, dict) and "done" in a]
    root = crash.root
    if zlib.crc32(point.encode()) % 2:
        root = PowerLoss(crash).disk(tmp_path / "disk", random.Random(16))
        shutil.rmtree(root / "state" / "catalog", ignore_errors=True)
    check(root, tmp_path / "remote", done)


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
