"""Blocks that landed are told before a fetch is over, whatever trio runs first: the thread's answer or its messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from aof2.engine.objects import on_disk
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.tiering import flights
from aof2.engine.volume import Volume

from .helpers import KIB, put_object, read_object, run_volume, small_settings
from .test_tiers import content

CHUNK = 256 * KIB
BLOCK = 16 * KIB


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What a thread asked to be run soon, and is run when the test does so: long after the thread's answer."""
    calls: list[Callable[[], object]] = []
    token = SimpleNamespace(run_sync_soon=lambda call, *args: calls.append(partial(call, *args)))
    lowlevel = SimpleNamespace(current_trio_token=lambda: token)
    names: dict[str, Any] = {**vars(trio), "lowlevel": lowlevel}
    monkeypatch.setattr(flights, "trio", SimpleNamespace(**names))
    return calls


def deliver(late: list[Callable[[], object]]) -> None:
    assert late
    while late:
        late.pop(0)()


def test_a_fetch_that_is_over_has_told_all_that_landed(tmp_path: Path, late: list[Callable[[], object]]) -> None:
    async def body(v: Volume) -> None:
        data = content(1, CHUNK)
        key = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        await v.evict([key])
        assert await read_object(v, key, 0, CHUNK) == data
        assert v.quota.usage.used_bytes == on_disk(CHUNK)
        fetched = v.hydrator.fetched_bytes
        deliver(late)
        assert await read_object(v, key, 0, CHUNK) == data
        assert (v.quota.usage.used_bytes, v.hydrator.fetched_bytes) == (on_disk(CHUNK), fetched)

    run_volume(small_settings(tmp_path, compression="none"), body)


def test_what_landed_before_a_fetch_failed_is_not_cleared_away(
    tmp_path: Path, late: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(v: Volume) -> None:
        data = content(2, CHUNK)
        key = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        await v.evict([key])
        fetcher = v.hydrator.fetcher
        real = fetcher.receive

        def half(chunk: Any, blob: Any, first: int, count: int, *rest: Any) -> int:
            real(chunk, blob, first, count // 2, *rest)
            raise RemoteUnavailableError("gone in the middle", retryable=False)

        with monkeypatch.context() as patch:
            patch.setattr(fetcher, "receive", half)
            with pytest.raises(RemoteUnavailableError):
                await read_object(v, key, 0, CHUNK)
        assert v.quota.usage.used_bytes == CHUNK // 2
        deliver(late)
        assert await read_object(v, key, 0, CHUNK) == data

    run_volume(small_settings(tmp_path, compression="none"), body)
