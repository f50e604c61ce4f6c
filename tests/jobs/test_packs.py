"""Packs: small objects go up together, and each of them lives, dies and is mended alone."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest

from aof2.engine.blob.pack import read_directory
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import JobState, ObjectState, PackRow
from aof2.engine.jobs import prune, queue
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.keys import is_pack
from aof2.engine.tiering import packs
from aof2.engine.verify.findings import Kind, Severity
from aof2.engine.verify.run import verify as verify_volume
from tests.engine.helpers import backing_path, object_row, read_object, small_settings, unlink_object

from .helpers import CHUNK, TENANT, Clock, World, run_world
from .test_prune import rewrite

Key = tuple[int, int, int]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def put_some(w: World, count: int, *, first: int = 0) -> dict[Key, bytes]:
    data = [content(first + i, 40 + 37 * i) for i in range(count)]
    return {await w.put(f"f{first + i}", piece): piece for i, piece in enumerate(data)}


async def published(w: World, count: int, **where: int) -> dict[Key, bytes]:
    files = await put_some(w, count, **where)
    await w.jobs.checkpoint(TENANT)
    await w.until(lambda: not w.jobs.runner.running)
    return files


async def check_cold(w: World, files: dict[Key, bytes]) -> None:
    await w.v.evict(list(files))
    for key, data in files.items():
        assert await read_object(w.v, key, 0, len(data) + 1) == data


def pack_keys(w: World) -> list[str]:
    return [key for key in w.remote_blobs() if is_pack(key)]


def live(w: World) -> list[str]:
    return sorted({blob.key for blob in w.rows(t.BLOBS).values()})


def check_rows(w: World) -> None:
    """Packs count their blobs, and the remote has what rows name."""
    counted: dict[str, tuple[int, int]] = {}
    for blob in w.rows(t.BLOBS).values():
        if is_pack(blob.key):
            members, size = counted.get(blob.key, (0, 0))
            counted[blob.key] = (members + 1, size + blob.stored_bytes)
    packed = {key: (row.members, row.member_bytes) for key, row in w.rows(t.PACKS).items()}
    assert {key: count for key, count in packed.items() if count[0]} == counted
    assert w.remote_blobs() == sorted({*live(w), *packed})


def check_clean(root: Path) -> None:
    report = verify_volume(small_settings(root), deep_remote=True)
    # The task that deletes what lost its last name does not run here.
    fine = (Kind.LOCAL_ORPHAN,)
    bad = [f for f in report.findings if f.severity is not Severity.NOTE and f.kind not in fine]
    assert not bad, bad


def pending_uploads(w: World) -> set[tuple[int, str]]:
    with w.v.catalog.view() as view:
        return set(load_index(view, TENANT).pending_uploads)


def test_small_objects_travel_together(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await put_some(w, 20)
        files[await w.put("empty", b"")] = b""
        files[await w.put("twin", content(3, 40 + 37 * 3))] = content(3, 40 + 37 * 3)
        large = await w.put("large", content(99, CHUNK + 7))
        assert await w.jobs.checkpoint(TENANT) == 23
        (job,) = w.all_jobs()
        await w.until_state(job.job_id, JobState.DONE)
        assert (w.job(job.job_id).done, w.job(job.job_id).total) == (23, 23)
        assert w.remote.count("put") == 3  # a pack, two chunks
        (key,) = pack_keys(w)
        assert all(object_row(w.v, k).state == ObjectState.PUBLISHED for k in (*files, large))
        size = w.v.remote.head_blob(key).size  # type: ignore[union-attr]
        members = read_directory(partial(w.v.remote.get_range, key), size, tenant="default")
        assert [m.chunk_id for m in members] == sorted(m.chunk_id for m in members)
        assert len(members) == 20
        assert w.rows(t.PACKS) == {key: PackRow(20, sum(m.stored_len for m in members), size)}
        assert not pending_uploads(w)
        await check_cold(w, files)
        check_rows(w)

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_what_came_is_recorded_together(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await published(w, 12)
        await check_cold(w, files)
        await w.v.hydrator.settle()
        chunk_ids = [object_row(w.v, key).chunks[0] for key in files]
        here = w.rows(t.RESIDENCY)
        assert all(here[chunk_id].mask == 1 for chunk_id in chunk_ids)
        assert all(object_row(w.v, key).backing is not None for key in files)
        assert not w.v.handles.dirty()
        assert w.quota_is_even()
        gets = w.remote.count("get")
        assert gets == 2  # one member, then its neighbours
        await w.v.evict(list(files))

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_a_few_go_alone(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await published(w, packs.MEMBERS_MIN - 1)
        assert not pack_keys(w)

    run_world(tmp_path, body)


def test_a_pack_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES_MAX", 3000)

    async def body(w: World) -> None:
        files = await published(w, 12)
        assert 2 <= len(pack_keys(w)) < 12
        await check_cold(w, files)
        check_rows(w)

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_known_content_is_not_packed_again(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await published(w, 8)
        for i in range(8):
            await w.put(f"again{i}", content(i, 40 + 37 * i))
        files = await published(w, 5, first=100)
        assert len(pack_keys(w)) == 2
        assert sum(row.members for row in w.rows(t.PACKS).values()) == 13
        assert [blob.refs for blob in w.rows(t.BLOBS).values()].count(2) == 8
        await check_cold(w, files)
        check_rows(w)

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_a_member_that_changed_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(w: World) -> None:
        files = await put_some(w, 8)
        (bad, data), *rest = files.items()
        backing_path(w.v, bad).write_bytes(bytes(len(data)))
        gone = rest.pop()[0]
        os.unlink(backing_path(w.v, gone))
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        await w.until_state(job.job_id, JobState.FAILED)
        assert object_row(w.v, bad).state == object_row(w.v, gone).state == ObjectState.SEALED
        assert all(object_row(w.v, key).state == ObjectState.PUBLISHED for key, _ in rest)
        (row,) = w.rows(t.PACKS).values()
        assert row.members == 6
        await check_cold(w, dict(rest))

    run_world(tmp_path, body)


def test_removed_and_rewritten_while_it_is_on_its_way(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        files = await put_some(w, 8)
        w.remote.gate.clear()
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        await w.until_state(job.job_id, JobState.RUNNING)
        await w.until(lambda: pending_uploads(w))
        gone = list(files)[:3]
        for i in range(len(gone)):
            await unlink_object(w.v, "default", f"f{i}".encode())
        w.remote.gate.set()
        await w.until_state(job.job_id, JobState.DONE)
        (row,) = w.rows(t.PACKS).values()
        assert row.members == 5
        left = {key: data for key, data in files.items() if key not in gone}
        await check_cold(w, left)
        await w.v.hydrator.settle()  # what happens to a chunk puts off what is cleared away of it
        clock.jump(3600)
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        assert not pending_uploads(w)
        check_rows(w)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    check_clean(tmp_path)


def test_all_members_gone_before_the_commit_queues_the_pack(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        files = await put_some(w, 5)
        w.remote.gate.clear()
        await w.jobs.plan(TENANT)
        await w.until(lambda: pending_uploads(w))
        for i in range(len(files)):
            await unlink_object(w.v, "default", f"f{i}".encode())
        w.remote.gate.set()
        await w.until(lambda: not w.jobs.runner.running)
        clock.jump(3600)
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        assert not w.remote_blobs()
        assert not pending_uploads(w)
        check_rows(w)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    check_clean(tmp_path)


def test_the_remote_is_away_in_the_middle(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await put_some(w, 10)
        failures = iter([RemoteUnavailableError("away")])
        w.remote.fail = lambda op, key: next(failures, None) if op == "put" else None
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        await w.until(lambda: w.job(job.job_id).attempts == 1)
        assert len(w.rows(t.UNPUBLISHED)) == 10
        assert len({key for _, key in pending_uploads(w)}) == 1
        await w.jobs.runner.retry(TENANT, job.job_id)
        await w.until_state(job.job_id, JobState.DONE)
        assert len(pack_keys(w)) == 1
        assert not pending_uploads(w)
        await check_cold(w, files)

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_a_pack_goes_with_its_last_member(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        files = await published(w, 6)
        (key,) = pack_keys(w)
        for i in range(len(files)):
            await w.v.hydrator.settle()
            await unlink_object(w.v, "default", f"f{i}".encode())
            clock.jump(601)
            await w.wait(TENANT, await w.jobs.prune(TENANT))
            clock.jump(61)
            report = prune.forecast(w.v.catalog, TENANT, clock.now_ms(), w.jobs.retention)
            assert report.blobs == 1
            await w.wait(TENANT, await w.jobs.prune(TENANT))
            left = {k: v for k, v in files.items() if k not in list(files)[: i + 1]}
            assert (key in w.remote_blobs()) == bool(left)
            await check_cold(w, left)
            check_rows(w)
        assert not w.rows(t.BLOBS)
        with w.v.catalog.view() as view:
            assert not load_index(view, TENANT).pending_deletes

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    check_clean(tmp_path)


@pytest.mark.expects_warnings
def test_a_damaged_member_is_that_members_damage(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await published(w, 6)
        (key,) = pack_keys(w)
        (bad, data), (lost, _), *rest = files.items()
        await w.v.evict([lost])
        for one in (bad, lost):
            chunk = w.rows(t.CHUNKS)[object_row(w.v, one).chunks[0]]
            path = next(tmp_path.rglob(key))
            raw = bytearray(path.read_bytes())
            raw[chunk.offset] ^= 1
            path.write_bytes(raw)
        job = await w.jobs.verify(TENANT)
        await w.until(lambda: w.job(job).state == JobState.FAILED)
        report = queue.report(w.job(job))
        assert (report["damaged"], report["rebuilt"], report["lost"], report["good"]) == (2, 1, 1, 4)
        chunk = w.rows(t.CHUNKS)[object_row(w.v, bad).chunks[0]]
        assert not is_pack(chunk.key) and chunk.offset == 0
        (row,) = w.rows(t.PACKS).values()
        assert row.members == 5
        assert w.remote_blobs() == live(w)
        await check_cold(w, {bad: data, **dict(rest)})

    run_world(tmp_path, body)


@pytest.mark.parametrize("harm", ["member", "cut", "gone"])
def test_repair_from_what_is_here(tmp_path: Path, harm: str) -> None:
    """Offline: what is damaged or gone is put again from local bytes, and what is not here is told."""
    files: dict[Key, bytes] = {}
    away: list[Key] = []

    async def fill(w: World) -> None:
        files.update(await published(w, 6))
        away.append(next(reversed(files)))
        if harm == "member":
            await w.v.evict(away)

    run_world(tmp_path, fill)
    (pack,) = (tmp_path / "remote").rglob("pack-*.blob")
    raw = bytearray(pack.read_bytes())
    if harm == "gone":
        pack.unlink()
    else:
        raw[3] ^= 1
        pack.write_bytes(raw if harm == "member" else raw[:200])
    report = verify_volume(small_settings(tmp_path), deep_remote=harm != "gone", repair=True)
    bad = [f for f in report.findings if f.severity is not Severity.NOTE]
    assert len(bad) == {"member": 1, "cut": 6, "gone": 6}[harm], bad
    assert all(f.repaired for f in bad), bad

    async def look(w: World) -> None:
        await check_cold(w, files)
        moved = [c for c in w.rows(t.CHUNKS).values() if not is_pack(c.key)]
        assert len(moved) == (1 if harm == "member" else 6)
        (row,) = w.rows(t.PACKS).values()
        assert row.members == (5 if harm == "member" else 0)
        # Who was about to read a member there, or restores from a log that is behind, may still look for it.
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        assert [path.name for path in (tmp_path / "remote").rglob("pack-*.blob")] == (
            [] if harm == "gone" else [pack.name]
        )

    run_world(tmp_path, look)
    check_clean(tmp_path)
    clock = Clock()
    clock.offset_ms = time.time_ns() // 1_000_000 + 61_000

    async def later(w: World) -> None:
        await w.wait(TENANT, await w.jobs.prune(TENANT))
        assert bool(w.rows(t.PACKS)) == bool(pack_keys(w)) == (harm == "member")
        await check_cold(w, files)
        check_rows(w)

    run_world(tmp_path, later, clock=clock.mock, env=clock.env())
    check_clean(tmp_path)


def test_nothing_is_lost_and_nothing_kept(tmp_path: Path) -> None:
    """Random creates, rewrites, removals and evictions against a model, with garbage collection in between."""
    clock = Clock()
    rng = random.Random(7)

    async def body(w: World) -> None:
        model: dict[str, tuple[Key, bytes]] = {}
        made = 0
        for _ in range(12):
            for _ in range(rng.randrange(1, 12)):
                name, made = f"f{made}", made + 1
                data = content(rng.randrange(40), rng.randrange(2000)) if rng.random() < 0.8 else b""
                model[name] = (await w.put(name, data), data)
            for name in rng.sample(sorted(model), min(len(model), rng.randrange(6))):
                key, _ = model[name]
                data = content(1000 + made + len(model), rng.randrange(1, 900))
                if object_row(w.v, key).state == ObjectState.PUBLISHED:
                    model[name] = (await rewrite(w, key, data), data)
            await w.jobs.checkpoint(TENANT)
            await w.until(lambda: not w.jobs.runner.running)
            for name in rng.sample(sorted(model), min(len(model), rng.randrange(8))):
                del model[name]
                await unlink_object(w.v, "default", name.encode())
            await w.v.evict([key for key, _ in model.values() if rng.random() < 0.5])
            clock.jump(rng.choice((1, 61, 700)))
            if rng.random() < 0.7:
                await w.wait(TENANT, await w.jobs.prune(TENANT))
            for key, data in model.values():
                assert await read_object(w.v, key, 0, len(data) + 1) == data
        for _ in range(3):
            await w.v.hydrator.settle()
            clock.jump(3600)
            await w.wait(TENANT, await w.jobs.prune(TENANT))
        await check_cold(w, dict(model.values()))
        check_rows(w)
        assert not pending_uploads(w)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    check_clean(tmp_path)
