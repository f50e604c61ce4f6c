"""What goes of an inbox, and what stays."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.env import Env
from aof2.engine.settings import Settings
from tests.engine.helpers import job_over
from tests.inbox.helpers import KEEP_S, Arena, run, settings_of, some_files, troubles


def later(settings: Settings, body: Callable[[Arena], Awaitable[None]], *, after_s: float) -> None:
    run(settings, body, env=Env(now_ms=lambda: time.time_ns() // 1_000_000 + int(after_s * 1000)))


def test_what_was_never_committed_goes_when_it_is_old(tmp_path: Path) -> None:
    settings, files = settings_of(tmp_path), some_files()

    async def deliver(a: Arena) -> None:
        await a.deliver("kept", "kept", files)
        inbox = await a.inbox()

        def stage() -> None:
            job = inbox.open_job("given-up", to="nowhere")
            for path, data in files.items():
                job.put(path, data)
            job.attempt("other").put_file("x", b"x" * 300_000)
            a.store.put_blob("inbox/default/.knock/given-up", b"", 0)

        await trio.to_thread.run_sync(stage)
        staged = [key for key in a.listed() if "given-up" in key]
        assert len(staged) > 3
        await a.intake.sweep()
        assert [key for key in a.listed() if "given-up" in key] == staged

    async def sweep(a: Arena) -> None:
        await a.intake.sweep()
        left = a.listed()
        assert not [key for key in left if "given-up" in key]
        assert not [key for key in left if key.endswith((".commit", ".done"))]
        assert a.tree("kept") == sorted(files)
        for path, data in files.items():
            assert await a.read(f"kept/{path}") == data

    run(settings, deliver)
    later(settings, sweep, after_s=2 * KEEP_S)
    assert troubles(settings) == []


def test_a_job_is_the_same_after_its_answer_went(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def first(a: Arena) -> None:
        await a.deliver("again", "there", {"a": b"1"})

    async def second(a: Arena) -> None:
        await a.intake.sweep()
        assert not [key for key in a.listed() if key.endswith(".commit")]
        done = await a.deliver("again", "there", {"a": b"2", "b": b"2"})
        assert done is not None and done.files == 1
        assert a.tree("there") == ["a"] and await a.read("there/a") == b"1"

    run(settings, first)
    later(settings, second, after_s=2 * KEEP_S)
    assert troubles(settings) == []


def test_a_job_whose_knock_got_lost_is_found(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        inbox = await a.inbox()

        def commit() -> None:
            job = inbox.open_job("quiet", to="there")
            job.put("a", b"1")
            job.commit()
            a.store.delete(["inbox/default/.knock/quiet"])

        await a.intake.sweep()
        await trio.to_thread.run_sync(commit)
        await a.intake.look()
        assert "quiet" not in str(a.tree())
        await a.intake.sweep()
        assert a.tree("there") == ["a"]

    run(settings, body)


def test_what_was_deleted_goes_from_the_inbox_as_from_anywhere(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        await a.deliver("one", "there", some_files(1))
        await a.deliver("two", "there", {"only": b"2" * 400_000}, mode="overwrite")

    async def prune(a: Arena) -> None:
        tenant_id = a.volume.tenants.named("default").tenant_id
        await job_over(a.volume.jobs, tenant_id, await a.volume.jobs.prune(tenant_id))

    async def pruned(a: Arena) -> None:
        await prune(a)
        assert a.listed("inbox/default/one/") == []
        assert len(a.listed("inbox/default/two/")) == 2
        assert await a.read("there/only") == b"2" * 400_000

    run(settings, body)
    month_s = 30 * 86_400
    later(settings, prune, after_s=month_s)
    later(settings, pruned, after_s=2 * month_s)
    assert troubles(settings) == []


def test_an_inbox_that_is_off_has_no_door(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    off = msgspec.structs.replace(settings.follow, inbox_period_s=None)

    async def opened(a: Arena) -> None:
        await a.inbox()

    async def closed(a: Arena) -> None:
        with pytest.raises(Exception, match="takes nothing in"):
            await a.inbox()
        assert a.listed() == []

    run(settings, opened)
    run(msgspec.structs.replace(settings, follow=off), closed)
