"""Sealed chunks and snapshots get to the remote, in order, through any weather; and an idle log stays as it is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from aof2.engine.catalog import writer
from aof2.engine.catalog.fold import load_index
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.reader import chunk_headers, parse_chunk
from aof2.engine.manifest.snapshot import decode_snapshot, list_snapshots
from aof2.engine.remote.errors import FencedError
from aof2.engine.remote.fence import claim, read_volume
from aof2.engine.replicate import uploader
from aof2.engine.replicate.claim import load_identity, take_claim
from aof2.engine.replicate.stream import chunk_bytes, first_run, log_state, worth_a_snapshot
from aof2.engine.replicate.uploader import ReplicateOptions

from .helpers import TENANT, Rig, Weather, content_of, keys_of, make_file, open_directory, run_rig


def test_what_is_sealed_is_on_the_remote_with_its_metadata(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1), make_file(2))
        await r.snapshot()
        await r.write(make_file(3))
        await r.write(make_file(4))
        directory = r.volume.directory(TENANT)
        headers = [h for _, h in chunk_headers(directory) if h.sealed]
        assert [h.uploaded for h in headers] == [True] * len(headers)
        found = keys_of(r.store, f"manifest/{TENANT}/")
        assert found == [f"manifest/{TENANT}/{i}.mlog" for i in range(4)] + [f"manifest/{TENANT}/snapshot_1.bin"]
        for header in headers:
            key = f"manifest/{TENANT}/{header.chunk_index}.mlog"
            data = content_of(r.store, key)
            chunk = parse_chunk(data, last=False, expect_index=header.chunk_index)
            assert chunk is not None
            assert (chunk.header.sealed, chunk.header.uploaded) == (True, False)
            assert r.store.head_blob(key).metadata == {
                "chunk_crc64": f"{header.chunk_crc64:016x}",
                "base_record": str(header.base_record),
                "record_count": str(chunk.count),
                "snapshot_id": "0" if header.chunk_index < 2 else "1",
                "writer_epoch": "1",
            }
        key = f"manifest/{TENANT}/snapshot_1.bin"
        snapshot = decode_snapshot(content_of(r.store, key))
        assert r.store.head_blob(key).metadata == {
            "snapshot_id": "1",
            "chunk_index": str(snapshot.position.chunk_index),
            "chunk_offset": str(snapshot.position.chunk_offset),
            "ordinal": str(snapshot.position.ordinal),
            "created_ms": str(snapshot.created_ms),
            "writer_epoch": "1",
        }
        state = log_state(r.catalog, TENANT)
        assert sorted(state.objects) == found
        assert (state.pending_uploads, state.pending_deletes) == ([], [])

    run_rig(tmp_path, body)


def test_a_snapshot_waits_for_the_chunk_it_lies_in(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        await r.snapshot()  # in a chunk that holds nothing but bookkeeping: it stays open
        assert keys_of(r.store, f"manifest/{TENANT}/snap") == []
        await r.write(make_file(2))
        assert keys_of(r.store, f"manifest/{TENANT}/snap") == [f"manifest/{TENANT}/snapshot_1.bin"]

    run_rig(tmp_path, body)


def test_an_idle_log_adds_nothing(tmp_path: Path) -> None:
    """Nothing is due, nobody waits for a time: what does not come from outside does not come."""

    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        await r.snapshot()
        await r.write(make_file(2))
        await r.snapshot()
        for _ in range(3):
            before = (r.local_bytes(), r.store.writes, r.writer.groups, keys_of(r.store))
            r.replicator.kick()
            r.replicator.sealed(TENANT)
            await r.settle()
            await trio.to_thread.run_sync(r.writer.flush)
            assert r.volume.target.due_s() is None
            assert r.replicator.idle
            groups = before[2]
            assert (r.local_bytes(), r.store.writes, keys_of(r.store)) == (before[0], before[1], before[3])
            assert r.writer.groups - groups <= 4  # flushes alone: settling asks for some, too
        assert not worth_a_snapshot(r.volume.directory(TENANT))

    run_rig(tmp_path, body)
    # Opening and closing it is no reason either.
    store = open_directory(tmp_path)
    before = keys_of(store)

    async def again(r: Rig) -> None:
        local = r.local_bytes()
        await r.settle()
        assert r.local_bytes() == local

    run_rig(tmp_path, again)
    assert keys_of(store) == before


def test_an_outage_is_sat_out_without_filling_the_log(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        r.store.down = True
        for i in range(2, 8):
            await trio.to_thread.run_sync(lambda i=i: r.writer.call(TENANT, make_file(i), sync=True))
        while r.replicator.failures < 30:
            await trio.sleep(0.001)
        records = [rec for rec in _records(r) if rec.type == "UploadFailed"]
        assert len(records) == 1  # said once, not at every try
        r.store.down = False
        await r.settle()
        headers = [h for _, h in chunk_headers(r.volume.directory(TENANT)) if h.sealed]
        assert len(headers) >= 2
        assert all(h.uploaded for h in headers)
        assert not log_state(r.catalog, TENANT).pending_uploads

    run_rig(tmp_path, body)


def test_chunks_go_up_in_order(tmp_path: Path) -> None:
    put: list[str] = []

    class Noting(Weather):
        def put_if_absent(self, key: str, *args: object, **kw: object) -> object:
            put.append(key)
            return self.__getattr__("put_if_absent")(key, *args, **kw)

    store = Noting(open_directory(tmp_path))
    store.down = True

    async def body(r: Rig) -> None:
        for i in range(60):
            await trio.to_thread.run_sync(lambda i=i: r.writer.call(TENANT, make_file(i), sync=True))
        store.down = False
        await r.settle()

    run_rig(tmp_path, body, store=store)
    chunks = [int(key.split("/")[2].removesuffix(".mlog")) for key in put if key.startswith(f"manifest/{TENANT}/")]
    assert len(chunks) > 3
    assert chunks == list(range(len(chunks)))


def _records(r: Rig) -> list[object]:
    from aof2.engine.manifest.reader import Stream

    return list(Stream(r.volume.directory(TENANT)).records())


@pytest.mark.parametrize("failing", range(1, 8))
def test_any_write_may_fail(tmp_path: Path, failing: int) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        r.store.fail_writes = failing
        await r.write(make_file(2))
        await r.snapshot()
        await r.write(make_file(3))
        assert len(keys_of(r.store, f"manifest/{TENANT}/")) == 4

    run_rig(tmp_path, body)


@pytest.mark.expects_warnings
def test_denied_is_said_once_and_asked_again_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def errors() -> int:
        return len([rec for rec in caplog.records if rec.levelno == logging.ERROR])

    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        there = r.replicator.replication.there(TENANT)
        r.store.denied = True
        await trio.to_thread.run_sync(lambda: r.writer.call(TENANT, make_file(2), sync=True))
        while not errors():
            await trio.sleep(0.001)
        asked = sum(r.store.calls.values())
        while sum(r.store.calls.values()) < asked + 3:
            await trio.sleep(0.001)
        assert errors() == 1
        (lag,) = [one for one in r.replicator.replication.lags({}) if one.stream_id == TENANT]
        assert (lag.there, lag.refused) == (there, True)
        assert lag.here > lag.there
        assert "denied" in lag.stands_because
        r.store.denied = False
        await r.settle()
        assert r.replicator.replication.standing([TENANT]) is None
        assert not log_state(r.catalog, TENANT).pending_uploads

    run_rig(tmp_path, body)


def test_a_remote_away_at_start_is_claimed_later(tmp_path: Path) -> None:
    store = Weather(open_directory(tmp_path))
    store.down = True

    async def body(r: Rig) -> None:
        for i in range(3):
            await trio.to_thread.run_sync(lambda i=i: r.writer.call(TENANT, make_file(i), sync=True))
        while r.replicator.failures < 3:
            await trio.sleep(0.001)
        assert r.replicator.fence is None
        assert not any(rec.type.startswith("Upload") for rec in _records(r))
        store.down = False
        await r.settle()
        assert f"manifest/{TENANT}/0.mlog" in keys_of(store)

    run_rig(tmp_path, body, store=store)


def test_retention_follows_uploads_and_snapshots(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        for i in range(8):
            await r.write(make_file(i))
        assert len(chunk_headers(r.volume.directory(TENANT))) >= 8
        await r.snapshot()
        await r.write(make_file(9))
        await r.snapshot()
        await r.snapshot()
        assert len(chunk_headers(r.volume.directory(TENANT))) <= 4
        assert list_snapshots(r.volume.directory(TENANT)) == [2, 3]

    run_rig(tmp_path, body)


def test_the_remote_keeps_two_snapshots_and_bundles_chunks(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        for i in range(14):
            await r.write(make_file(i))
            if i % 3 == 2:
                await r.snapshot()
        found = keys_of(r.store, f"manifest/{TENANT}/")
        bundles = [key for key in found if key.endswith(".mlogs")]
        assert bundles == [f"manifest/{TENANT}/bundle-0-3.mlogs", f"manifest/{TENANT}/bundle-4-7.mlogs"]
        assert not any(f"manifest/{TENANT}/{i}.mlog" in found for i in range(8))
        assert len([key for key in found if "snapshot" in key]) == 2
        state = log_state(r.catalog, TENANT)
        assert sorted(state.objects) == found
        assert (state.pending_uploads, state.pending_deletes) == ([], [])
        with r.catalog.view() as view:
            index = load_index(view, TENANT)
        assert LOG_SEGMENT_ID not in index.entries

    run_rig(tmp_path, body, options=ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=4))


def test_a_burst_is_held_back_while_the_remote_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log may grow by what one snapshot takes, not by what the burst brings."""
    monkeypatch.setattr(uploader, "BRAKE_FROM_BYTES", 64 << 10)
    monkeypatch.setattr(uploader, "BRAKE_FULL_BYTES", 128 << 10)
    monkeypatch.setattr(uploader, "BRAKE_S_MAX", 0.05)
    monkeypatch.setattr(writer, "BRAKE_EVERY_BYTES", 128)
    most, braked_s = 0, 0.0

    async def body(r: Rig) -> None:
        directory = r.volume.directory(TENANT)
        done = False

        def burst() -> None:
            for start in range(0, 2000, 10):
                futures = [r.writer.submit(TENANT, make_file(i), sync=True) for i in range(start, start + 10)]
                for future in futures:
                    future.result()

        async def snapshots() -> None:
            while not done:
                await trio.to_thread.run_sync(r.snapshot_now)
                r.replicator.snapshot_taken(TENANT)
                await trio.sleep(0.3)

        async def watch() -> None:
            nonlocal most, braked_s
            while not done:
                most = max(most, chunk_bytes(directory))
                braked_s = max(braked_s, r.replicator.brake_s())
                await trio.sleep(0.005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(snapshots)
            nursery.start_soon(watch)
            with trio.fail_after(60):
                await trio.to_thread.run_sync(burst)
            done = True
        await r.settle()
        await r.snapshot()
        assert r.replicator.brake_s() == 0

    run_rig(tmp_path, body)
    assert braked_s > 0
    assert 0 < most < 192 << 10


def test_a_remote_that_is_away_holds_nobody_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "BRAKE_FROM_BYTES", 0)
    monkeypatch.setattr(uploader, "BRAKE_FULL_BYTES", 1)

    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        assert r.replicator.brake_s() == uploader.BRAKE_S_MAX
        r.store.down = True
        r.replicator.sealed(TENANT)
        await trio.to_thread.run_sync(lambda: r.writer.call(TENANT, make_file(2), sync=True))
        while not r.replicator.failures:
            await trio.sleep(0.001)
        assert r.replicator.brake_s() == 0
        started_s = trio.current_time()
        for i in range(3, 43):
            await trio.to_thread.run_sync(lambda i=i: r.writer.call(TENANT, make_file(i), sync=True))
            assert r.replicator.brake_s() == 0
        assert trio.current_time() - started_s < 40 * uploader.BRAKE_S_MAX / 2
        r.store.down = False
        await r.settle()
        assert r.replicator.brake_s() > 0
        monkeypatch.setattr(uploader, "STILL_S", -1.0)  # nothing moves: a request hangs, say
        assert r.replicator.brake_s() == 0

    run_rig(tmp_path, body)


