"""A day of traffic on a small volume: files in directories, read as files are read, more than fit; a clock that is told
what time it is."""

from __future__ import annotations

import random
from functools import partial

import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.env import Env
from aof2.engine.settings import Settings
from aof2.engine.tiering.noting import note_uses
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, put_object, read_object, run_volume, with_cache

NOON_MS = 1_795_000_000_000
MINUTE_MS = 60_000
TENANT_ID = 1
DIRECTORIES = (b"logs", b"reports", b"models", b"raw")


class Clock:
    """Says what time it is, as it was told."""

    def __init__(self) -> None:
        self.ms = NOON_MS

    def env(self) -> Env:
        return Env(now_ms=lambda: self.ms, monotonic_s=lambda: self.ms / 1000)


def run_day(
    settings: Settings, *, hot_bytes: int, files: int = 48, reads: int = 400, minutes: int = 24 * 60, seed: int = 1
) -> None:
    """`reads` opens over so many minutes, most of them of few files; a sample of uses every half an hour."""
    rng = random.Random(seed)
    clock = Clock()

    async def body(v: Volume) -> None:
        folders = [await _mkdir(v, name) for name in DIRECTORIES]
        keys = []
        for n in range(files):
            data = rng.randbytes(rng.randrange(16, 96) * KIB)
            keys.append(await put_object(v, "default", b"part-%03d" % n, data, folders[n % len(folders)]))
            clock.ms += MINUTE_MS // 10
            if n % 8 == 7:
                await v.checkpoint("default")
                await note_uses(v)
        await v.checkpoint("default")
        last_noted = clock.ms
        for n in range(reads):
            clock.ms += int(minutes * MINUTE_MS / reads * rng.uniform(0.2, 1.8))
            first = 0 if n < reads // 2 else files // 3  # the working set moves
            key = keys[(first + min(int(rng.expovariate(0.12)), files - 1)) % files]
            await read_object(v, key, 0, 96 * KIB)
            await v.hydrator.settle()
            if clock.ms - last_noted > 30 * MINUTE_MS:
                await note_uses(v)
                last_noted = clock.ms
        await note_uses(v)
        await put_object(v, "default", b"late.parquet", rng.randbytes(40 * KIB), folders[1])
        await trio.lowlevel.checkpoint()

    run_volume(with_cache(settings, hot_bytes=hot_bytes), body, env=clock.env())


async def _mkdir(v: Volume, name: bytes) -> int:
    work = partial(namespace.mkdir, parent=namespace.root_ino(TENANT_ID), name=name)
    return (await result_of(v.writer.submit(TENANT_ID, work))).ino
