"""What the tests of bad weather share: some files, waiting for the volume, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable

import trio

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.local.handles import Key
from aof2.engine.settings import Settings
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import object_row, put_object, read_object

from .test_tiers import CHUNK, content


async def until(done: Callable[[], object], *, within_s: float = 30) -> None:
    with trio.fail_after(within_s):
        while not done():
            await trio.sleep(0.02)


async def published(v: Volume, keys: list[Key], *, within_s: float = 60) -> None:
    """Waits for the volume to do it by itself."""
    await until(lambda: all(object_row(v, key).state == ObjectState.PUBLISHED for key in keys), within_s=within_s)


async def put_some(v: Volume, count: int, size: int = CHUNK + 100) -> dict[Key, bytes]:
    data = [content(i, size) for i in range(count)]
    return {await put_object(v, "default", b"f%d" % i, piece): piece for i, piece in enumerate(data)}


async def check(v: Volume, data: dict[Key, bytes]) -> None:
    for key, piece in data.items():
        assert await read_object(v, key, 0, len(piece) + 1) == piece


def is_clean(settings: Settings, *, deep_remote: bool = True) -> None:
    report = verify(settings, deep_remote=deep_remote)
    assert report.clean, report.findings
    assert not report.errors
    if deep_remote:
        assert report.remote == "read"
