"""Packs against a model: random creates, overwrites, removals, undeletes, evictions, restores, with garbage collection
and rewriting between them, and a process that is killed again and again while it does those.

Nothing is lost: what the model has is read, whole, from whatever there is. Nothing is kept: in the end the bucket has
what rows name, rows name what files and kept generations need, and packs take less than twice that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio

from aof2.engine import packrows
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.jobs import prune, queue, rewrite
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.restore import restore
from aof2.engine.settings import Settings
from aof2.engine.settings.model import RetentionSettings
from aof2.engine.tiering import landing
from aof2.engine.volume import PARTS, Volume
from tests.engine.helpers import (
    object_row,
    put_object,
    read_object,
    run_volume,
    small_settings,
    undelete_object,
    unlink_object,
)
from tests.support.crash import is_killed

from .helpers import World
from .test_crash import CrashEnv
from .test_prune import rewrite as write_again

TENANT = 1
ROUNDS = 10
START_MS = 1_700_000_000_000
WINDOW_MS, PURGE_MS = 120_000, 60_000
POINTS = (
    *rewrite.CRASH_POINTS,
    *prune.CRASH_POINTS,
    "packs.packed",
    "packs.put",
    "packs.recorded",
    *landing.CRASH_POINTS,
    "job.claimed",
    "job.progressed",
    "job.executed",
)

Key = tuple[int, int, int]


def world(v: Volume) -> World:
    return World(v, v.jobs, cast("Any", None))


class File:
    """What a name should read as, and what it read as before."""

    def __init__(self, key: Key, data: bytes) -> None:
        self.key = key
        self.contents = [data]
        self.removed_ms = 0

    @property
    def data(self) -> bytes:
        return self.contents[-1]


class Run:
    """One seed."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.now_ms = START_MS
        self.files: dict[str, File] = {}
        self.removed: dict[str, File] = {}
        self.made = 0
        self.machine = 0
        self.kills = 0
        self.written = 0  # packs, by those runs that nothing killed

    @property
    def settings(self) -> Settings:
        made = small_settings(self.root / f"machine{self.machine}", remote_url=f"file://{self.root / 'remote'}")
        kept = RetentionSettings(
            undelete_window_s=WINDOW_MS / 1000,
            checkpoints=2,
            purge_after_s=PURGE_MS / 1000,
            rewrite_bytes_per_s=1 << 40,
        )
        quick = msgspec.structs.replace(made.manifest, rotation_period_ms=20)
        return msgspec.structs.replace(made, retention=kept, manifest=quick)

    def run(self, body: Callable[[Volume], Awaitable[None]], env: Env | None = None) -> None:
        run_volume(self.settings, body, env=env or CrashEnv(now_ms=self.now_ms), parts=PARTS)

    # -- what users do -------------------------------------------------------------------------------------------

    async def change(self, v: Volume) -> None:
        rng = self.rng
        for _ in range(rng.randrange(4, 30)):
            await self.create(v)
        await v.jobs.checkpoint(TENANT)
        for name in self.some(self.files, 6):
            await self.overwrite(v, name)
        for name in self.some(self.files, len(self.files) // 2):
            await self.remove(v, name)
        for name in self.some(self.removed, 4):
            await self.undelete(v, name)
        await v.hydrator.settle()
        await v.evict([file.key for file in self.files.values() if rng.random() < 0.4])
        await self.check(v, rng.sample(sorted(self.files), min(8, len(self.files))))

    def some(self, names: dict[str, File], most: int) -> list[str]:
        return self.rng.sample(sorted(names), min(len(names), self.rng.randrange(most + 1)))

    def content(self) -> bytes:
        kind = self.rng.random()
        if kind < 0.1:
            return b""
        seed = self.rng.randrange(30) if kind < 0.3 else self.rng.randrange(1 << 40)  # some have been there before
        rng = random.Random(seed)
        return rng.randbytes(rng.randrange(1, 3000))

    async def create(self, v: Volume) -> None:
        name, self.made = f"f{self.made}", self.made + 1
        data = self.content()
        self.files[name] = File(await put_object(v, "default", name.encode(), data), data)

    async def overwrite(self, v: Volume, name: str) -> None:
        file = self.files[name]
        if object_row(v, file.key).state == ObjectState.PUBLISHED:
            data = self.content()
            file.key = await write_again(world(v), file.key, data)
            file.contents.append(data)

    async def remove(self, v: Volume, name: str) -> None:
        file = self.files.pop(name)
        published = object_row(v, file.key).state == ObjectState.PUBLISHED
        await unlink_object(v, "default", name.encode())
        if published:
            file.removed_ms = self.now_ms
            self.removed[name] = file

    async def undelete(self, v: Volume, name: str) -> None:
        file = self.removed.pop(name)
        if file.removed_ms + WINDOW_MS > self.now_ms:
            await undelete_object(v, "default", file.key[1], name.encode())
            self.files[name] = file

    async def check(self, v: Volume, names: list[str]) -> None:
        for name in names:
            file = self.files[name]
            assert await read_object(v, file.key, 0, len(file.data) + 1) == file.data, name

    # -- what happens by itself ----------------------------------------------------------------------------------

    async def background(self, v: Volume) -> None:
        """All at once, and reads beside it."""
        await v.hydrator.settle()
        async with trio.open_nursery() as nursery:
            for work in (v.jobs.prune, v.jobs.rewrite, v.jobs.checkpoint):
                nursery.start_soon(work, TENANT)
        await v.evict([file.key for file in self.files.values()])
        await self.check(v, sorted(self.files)[::3])
        for row in v.jobs.runner.live(TENANT):
            await world(v).wait(TENANT, row.job_id)
        await world(v).wait(TENANT, await v.jobs.rewrite(TENANT, now=True))

    def background_killed(self) -> None:
        env = CrashEnv(self.rng.choice(POINTS), self.rng.randrange(1, 3), now_ms=self.now_ms)

        async def armed(v: Volume) -> None:
            env.armed = True
            await self.background(v)
            env.armed = False

        self.kills += is_killed(lambda: self.run(armed, env), env.point)

    def lose_machine(self) -> None:
        """Everything is in the remote; from there it goes on."""

        async def publish(v: Volume) -> None:
            await v.checkpoint("default")

        self.run(publish)
        self.machine += 1
        with closing(open_remote(Env(), self.settings.remote)) as store:
            report = restore(CrashEnv(now_ms=self.now_ms), store, self.settings.volume.state_dir, map_bytes=1 << 30)
        assert report.lost == []

    # -- the end -------------------------------------------------------------------------------------------------

    async def tidy(self, v: Volume) -> None:
        await v.hydrator.settle()
        await v.jobs.checkpoint(TENANT)
        await world(v).wait(TENANT, await v.jobs.prune(TENANT))
        report = queue.report(await world(v).wait(TENANT, await v.jobs.rewrite(TENANT, now=True)))
        self.written += cast("int", report.get("packs", 0))

    async def compare(self, v: Volume) -> None:
        await v.evict([file.key for file in self.files.values()])
        await self.check(v, sorted(self.files))
        with v.catalog.view() as view:
            blobs, rows = dict(view.scan(TENANT, t.BLOBS)), dict(view.scan(TENANT, t.PACKS))
            index = load_index(view, TENANT)
            stored, live = packrows.totals(view, TENANT)
        uploads = {key for segment_id, key in index.pending_uploads if segment_id != LOG_SEGMENT_ID}
        deletes = {key for segment_id, key in index.pending_deletes if segment_id != LOG_SEGMENT_ID}
        assert (uploads, deletes, index.needs_repair) == (set(), set(), [])
        listing = {info.key for info in v.bare_remote.list("checkpoints/")}
        assert listing == {blob.key for blob in blobs.values()} >= rows.keys()
        needed = {hashlib.sha256(file.data).digest() for file in self.files.values() if file.data}
        kept = {hashlib.sha256(data).digest() for file in self.files.values() for data in file.contents[-3:] if data}
        assert needed <= blobs.keys() <= kept
        assert rows and packrows.amplification(stored, live) < 2


@pytest.mark.expects_warnings
@pytest.mark.parametrize("seed", range(int(os.environ.get("AOF2_MODEL_SEEDS", "2"))))
def test_nothing_is_lost_and_nothing_kept(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    r = Run(tmp_path, seed)
    (tmp_path / "remote").mkdir()
    for number in range(ROUNDS):
        r.run(r.change)
        if number % 3 == 2:
            r.run(r.tidy)
        r.background_killed()
        r.now_ms += r.rng.choice((1000, 61_000, 121_000))
        if number % 4 == 3:
            r.lose_machine()
    for _ in range(4):
        r.now_ms += 3_600_000
        r.run(r.tidy)
    r.run(r.compare)
    assert r.kills and r.written
    # A kill between the delete of an old snapshot of the log and its record.
    expected = "manifest object on the remote is not what the log says"
    seen = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message for message in seen if message != expected] == []