def test_runs() -> None:
    assert first_run([], 2) is None
    assert first_run([1, 2], 2) is None
    assert first_run([1, 2, 3], 2) == (1, 2)
    assert first_run([1, 3, 4, 6, 7, 8, 9], 3) == (6, 8)


# -- one writer --------------------------------------------------------------------------------------------------


@pytest.mark.expects_warnings
def test_a_second_writer_makes_the_first_read_only(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1))
        before = keys_of(r.store)
        second = claim(r.env, open_directory(tmp_path))
        await trio.to_thread.run_sync(lambda: r.writer.call(TENANT, make_file(2), sync=True))
        while not r.fenced:
            await trio.sleep(0.001)
        await r.settle()  # returns: there is nothing to wait for
        assert "another writer took the volume over" in r.fenced[0]
        assert len(r.fenced) == 1
        assert keys_of(r.store) == before
        found = read_volume(r.store)
        assert found is not None
        assert found[0].writer_id == second.record.writer_id
        writes = r.store.writes
        await trio.to_thread.run_sync(lambda: r.writer.call(TENANT, make_file(3), sync=True))
        r.replicator.sealed(TENANT)
        r.replicator.kick()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert r.store.writes == writes

    run_rig(tmp_path, body)


@pytest.mark.expects_warnings
def test_an_empty_folder_does_not_take_a_volume_over(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1))

    run_rig(tmp_path, body)
    (tmp_path / "state").rename(tmp_path / "old")
    store = open_directory(tmp_path)
    before = read_volume(store)

    async def other(r: Rig) -> None:
        while not r.fenced:
            await trio.sleep(0.001)
        assert "aof2 restore" in r.fenced[0]

    run_rig(tmp_path, other)
    assert read_volume(store) == before


def test_a_claim_that_was_never_remembered_is_taken_again(tmp_path: Path) -> None:
    from aof2.engine.env import Env

    env, store = Env(), open_directory(tmp_path)
    claim(env, store)
    (tmp_path / "state").mkdir()
    fence = take_claim(env, store, tmp_path / "state")
    assert fence.epoch == 2
    known = load_identity(tmp_path / "state")
    assert known is not None and known.volume_uuid == fence.record.volume_uuid
    (tmp_path / "other").mkdir()
    fence.put("manifest/0/0.mlog", b"x")
    with pytest.raises(FencedError, match="belongs to none"):
        take_claim(env, store, tmp_path / "other")
