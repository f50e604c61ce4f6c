"""RewritePacks: what is needed of sparse packs goes into new ones; the old ones go as any dead blob does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from aof2.engine import packrows, snapshots
from aof2.engine.blob.pack import read_directory
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobState, PackRow
from aof2.engine.foreground import Foreground
from aof2.engine.jobs import prune, queue, rewrite
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.keys import is_pack
from aof2.engine.tiering import repack
from tests.engine.helpers import object_row, read_object, undelete_object, unlink_object

from .helpers import KEEP, TENANT, Clock, World, run_world
from .test_packs import Key, check_clean, check_cold, check_rows, content, pack_keys, pending_uploads, published
from .test_prune import pending_deletes, pruned
from .test_prune import rewrite as write_again
from .test_verify import needs_repair


async def removed(w: World, clock: Clock, names: Iterable[str]) -> None:
    """Unlinked, past their window, and their blobs' rows gone."""
    await w.v.hydrator.settle()
    for name in names:
        await unlink_object(w.v, "default", name.encode())
    clock.jump(601)
    await pruned(w)
    clock.jump(61)
    await pruned(w)


async def sparse(w: World, clock: Clock, count: int = 12, *, first: int = 0) -> dict[Key, bytes]:
    """One pack, of which a quarter is needed: every fourth file; those that are left."""
    files = await published(w, count, first=first)
    await removed(w, clock, [f"f{first + i}" for i in range(count) if i % 4])
    return {key: data for i, (key, data) in enumerate(files.items()) if not i % 4}


async def rewritten(w: World) -> dict[str, object]:
    return queue.report(await w.wait(TENANT, await w.jobs.rewrite(TENANT, now=True)))


def run(tmp_path: Path, body, clock: Clock | None = None, **options) -> None:  # type: ignore[no-untyped-def]
    clock = clock or Clock()
    options.setdefault("rewriting", rewrite.Rules(bytes_per_s=0))
    run_world(tmp_path, body, clock=clock.mock, env=clock.env(), **options)
    check_clean(tmp_path)


