"""A volume with something in every tier, made once and copied for each test; and ways to hurt it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.env import Env
from aof2.engine.inspect.rows import open_rows
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Finding, Report, Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, put_object, read_object, run_volume, small_settings

T = TypeVar("T")

CHUNK = 256 * KIB
BLOCK = 16 * KIB
TENANT = 1
SIZE = CHUNK + 3 * BLOCK + 5
FILES = ("warm", "here", "gone", "partly", "same", "empty", "dirty")


def content(name: str) -> bytes:
    if name == "empty":
        return b""
    if name == "warm":
        return b"all work and no play makes jack a dull boy\n" * 4000
    return random.Random({"same": "here"}.get(name, name)).randbytes(SIZE)


def make(root: Path, *, env: Env | None = None) -> Settings:
    """here: resident · gone: evicted · partly: one block back · warm: compressed here · same: here's content again ·
    dirty: sealed, not uploaded."""
    settings = small_settings(root)

    async def body(v: Volume) -> None:
        keys = {}
        await put_object(v, "default", b"warm", content("warm"))
        await v.checkpoint("default")
        await v.evictor.make_room(v.settings.cache.hot_bytes)
        for name in FILES[1:-1]:
            keys[name] = await put_object(v, "default", name.encode(), content(name))
        await v.checkpoint("default")
        await v.evict([keys["gone"], keys["partly"]])
        await read_object(v, keys["partly"], CHUNK, 10)
        await v.hydrator.settle()
        await put_object(v, "default", b"dirty", content("dirty"))

    run_volume(settings, body, env=env, parts=("jobs",))
    return settings


def copy(template: Path, root: Path) -> Settings:
    shutil.copytree(template, root, dirs_exist_ok=True)
    return small_settings(root)


def damage_of(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is not Severity.NOTE]


def kinds(report: Report) -> list[str]:
    return [str(f.kind) for f in damage_of(report)]


def chunks_of(settings: Settings, name: str) -> list[ChunkRow]:
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        ino = next(e.ino for (_, n), e in view.scan(TENANT, t.DENTRIES) if n == name.encode())
        row = view.get(TENANT, t.OBJECTS, (ino, 1))
        assert row is not None
        found = [view.get(TENANT, t.CHUNKS, c) for c in row.chunks]
    return [c for c in found if c is not None]


def backing(settings: Settings, name: str) -> Path:
    ino = chunks_of(settings, name)[0].ino
    return settings.volume.state_dir / "hot_cache" / "default" / f"{ino}.1"


def blob(settings: Settings, name: str, index: int = 0) -> Path:
    assert settings.remote.directory is not None
    return settings.remote.directory / chunks_of(settings, name)[index].key


def flip(path: Path, offset: int) -> None:
    mtime = path.stat()
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(mtime.st_atime_ns, mtime.st_mtime_ns))


def old(path: Path) -> None:
    os.utime(path, (1, 1))


def commit(settings: Settings, work: Callable[[Batch], T]) -> None:
    """A change through the log, as a buggy or forging writer would make it."""

    async def body(v: Volume) -> None:
        await result_of(v.writer.submit(TENANT, work))

    run_volume(settings, body, parts=("jobs",))


def mended(settings: Settings, *, deep: bool = False) -> Report:
    """Repairs; what is left must be clean."""
    report = verify(settings, repair=True, deep_remote=deep)
    assert report.exit_code == 1, damage_of(report)
    assert all(f.repaired for f in damage_of(report))
    again = verify(settings, deep_remote=True)
    assert again.exit_code == 0, damage_of(again)
    return report


def read_all(settings: Settings, names: tuple[str, ...] = FILES) -> None:
    """Every file reads back bit for bit."""

    async def body(v: Volume) -> None:
        with v.catalog.view() as view:
            inodes = {name.decode(): e.ino for (_, name), e in view.scan(TENANT, t.DENTRIES)}
        for name in names:
            data = content(name)
            assert await read_object(v, (TENANT, inodes[name], 1), 0, len(data) + 1) == data, name
        await trio.lowlevel.checkpoint()

    run_volume(settings, body, parts=("jobs",))
