"""The background scrub: finds what verify finds, in its own time, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.settings import Settings
from aof2.engine.verify import scrub
from aof2.engine.verify.run import verify
from aof2.engine.verify.scrub import Scrubber
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import backing_path, read_object
from tests.verify.build import CHUNK, backing, content, flip


def scrubber(v: Volume, env: Env, damaged: list[tuple[Key, list[int]]], **changes: object) -> Scrubber:
    give_up = v.hydrator.give_up

    async def noted(handle: ObjectHandle, blocks: list[int]) -> None:
        damaged.append((handle.key, blocks))
        await give_up(handle, blocks)

    v.hydrator.give_up = noted  # type: ignore[method-assign,assignment]
    arguments: dict[str, object] = {"every_s": 7 * 86_400.0, **changes}
    return Scrubber(env, v.hydrator, v.tenant_names, v.opened_object, **arguments)  # type: ignore[arg-type]


def volume_test(settings: Settings, body, env: Env | None = None) -> None:
    async def main() -> None:
        async with open_volume(settings, env=env, parts=("jobs",)) as v:
            await body(v)

    trio.run(main)


@pytest.mark.expects_warnings
def test_damage_is_given_up_and_fetched_again(settings: Settings) -> None:
    async def body(v: Volume) -> None:
        found: list[tuple[Key, list[int]]] = []
        one = scrubber(v, v.env, found, bytes_per_s=1 << 40)
        await one.scrub()
        assert (found, one.damaged_blocks, one.passes) == ([], 0, 1)
        flip(path, CHUNK + 3)
        await one.scrub()
        assert [blocks for _, blocks in found] == [[16]]
        key = found[0][0]
        assert backing_path(v, key) == path
        await v.hydrator.settle()
        found.clear()
        await one.scrub()
        assert found == []
        assert await read_object(v, key, 0, 10 * CHUNK) == content("here")

    path = backing(settings, "here")
    volume_test(settings, body)
    assert verify(settings).exit_code == 0


@pytest.mark.expects_warnings
def test_the_only_copy_is_reported_and_left(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def body(v: Volume) -> None:
        found: list[tuple[Key, list[int]]] = []
        one = scrubber(v, v.env, found, bytes_per_s=1 << 40)
        await one.scrub()
        assert (found, one.damaged_blocks) == ([], 1)

    flip(backing(settings, "dirty"), 3)
    volume_test(settings, body)
    assert "the remote does not have it" in caplog.text


def test_it_keeps_to_its_rate_and_its_period(settings: Settings) -> None:
    async def main() -> None:
        async with open_volume(settings, env=env, parts=("jobs",)) as v:
            one = scrubber(v, env, [], every_s=200.0, bytes_per_s=CHUNK // 10)
            began = trio.current_time()
            await one.scrub()
            took, least = trio.current_time() - began, one.checked_bytes / (CHUNK // 10)
            assert least <= took < 2 * least
            async with trio.open_nursery() as nursery:
                await nursery.start(one.run)
                await trio.sleep(180)
                assert one.passes == 1
                await trio.sleep(180)
                assert one.passes == 2
                nursery.cancel_scope.cancel()

    clock = trio.testing.MockClock(autojump_threshold=0.05)
    env = Env(now_ms=lambda: 2_000_000_000_000 + int(clock.current_time() * 1000))
    trio.run(main, clock=clock)


def test_it_goes_on_where_it_stopped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "REMEMBER_BYTES", 1)
    monkeypatch.setattr(scrub, "PAGE_ROWS", 1)

    async def body(v: Volume) -> None:
        seen: list[int] = []

        class _StopError(Exception):
            pass

        first = scrubber(v, v.env, [], bytes_per_s=1 << 40)
        read = first._read

        def read_some(tenant: str, item: scrub._Resident) -> tuple[int, int]:
            if len(seen) == 2:
                raise _StopError
            bad, size = read(tenant, item)
            seen.append(size)
            return bad, size

        first._read = read_some  # type: ignore[method-assign]
        with pytest.raises(_StopError):
            await first.scrub()
        with v.catalog.view() as view:
            assert view.get(0, t.COUNTERS, scrub.PLACE_CHUNK)
        place, _ = first._due()
        assert place is not None
        second = scrubber(v, v.env, [], bytes_per_s=1 << 40)
        await second.scrub(place)
        whole = scrubber(v, v.env, [], bytes_per_s=1 << 40)
        await whole.scrub()
        assert second.checked_bytes == whole.checked_bytes - sum(seen)
        assert first._due()[0] is None
        await result_of(v.writer.submit(0, lambda _: None))

    volume_test(settings, body)


def test_turned_off_it_ends(settings: Settings, tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        with trio.fail_after(5):
            await scrubber(v, v.env, [], every_s=None).run()

    volume_test(settings, body)