def test_what_is_needed_of_sparse_packs_goes_into_one(tmp_path: Path) -> None:
    clock = Clock()
    files: dict[Key, bytes] = {}

    async def body(w: World) -> None:
        for first in (0, 20, 40):
            files.update(await sparse(w, clock, first=first))
        full = await published(w, 8, first=60)
        old, (kept,) = pack_keys(w)[:3], [k for k in pack_keys(w) if w.rows(t.PACKS)[k].members == 8]
        forecast = w.jobs.rewriter.forecast(TENANT)
        assert forecast.packs == 3
        assert w.jobs.rewriter.is_due(TENANT)
        w.remote.calls.clear()
        report = await rewritten(w)
        assert (report["packs"], report["members"], report["left"], report["damaged"]) == (1, 9, 0, 0)
        assert w.remote.count("put") == 1
        (new,) = set(pack_keys(w)) - {*old, kept}
        size = w.v.remote.head_blob(new).size  # type: ignore[union-attr]
        members = read_directory(partial(w.v.remote.get_range, new), size, tenant="default")
        assert [m.chunk_id for m in members] == sorted(object_row(w.v, key).chunks[0] for key in files)
        assert w.rows(t.PACKS)[new] == PackRow(9, sum(m.stored_len for m in members), size)
        assert report["freed"] == sum(w.rows(t.PACKS)[key].pack_bytes for key in old)
        assert not pending_uploads(w) and not pending_deletes(w)
        assert {blob.key for blob in w.rows(t.BLOBS).values()} == {new, kept}
        assert set(pack_keys(w)) == {*old, kept, new}
        assert not w.jobs.rewriter.is_due(TENANT)  # and so it ends
        files.update(full)
        await check_cold(w, files)
        (job,) = [row for row in w.all_jobs() if row.token == "rewrite"]
        assert (job.state, job.done, job.total) == (JobState.DONE, 9, 9)

    run(tmp_path, body, clock)

    async def later(w: World) -> None:
        clock.jump(30)
        expected = prune.forecast(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        assert (expected.blobs, expected.later_blobs) == (0, 3)
        await pruned(w)
        assert len(pack_keys(w)) == 5  # moved out of half a minute ago
        clock.jump(31)
        assert prune.is_due(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        expected = prune.forecast(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        assert (expected.blobs, expected.later_blobs) == (3, 0)
        report = await pruned(w)
        assert (report["blobs_deleted"], report["bytes_freed"]) == (3, expected.bytes)
        assert len(pack_keys(w)) == len(w.rows(t.PACKS)) == 2
        check_rows(w)
        await check_cold(w, files)

    run(tmp_path, later, clock)


def test_what_can_come_back_is_live(tmp_path: Path) -> None:
    """Within their window, as an older generation, or in a snapshot: not less than what has a name."""
    clock = Clock()

    async def body(w: World) -> None:
        files = await published(w, 12)
        keys = list(files)
        kept = w.v.writer.call(TENANT, partial(snapshots.take, name="kept"))
        for i in range(4):
            await unlink_object(w.v, "default", f"f{i}".encode())  # in the snapshot
        for key in keys[4:8]:
            await write_again(w, key, content(900 + key[1], 2000))  # one generation of two
        await w.jobs.checkpoint(TENANT)
        await w.until(lambda: not w.jobs.runner.running)
        clock.jump(10_000)
        await pruned(w)
        clock.jump(10_000)
        await pruned(w)
        assert w.jobs.rewriter.forecast(TENANT).packs == 0
        w.v.writer.call(TENANT, partial(snapshots.delete, snapshot_id=kept.snapshot_id))
        for i in range(8, 12):
            await unlink_object(w.v, "default", f"f{i}".encode())  # may be undeleted
        for _ in range(2):
            clock.jump(61)
            await pruned(w)
        assert await rewritten(w) == {}
        await undelete_object(w.v, "default", keys[9][1], b"back")
        await check_cold(w, {keys[9]: files[keys[9]]} | {key: files[key] for key in keys[4:8]})
        clock.jump(601)
        await pruned(w)
        clock.jump(61)
        await pruned(w)
        assert w.jobs.rewriter.forecast(TENANT).packs == 1
        assert (await rewritten(w))["members"] == 5
        await check_cold(w, {keys[9]: files[keys[9]]} | {key: files[key] for key in keys[4:8]})

    run(tmp_path, body, clock)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_the_share_is_a_setting(tmp_path: Path, share: float) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        assert w.jobs.rewriter.forecast(TENANT).packs == (share > 0.5)
        report = await rewritten(w)
        assert report.get("packs", 0) == (share > 0.5)
        await check_cold(w, left)

    run(tmp_path, body, clock, rewriting=rewrite.Rules(share, 0))


def test_a_little_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at every row is not taken for a few bytes of many; when asked for, it is."""
    clock = Clock()

    async def body(w: World) -> None:
        await sparse(w, clock)
        await published(w, 60, first=100)
        assert w.jobs.rewriter.forecast(TENANT).packs == 1
        assert not w.jobs.rewriter.is_due(TENANT)
        monkeypatch.setattr(rewrite, "GAIN_BYTES_MIN", 1000)
        assert w.jobs.rewriter.is_due(TENANT)
        assert (await rewritten(w))["packs"] == 1

    run(tmp_path, body, clock)


def test_it_happens_by_itself(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        (old,) = pack_keys(w)
        for _ in range(20):
            clock.jump(20)
            await trio.testing.wait_all_tasks_blocked(0.02)
            await w.until(lambda: not w.jobs.runner.running)
            if old not in w.remote_blobs():
                break
        else:
            raise AssertionError("the old pack stays")
        check_rows(w)
        await check_cold(w, left)

    run(tmp_path, body, clock, prune_every_s=10.0)


def test_shared_content_goes_over_with_all_its_chunks(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        for i, data in enumerate(list(left.values())):
            left[await w.put(f"twin{i}", data)] = data
        await w.jobs.checkpoint(TENANT)
        await w.until(lambda: not w.jobs.runner.running)
        assert [blob.refs for blob in w.rows(t.BLOBS).values()] == [2, 2, 2]
        assert (await rewritten(w))["members"] == 3
        chunks, blobs = w.rows(t.CHUNKS), w.rows(t.BLOBS)
        assert len(chunks) == 6
        assert all(chunk.location == blobs[chunk.sha256].location for chunk in chunks.values())
        await check_cold(w, left)

    run(tmp_path, body, clock)


def test_new_packs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock, 24)
        monkeypatch.setattr(repack, "PACK_BYTES_MAX", 2000)
        report = await rewritten(w)
        assert report["packs"] in (2, 3) and report["members"] == 6
        await check_cold(w, left)

    run(tmp_path, body, clock)


def test_what_changes_under_way_stays_where_it_is(tmp_path: Path) -> None:
    """One is removed for good, one gets a second chunk, while the new pack is on its way."""
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock, 16)
        gone, shared, *_ = left
        twins: list[Key] = []

        async def change() -> None:
            await unlink_object(w.v, "default", b"f0")
            clock.jump(601)
            await w.v.evict([gone])
            w.v.handles.forget(gone)
            released = partial(prune._release_objects, keys=[gone], now_ms=clock.now_ms(), keep=KEEP)
            assert w.v.writer.call(TENANT, released) == 1
            twins.append(await w.put("twin", left[shared]))
            await w.jobs.checkpoint(TENANT)

        def meanwhile(op: str, key: str) -> None:
            if op == "put" and not twins:
                trio.from_thread.run(change)

        w.remote.fail = meanwhile  # type: ignore[assignment]
        report = await rewritten(w)
        assert (report["members"], report["left"]) == (2, 2)
        assert not pending_uploads(w)
        del left[gone]
        await check_cold(w, left | {twins[0]: left[shared]})
        clock.jump(61)
        await pruned(w)
        assert sorted(row.members for row in w.rows(t.PACKS).values()) == [1, 2]
        assert (await rewritten(w))["members"] == 1  # the old pack again, for the one that got a twin
        clock.jump(61)
        await pruned(w)
        check_rows(w)
        await check_cold(w, left | {twins[0]: left[shared]})

    run(tmp_path, body, clock)


def test_a_new_pack_that_was_given_up_gets_another_name(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        put: list[str] = []

        def hold(op: str, key: str) -> None:
            if op == "put" and not put:
                put.append(key)
                clock.jump(3600)
                with w.v.catalog.view() as view:
                    found = prune.find_abandoned(w.v.catalog, TENANT, clock.now_ms() - KEEP.purge_after_ms)
                    assert {key for _, key in found} == {put[0]}
                    del view
                w.v.writer.call(TENANT, partial(prune._queue_uploads, uploads=found))

        w.remote.fail = hold
        job = await w.jobs.rewrite(TENANT, now=True)
        await w.until(lambda: w.job(job).attempts == 1)
        assert "given up" in w.job(job).reason
        await w.jobs.runner.retry(TENANT, job)
        await w.until_state(job, JobState.DONE)
        (blob_key,) = {blob.key for blob in w.rows(t.BLOBS).values()}
        assert blob_key != put[0]
        clock.jump(3600)
        await pruned(w)
        assert w.remote_blobs() == [blob_key]
        await check_cold(w, left)

    run(tmp_path, body, clock)


def test_the_remote_is_away_in_the_middle(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        for op in ("get", "put"):
            failures = iter([RemoteUnavailableError("away")])
            w.remote.fail = lambda now, key, op=op, failures=failures: next(failures, None) if now == op else None
            job = await w.jobs.rewrite(TENANT, now=True)
            await w.until(lambda: w.job(job).reason)  # noqa: B023
            announced = {key for _, key in pending_uploads(w)}
            await w.jobs.runner.retry(TENANT, job)
            if op == "put":
                await w.until_state(job, JobState.DONE)
                assert {blob.key for blob in w.rows(t.BLOBS).values()} == announced  # the same pack, under its name
            else:
                await w.jobs.runner.cancel(TENANT, job)
                await w.until(lambda: not w.jobs.runner.running)
                if w.job(job).state == JobState.DONE:
                    return
        await check_cold(w, left)

    run(tmp_path, body, clock)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("harm", ["flipped", "cut", "swapped", "gone"])
def test_damaged_members_stay_and_are_told(tmp_path: Path, harm: str) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock, 16)
        (old,) = pack_keys(w)
        path = next(tmp_path.rglob(old))
        raw = bytearray(path.read_bytes())
        keys = list(left)
        places = [w.rows(t.CHUNKS)[object_row(w.v, key).chunks[0]] for key in keys]
        first, last = places[0], places[-1]
        bad = {"flipped": [0], "cut": [3], "swapped": [0, 3], "gone": [0, 1, 2, 3]}[harm]
        if harm == "flipped":
            raw[first.offset] ^= 1
        elif harm == "cut":
            del raw[last.offset + 10 :]
        elif harm == "swapped":  # whole blobs of the volume, at places that are not theirs
            blob = raw[first.offset : first.offset + first.stored_bytes]
            raw[last.offset : last.offset + len(blob)] = blob
            raw[first.offset] ^= 1
        path.write_bytes(raw)
        if harm == "gone":
            path.unlink()
        job = await w.jobs.rewrite(TENANT, now=True)
        await w.until_state(job, JobState.FAILED)
        assert f"{len(bad)} of 4 members are damaged and need repair: {old}" in w.job(job).reason
        assert needs_repair(w) == sorted(places[i].chunk_id for i in bad)
        assert not w.jobs.rewriter.is_due(TENANT)  # not again and again
        good = {key: left[key] for i, key in enumerate(keys) if i not in bad}
        await check_cold(w, good)
        # What is whole here makes it good again, and the rest of the pack may go.
        done = queue.report(await w.wait(TENANT, await w.jobs.verify(TENANT)))
        assert (done["rebuilt"], done["lost"]) == (len(bad), 0)
        assert not needs_repair(w)
        await check_cold(w, left)
        clock.jump(61)
        await pruned(w)
        assert old not in w.remote_blobs()
        check_rows(w)

    run(tmp_path, body, clock)


def test_it_waits_for_a_quiet_moment_and_keeps_to_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    foreground = Foreground()

    async def body(w: World) -> None:
        left = await sparse(w, clock, 24)
        monkeypatch.setattr(repack, "PACK_BYTES_MAX", 2000)
        monkeypatch.setattr(rewrite, "QUIET_MAX_S", 20.0)
        clock.mock.autojump_threshold = 0.01
        w.remote.calls.clear()

        async def ask() -> None:
            while True:
                foreground.asked()
                await trio.sleep(0.09)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            began_s = trio.current_time()
            job = await w.jobs.rewrite(TENANT)
            await trio.sleep(rewrite.QUIET_MAX_S / 2)
            assert not w.remote.calls
            nursery.cancel_scope.cancel()
        row = await w.wait(TENANT, job)
        report = queue.report(row)
        assert report["packs"] >= 2  # type: ignore[operator]
        assert trio.current_time() - began_s > rewrite.QUIET_MAX_S / 2 + 1  # a pack of some 2,000 bytes
        await check_cold(w, left)

    run(tmp_path, body, clock, foreground=foreground, rewriting=rewrite.Rules(0.5, 1000))


def test_a_caller_does_not_wait_for_quiet(tmp_path: Path) -> None:
    clock = Clock()
    foreground = Foreground()

    async def body(w: World) -> None:
        await sparse(w, clock)
        clock.mock.autojump_threshold = 0.01

        async def ask() -> None:
            while True:
                foreground.asked()
                await trio.sleep(0.09)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            job = await w.jobs.rewrite(TENANT)
            await trio.sleep(10)
            began_s = trio.current_time()
            assert await w.jobs.rewrite(TENANT, now=True) == job
            await w.wait(TENANT, job)
            assert trio.current_time() - began_s < 5
            nursery.cancel_scope.cancel()

    run(tmp_path, body, clock, foreground=foreground)


def test_counters_follow(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        def totals() -> tuple[int, int]:
            with w.v.catalog.view() as view:
                assert packrows.added_up(view, TENANT) == {
                    name: view.get(TENANT, t.COUNTERS, name) for name in (packrows.PACK_BYTES, packrows.PACK_LIVE_BYTES)
                }
                return packrows.totals(view, TENANT)

        left = await published(w, 12)
        stored, live = totals()
        assert stored == live > 0
        assert packrows.amplification(stored, live) == 1.0
        await removed(w, clock, [f"f{i}" for i in range(12) if i % 4])
        stored, live = totals()
        assert packrows.amplification(stored, live) > 2
        await rewritten(w)
        assert totals()[0] > stored  # both are there for a while
        clock.jump(61)
        await pruned(w)
        assert totals() == (live, live)
        w.v.writer.call(TENANT, lambda b: [b.delete(t.COUNTERS, name) for name in ("pack_bytes", "pack_live_bytes")])
        await check_cold(w, {key: data for i, (key, data) in enumerate(left.items()) if not i % 4})

    run(tmp_path, body, clock)  # a volume from before they were counted is clean

    async def again(w: World) -> None:
        with w.v.catalog.view() as view:
            assert packrows.totals(view, TENANT)[0] > 0

    run(tmp_path, again, clock)


def test_a_reader_on_its_way_finds_what_was_moved(tmp_path: Path) -> None:
    """Its row named the old pack, which is gone when it gets there."""
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock)
        key, data = next(iter(left.items()))
        await w.v.evict(list(left))
        (old,) = pack_keys(w)
        began: list[str] = []

        def hold(op: str, asked: str) -> None:
            if op == "get" and asked == old and not began:
                began.append(asked)
                trio.from_thread.run(move)

        async def move() -> None:
            await rewritten(w)
            clock.jump(61)
            await pruned(w)

        w.remote.fail = hold
        assert await read_object(w.v, key, 0, len(data) + 1) == data
        assert began and old not in w.remote_blobs()
        assert not needs_repair(w)

    run(tmp_path, body, clock)


def test_an_object_is_named_by_rows_or_goes(tmp_path: Path) -> None:
    """The last member of a pack dies, a moment after the others were moved out of it: readers of those may be on their
    way to it."""
    clock = Clock()

    async def body(w: World) -> None:
        left = await sparse(w, clock, 16)
        (old,) = pack_keys(w)
        await unlink_object(w.v, "default", b"f0")
        clock.jump(601)
        await pruned(w)  # unreferenced from now on, in a row
        clock.jump(59)
        assert (await rewritten(w))["members"] == 3
        clock.jump(2)
        await pruned(w)  # its row goes
        assert w.rows(t.PACKS)[old].members == 0
        assert old in w.remote_blobs()
        clock.jump(60)
        await pruned(w)
        assert old not in w.remote_blobs()
        assert all(is_pack(key) for key in w.remote_blobs())
        del left[next(iter(left))]
        await check_cold(w, left)
        check_rows(w)

    run(tmp_path, body, clock)
