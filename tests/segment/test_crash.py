"""Power is lost at every named point, the disk keeps what it likes of the unsynced pages, and recovery makes it good.

Afterwards: everything flushed is there; what is there is a prefix of what was appended, byte for byte; the pointer
names a sealed, whole segment; and the stream goes on: append, seal, verify. Recovery itself dies in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.segment import pointer, recovery, repair, upgrade, writer
from aof2.engine.segment.format import Pointer, Version, encode_record
from aof2.engine.segment.model import POINTER_NAME, segment_path
from aof2.engine.segment.pointer import load_pointer, publish
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.state import StreamState
from aof2.engine.segment.upgrade import rewrite
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import STREAM_ID, Rec, create, plain, read_all, sealed, unsealed
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

DISKS = [(unit, seed) for unit in (4096, 512) for seed in range(4)]
SIZES = (1, 700, 0, 30, 1500, 4000, 9, 512, 2500)


def expected(count: int, version: int) -> list[Rec]:
    """The records of the workload, the first `count` of them."""
    out, logical = [], 0
    for i in range(count):
        size = SIZES[i % len(SIZES)] or (version == Version.V2)
        payload = bytes((i * 7 + k) % 255 + 1 for k in range(size))
        out.append(Rec(payload, logical, 1_000_000 + i, i if version == Version.V3 else 0, i % 4))
        logical += size
    return out


def write_stream(env: Env, acks: Acks, version: int) -> None:
    """Three sealed segments and an active one, in appends and batches, flushed now and then."""
    directory: Path = env.files.root  # type: ignore[attr-defined]
    records = expected(36, version)
    done = 0
    for segment_id in range(4):
        state = [records[i] for i in range(done, done + 9)]
        with create(
            directory,
            version,
            segment_id,
            env=env,
            base_offset=state[0].logical_offset,
            base_record_count=done,
            capacity=1 << 16,
            reserve_step_bytes=6000,
        ) as w:
            for i, rec in enumerate(state[:6]):
                w.append(rec.payload, timestamp_ms=rec.timestamp_ms, ext_id=rec.ext_id, flags=rec.flags)
                done += 1
                if i % 3 == 1:
                    w.flush()
                    acks.tell(["flushed", done])
            rest = state[6:]
            w.append_many(
                [r.payload for r in rest],
                timestamps_ms=[r.timestamp_ms for r in rest],
                ext_ids=[r.ext_id for r in rest],
                flags=[r.flags for r in rest],
            )
            done += 3
            if segment_id == 3:
                return
            segment = w.seal(done)
            acks.tell(["flushed", done])
            publish(env, directory, segment, coordinator_watermark=done)
            acks.tell(["published", segment_id])


def promised(crash: Crash, what: str, default: int) -> int:
    return max((int(a[1]) for a in crash.acks if a[0] == what), default=default)  # type: ignore[index]


def contents(directory: Path, state: StreamState) -> list[Rec]:
    """Every record of the stream, older segments included."""
    ids = [*state.older_ids, *(s.segment_id for s in state.sealed)]
    ids += [state.active.segment_id] if state.active else []
    assert ids == sorted(ids) and not state.damaged and not state.unsealed and state.appendable
    return [rec for i in ids for rec in read_all(segment_path(directory, i))]


def check_pointer(directory: Path, at_least: int) -> None:
    found = load_pointer(directory)
    if not isinstance(found, Pointer):
        assert at_least < 0 and not (directory / POINTER_NAME).exists()
        return
    assert found.segment_id >= at_least
    with SegmentReader(Env(), segment_path(directory, found.segment_id)) as reader:
        assert reader.sealed
        assert reader.verify().end_offset == found.durable_bytes


def check_goes_on(directory: Path, state: StreamState, records: list[Rec], version: int) -> None:
    """The recovered stream takes more, seals, and reads back whole."""
    more = Rec(b"after the crash", state.next_logical_offset, 5)
    if state.active:
        w = SegmentWriter.reopen(Env(), state.active, capacity=1 << 16)
    else:
        counts = {"base_offset": state.next_logical_offset, "base_record_count": state.total_record_count}
        w = create(directory, version, state.next_segment_id, capacity=1 << 16, **counts)
    w.append(more.payload, timestamp_ms=5)
    publish(Env(), directory, w.seal(99), coordinator_watermark=99)
    again = recover_stream(Env(), directory, stream_id=STREAM_ID)
    assert contents(directory, again) == [*records, more]
    assert again.total_record_count == len(records) + 1 and again.coordinator_watermark == 99
    assert again.warnings == ()


def check_disk(directory: Path, crash: Crash, version: int) -> None:
    # A pointer synced before the crash survives it; recovery moves it forward, never back.
    check_pointer(directory, promised(crash, "published", -1))
    state = recover_stream(Env(), directory, stream_id=STREAM_ID)
    records = contents(directory, state)
    assert records == expected(len(records), version), "not a prefix"
    assert len(records) >= promised(crash, "flushed", 0), "flushed records are gone"
    assert state.total_record_count == len(records)
    assert state.next_logical_offset == sum(len(r.payload) for r in records)
    check_pointer(directory, promised(crash, "published", -1))
    again = recover_stream(Env(), directory, stream_id=STREAM_ID)
    assert again.warnings == () and contents(directory, again) == records
    check_goes_on(directory, again, records, version)


def disks(crash: Crash, base: Path) -> Iterator[Path]:
    for unit, seed in DISKS:
        yield PowerLoss(crash, unit).disk(base / "disk", random.Random(seed))


@pytest.mark.expects_warnings
@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize("point", [*writer.CRASH_POINTS, *pointer.CRASH_POINTS, None])
def test_crash_while_writing(tmp_path: Path, point: str | None, version: int) -> None:
    workload = partial(write_stream, version=version)
    hits = hits_of(workload, tmp_path)
    cases = crash_cases(hits, (point,), 5 if version == 3 else 2) if point else [(None, 1)]
    for name, nth in cases:
        base = tmp_path / f"{nth}"
        crash = run_until_crash(workload, base, name, nth)
        assert crash.killed == (point is not None)
        for directory in disks(crash, base):
            check_disk(directory, crash, version)


def test_process_crash_loses_nothing_written(tmp_path: Path) -> None:
    """Killed without power loss: every append that returned is found."""
    workload = partial(write_stream, version=3)
    for nth in range(1, 29):
        crash = run_until_crash(workload, tmp_path / f"{nth}", "segment.append.written", nth)
        found = sum(len(read_all(p)) for p in crash.root.glob("*.seg"))
        full, rest = divmod(nth, 7)  # six appends and a batch of three make a segment
        assert found == full * 9 + rest


# -- recovery that dies


def torn_stream(directory: Path) -> None:
    """Pointer at 10; 20 sealed, not published; 25 lost its header; 27 is empty; 30 has records beyond its tear."""
    records = expected(27, 3)
    for n, segment_id in enumerate((10, 20, 30)):
        part = records[n * 9 : n * 9 + 9]
        w = create(
            directory,
            3,
            segment_id,
            base_offset=part[0].logical_offset,
            base_record_count=n * 9,
            capacity=1 << 16,
            reserve_step_bytes=6000,
        )
        for rec in part:
            w.append(rec.payload, timestamp_ms=rec.timestamp_ms, ext_id=rec.ext_id, flags=rec.flags)
            if rec is part[4]:
                tear = w.end_offset + 50
        if segment_id == 30:
            w.flush()
            w.close()
        else:
            segment = w.seal(n * 9 + 9)
            if segment_id == 10:
                publish(Env(), directory, segment)
    data = bytearray((directory / "30.seg").read_bytes())
    data[tear : tear + 20] = bytes(20)
    (directory / "30.seg").write_bytes(data)
    (directory / "25.seg").write_bytes(bytes(600) + encode_record(3, b"an orphan", 5, 5) + bytes(600))
    (directory / "27.seg").write_bytes(b"")
    (directory / "current.sealed.tmp").write_bytes(b"left over")


def recover_copy(env: Env, acks: Acks, source: Path) -> None:
    """Puts the torn stream on the disk, durably, and recovers it."""
    directory: Path = env.files.root  # type: ignore[attr-defined]
    for path in sorted(source.iterdir()):
        fd = env.files.create(directory / path.name)
        env.files.pwrite(fd, path.read_bytes(), 0)
        env.files.fsync(fd)
        env.files.close(fd)
    env.files.fsync_dir(directory)
    recover_stream(env, directory, stream_id=STREAM_ID)
    acks.tell(["recovered", 1])


@pytest.mark.expects_warnings
@pytest.mark.parametrize("point", [*recovery.CRASH_POINTS, None])
def test_crash_while_recovering(tmp_path: Path, point: str | None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torn_stream(source)
    orphans = {(source / "25.seg").read_bytes(), (source / "30.seg").read_bytes()[-3000:]}
    assert len(orphans) == 2
    workload = partial(recover_copy, source=source)
    hits = hits_of(workload, tmp_path)
    for name, nth in crash_cases(hits, (point,)) if point else [(None, 1)]:
        base = tmp_path / f"{nth}"
        crash = run_until_crash(workload, base, name, nth)
        for directory in disks(crash, base):
            state = recover_stream(Env(), directory, stream_id=STREAM_ID)
            records = contents(directory, state)
            assert records == expected(23, 3)
            check_pointer(directory, 20)
            assert (directory / "25.seg.torn").read_bytes() == (source / "25.seg").read_bytes()
            kept = (directory / "30.seg.torn").read_bytes()
            with SegmentReader(Env(), source / "30.seg") as reader:
                assert kept == reader.torn_records()
            assert sorted(p.name for p in directory.iterdir()) == [
                *("10.seg", "20.seg", "25.seg.torn", "30.seg", "30.seg.torn", "current.sealed")
            ]
            again = recover_stream(Env(), directory, stream_id=STREAM_ID)
            assert again.warnings == ()
            check_goes_on(directory, again, records, 3)


def test_every_point_of_repair_is_in_the_matrix() -> None:
    assert set(repair.CRASH_POINTS) < set(recovery.CRASH_POINTS)


def recover_unsynced(env: Env, acks: Acks, data: bytes) -> None:
    """The process died with everything in memory; recovery ran, told what it found, and then the power went."""
    directory: Path = env.files.root  # type: ignore[attr-defined]
    fd = env.files.create(directory / "7.seg")
    env.files.pwrite(fd, data, 0)
    env.files.close(fd)
    state = recover_stream(env, directory, stream_id=STREAM_ID)
    acks.tell(["found", state.total_record_count, len(state.sealed)])


@pytest.mark.expects_warnings
@pytest.mark.parametrize("tail", ["clean", "torn", "sealed"])
def test_what_recovery_tells_is_durable(tmp_path: Path, tail: str) -> None:
    if tail == "sealed":
        segment, records = sealed(tmp_path)
        data = segment.path.read_bytes()
    else:
        path, records = unsealed(tmp_path)
        with SegmentReader(Env(), path) as reader:
            end = reader.tail.end_offset
        data = path.read_bytes()[:end] + (b"torn" if tail == "torn" else b"") + bytes(500)
    crash = run_until_crash(partial(recover_unsynced, data=data), tmp_path / "run", None)
    assert crash.acks == [["found", 5, int(tail == "sealed")]]
    for directory in disks(crash, tmp_path):
        check_pointer(directory, 7 if tail == "sealed" else -1)
        assert read_all(directory / "7.seg") == records
        assert recover_stream(Env(), directory).warnings == ()


# -- rewriting that dies


def rewrite_copy(env: Env, acks: Acks, source: Path) -> None:
    directory: Path = env.files.root  # type: ignore[attr-defined]
    fd = env.files.create(directory / "7.seg")
    env.files.pwrite(fd, source.read_bytes(), 0)
    env.files.fsync(fd)
    env.files.close(fd)
    env.files.fsync_dir(directory)
    rewrite(env, directory / "7.seg", directory / "7.seg")
    acks.tell(["rewritten", 1])


@pytest.mark.expects_warnings
@pytest.mark.parametrize("point", [*writer.CRASH_POINTS, *upgrade.CRASH_POINTS, None])
def test_crash_while_rewriting(tmp_path: Path, point: str | None) -> None:
    segment, records = sealed(tmp_path, 2)
    workload = partial(rewrite_copy, source=segment.path)
    crash = run_until_crash(workload, tmp_path / "run", point)
    for directory in disks(crash, tmp_path):
        state = recover_stream(Env(), directory, stream_id=STREAM_ID)
        assert contents(directory, state) == records
        with SegmentReader(Env(), directory / "7.seg") as reader:
            assert reader.sealed and reader.header.version in ((3,) if crash.acks else (2, 3))
            assert [plain(r) for r in reader.records()] == records
