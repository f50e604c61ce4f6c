"""Files that were removed, and power loss: a name that comes back has its bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.files import Files
from aof2.engine.files.kind import FilesKind
from aof2.engine.local import doomed
from aof2.engine.settings import Settings
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, content, make, run_files, top
from tests.files.test_births import kind_of, names
from tests.support.crash import Acks, PowerLoss, crash_cases, hits_of, run_until_crash

FILES = 4
POINTS = ("catalog.commit.applied", *doomed.CRASH_POINTS)
Remove = Callable[[Files, FilesKind, bytes], Awaitable[None]]


def settings_in(root: Path) -> Settings:
    """Nothing is synced unless somebody asks for it."""
    settings = small_settings(root)
    return msgspec.structs.replace(
        settings, manifest=msgspec.structs.replace(settings.manifest, commit_period_ms=60_000)
    )


def ino_of(files: Files, name: bytes) -> int:
    with files.volume.catalog.view() as view:
        entry = view.get(1, t.DENTRIES, (top(files.volume), name))
    assert entry is not None
    return entry.ino


async def sealed(files: Files, kind: FilesKind, name: bytes) -> None:
    assert kind.unlinks.take(top(files.volume), name) is not None
    await kind.fold()


async def dirty(files: Files, kind: FilesKind, name: bytes) -> None:
    """Opened to write since it was sealed (all before the first is removed), and synced."""
    for n in range(FILES) if name == b"0" else ():
        ino = ino_of(files, b"%d" % n)
        fh = await files.open(ino, os.O_RDWR)
        await files.durability.fsync(ino)
        await files.release(fh)
    await sealed(files, kind, name)


async def still_open(files: Files, kind: FilesKind, name: bytes) -> None:
    """Gone with its last close."""
    fh = await files.open(ino_of(files, name), os.O_RDONLY)
    work = partial(namespace.unlink, parent=top(files.volume), name=name, is_open=files.known.is_open)
    files.removal.removed(await result_of(files.volume.writer.submit(1, work)))
    await files.release(fh)


def workload(env: Env, acks: Acks, remove: Remove) -> None:
    async def main(files: Files, _: FakeKernel) -> None:
        kind = kind_of(files, files.kernel)
        await kind.intents.start(files.volume.writable_tenants())
        for n in range(FILES):
            await make(files, b"%d" % n, b"%d" % n * 3000)
        await files.sealer.seal_now()
        files.volume.writer.flush()
        acks.tell("there")
        for n in range(FILES):
            await remove(files, kind, b"%d" % n)
        acks.tell("removed")
        await trio.sleep(3 * doomed.DELETE_AFTER_S)
        assert not list((files.volume.hot.root / "default").iterdir())
        kind.intents.close()

    run_files(settings_in(env.files.root), main, env=env)  # type: ignore[attr-defined]


@pytest.mark.expects_warnings
@pytest.mark.parametrize("remove", [sealed, dirty, still_open])
def test_a_name_that_comes_back_has_its_bytes(tmp_path: Path, remove: Remove) -> None:
    work = partial(workload, remove=remove)
    hits = hits_of(work, tmp_path / "hits")
    rng = random.Random(8)
    came_back = deleted = 0
    for n, (point, nth) in enumerate(crash_cases(hits, POINTS, per_point_max=10)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(work, base, point, nth)
        if "there" not in crash.acks:
            continue
        for _ in range(3):
            disk = PowerLoss(crash).disk(base / "disk", rng)
            shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)

            async def check(files: Files, _: FakeKernel) -> None:
                nonlocal came_back, deleted
                back = names(files)
                for name in back:
                    assert await content(files, ino_of(files, name)) == name * 3000
                came_back += len(back)
                deleted += FILES - len(back)

            run_files(settings_in(disk), check)
        shutil.rmtree(base)
    assert came_back and deleted  # else nothing was tried


def test_what_waits_to_be_deleted_makes_room_at_once(tmp_path: Path) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        kind = kind_of(files, files.kernel)
        await kind.intents.start(files.volume.writable_tenants())
        ino = await make(files, b"a", b"x" * 100_000)
        await files.sealer.seal_now()
        evictor, quota = files.volume.evictor, files.volume.quota
        await sealed(files, kind, b"a")
        assert files.volume.hot.path("default", ino, 1).exists() and quota.usage.used_bytes
        room = await evictor.take("default", quota.tenant_usage("default").limit_bytes or quota.usage.limit_bytes or 0)
        assert room is not None and not files.volume.hot.path("default", ino, 1).exists()
        room.release()
        kind.intents.close()

    run_files(settings_in(tmp_path), body)
