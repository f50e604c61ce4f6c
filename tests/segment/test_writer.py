"""SegmentWriter: what it writes, what it refuses, and what it does when the disk does not play along."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, FatalIOError, LimitError, ReadOnlyError
from aof2.engine.segment import format as fmt
from aof2.engine.segment.model import ActiveSegment
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import FailingFiles, Rec, append, create, read_all, samples, sealed, unsealed

VERSIONS = [2, 3]
NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("version", VERSIONS)
def test_round_trip(tmp_path: Path, version: int) -> None:
    segment, records = sealed(tmp_path, version)
    assert segment.path == tmp_path / "7.seg"
    assert read_all(segment.path) == records
    with SegmentReader(Env(), segment.path) as reader:
        assert reader.sealed
        tail = reader.verify()
        assert reader.sealed_segment() == segment
    assert (tail.record_count, tail.next_logical_offset) == (5, 1110)
    assert segment.footer.flags == 5 and segment.footer.ext_id == 9


@pytest.mark.parametrize("version", VERSIONS)
def test_every_byte_of_a_file(tmp_path: Path, version: int) -> None:
    segment, records = sealed(tmp_path, version)
    header = fmt.encode_header(fmt.SegmentHeader(version, 77, 7, records[0].timestamp_ms, 1000, 0, 8192, 9))
    body = b"".join(
        fmt.encode_record(version, r.payload, r.logical_offset, r.timestamp_ms, r.ext_id, r.flags) for r in records
    )
    data = segment.path.read_bytes()
    assert data == header + body + fmt.encode_footer(segment.footer)
    assert len(data) == segment.durable_bytes + (40 if version == 2 else 96)


@pytest.mark.parametrize("version", VERSIONS)
def test_append_many_writes_the_same_bytes(tmp_path: Path, version: int) -> None:
    payloads = [b"a" * n for n in (1, 200, 3)]
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    with create(tmp_path / "one", version) as one, create(tmp_path / "many", version) as many:
        for payload, ts_ms in zip(payloads, (5, 6, 7), strict=True):
            one.append(payload, timestamp_ms=ts_ms)
        assert many.append_many(payloads, timestamps_ms=[5, 6, 7]) == (0, fmt.HEADER_BYTES[fmt.Version(version)], 0)
        a, b = one.seal(1), many.seal(1)
    assert a.path.read_bytes() == b.path.read_bytes()


def test_header_comes_with_the_first_record(tmp_path: Path) -> None:
    env = Env(now_ms=lambda: 123)
    writer = create(tmp_path, env=env, base_offset=50)
    writer.flush()
    assert writer.path.stat().st_size == 0
    writer.set_ext_id(4)
    assert writer.append(b"x", logical_offset=60) == (0, 96, 60)
    assert writer.append_many([]) == (1, writer.end_offset, 61)
    with pytest.raises(ReadOnlyError):
        writer.set_ext_id(5)
    segment = writer.seal(0)
    assert (segment.header.creation_ts_ms, segment.header.base_offset, segment.header.ext_id) == (123, 60, 4)
    assert segment.footer.ext_id == 4


def test_segment_without_records(tmp_path: Path) -> None:
    writer = create(tmp_path)
    with pytest.raises(ReadOnlyError):
        writer.seal(0)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_seal_once(tmp_path: Path) -> None:
    writer = create(tmp_path)
    writer.append(b"x")
    segment = writer.seal(8, flush_failure=True)
    assert (segment.footer.coordinator_watermark, segment.footer.flush_failure) == (8, True)
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o400
    for call in (lambda: writer.seal(9), lambda: writer.append(b"y"), writer.flush, lambda: writer.append_many([b"y"])):
        with pytest.raises(ReadOnlyError, match="sealed"):
            call()
    with pytest.raises(ReadOnlyError):
        writer.discard()


@pytest.mark.parametrize("version", VERSIONS)
def test_capacity(tmp_path: Path, version: int) -> None:
    v = fmt.Version(version)
    fixed = fmt.HEADER_BYTES[v] + fmt.FOOTER_BYTES[v]
    capacity = fixed + 2 * fmt.RECORD_BYTES[v] + 10
    writer = create(tmp_path, version, capacity=capacity)
    assert writer.room_for(10, 2) and not writer.room_for(11, 2)
    with pytest.raises(LimitError):
        writer.append_many([b"x" * 6, b"y" * 5])
    assert writer.record_count == 0
    writer.append(b"x" * 6)
    with pytest.raises(LimitError):
        writer.append(b"y" * 5)
    writer.append(b"y" * 4)
    assert not writer.room_for(0)
    assert writer.seal(0).path.stat().st_size == capacity
    assert len(read_all(writer.path)) == 2


def test_refused_requests(tmp_path: Path) -> None:
    writer = create(tmp_path)
    writer.append(b"abc", timestamp_ms=1)
    for kw in (
        {"logical_offset": 2},
        {"logical_offset": 2**64 - 1},
        {"timestamp_ms": -1},
        {"timestamp_ms": 2**63},
        {"ext_id": -1},
        {"ext_id": 2**64},
    ):
        with pytest.raises(LimitError):
            writer.append(b"xy", **kw)
    with pytest.raises(ValueError, match="flags"):
        writer.append(b"x", flags=4)
    with pytest.raises(ValueError, match="flags"):
        writer.seal(0, flags=8)
    with pytest.raises(LimitError):
        writer.seal(-1)
    with pytest.raises(ValueError, match="zip"):
        writer.append_many([b"x"], timestamps_ms=[])
    assert writer.record_count == 1
    with pytest.raises(FileExistsError):
        create(tmp_path)
    for capacity in (0, 228, 2**32):
        with pytest.raises(LimitError):
            create(tmp_path, segment_id=8, capacity=capacity)


def test_v2_has_no_empty_records_and_no_ext_ids(tmp_path: Path) -> None:
    with create(tmp_path, 2) as writer:
        for payload, ext_id in ((b"", 0), (b"x", 1)):
            with pytest.raises(LimitError):
                writer.append(payload, ext_id=ext_id)
            with pytest.raises(LimitError):
                writer.append_many([b"ok", payload], ext_ids=[0, ext_id])
        assert writer.record_count == 0


def test_unsealed_file_ends_in_zeros(tmp_path: Path) -> None:
    with create(tmp_path, reserve_step_bytes=1) as writer:
        for n in range(40):
            writer.append(b"x" * n)
            assert writer.path.read_bytes()[writer.end_offset :] == bytes(96)


@pytest.mark.parametrize("operation", ["preallocate", "pwrite"])
@pytest.mark.parametrize("already", [0, 3])
def test_no_room_leaves_the_writer_as_it_was(tmp_path: Path, operation: str, already: int) -> None:
    files = FailingFiles()
    writer = create(tmp_path, env=Env(files=files, now_ms=lambda: 1))
    for _ in range(already):
        writer.append(b"before")
    before = (writer.end_offset, writer.crc64, writer.record_count, writer.next_logical_offset, writer.header)
    files.fail[operation] = NO_ROOM
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            writer.append(b"x" * 1000)
        with pytest.raises(OSError, match="No space"):
            writer.append_many([b"x" * 600, b"y" * 600])
    now = (writer.end_offset, writer.crc64, writer.record_count, writer.next_logical_offset, writer.header)
    assert now == before
    assert not any(writer.path.read_bytes()[writer.end_offset :])
    files.fail.clear()
    writer.append(b"after")
    segment = writer.seal(1)
    assert [r.payload for r in read_all(segment.path)] == [b"before"] * already + [b"after"]


@pytest.mark.parametrize("operation", ["preallocate", "pwrite", "truncate"])
def test_no_room_for_the_footer(tmp_path: Path, operation: str) -> None:
    path, records = unsealed(tmp_path)
    files = FailingFiles()
    with SegmentReader(Env(), path) as reader:
        t = reader.tail
        active = ActiveSegment(
            path, reader.header, t.end_offset, t.crc64, t.record_count, t.next_logical_offset, t.last_record_ts_ms
        )
    writer = SegmentWriter.reopen(Env(files=files), active)
    files.fail[operation] = NO_ROOM
    if operation == "truncate":
        with pytest.raises(FatalIOError):  # it can't be undone either
            writer.seal(1)
        with pytest.raises(ReadOnlyError):
            writer.append(b"x")
        return
    with pytest.raises(OSError, match="No space"):
        writer.seal(1)
    assert read_all(path) == records
    files.fail.clear()
    writer.append(b"more", timestamp_ms=3)
    writer.seal(1)
    assert read_all(path) == [*records, Rec(b"more", 1110, 3)]


@pytest.mark.parametrize("operation", ["fsync", "fsync_dir"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), FatalIOError("fsync failed")])
@pytest.mark.parametrize("step", ["flush", "seal"])
def test_failed_fsync_is_final(tmp_path: Path, operation: str, error: Exception, step: str) -> None:
    files = FailingFiles()
    writer = create(tmp_path, env=Env(files=files))
    writer.append(b"x")
    files.fail[operation] = error  # type: ignore[assignment]
    with pytest.raises(FatalIOError):
        writer.flush() if step == "flush" else writer.seal(1)
    files.fail.clear()
    calls = len(files.calls)
    for call in (writer.flush, lambda: writer.seal(1), lambda: writer.append(b"y")):
        with pytest.raises(ReadOnlyError, match="fsync"):
            call()
    assert len(files.calls) == calls, "it must not be tried again"
    writer.close()
    with SegmentReader(Env(), writer.path) as reader:
        assert not reader.sealed


def test_failed_fsync_of_the_footer(tmp_path: Path) -> None:
    files = FailingFiles()
    writer = create(tmp_path, env=Env(files=files))
    writer.append(b"x")
    writer.flush()
    files.fail["fsync"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(FatalIOError):
        writer.seal(1)
    with pytest.raises(ReadOnlyError):
        writer.seal(1)


def test_flush_syncs_once(tmp_path: Path) -> None:
    files = FailingFiles()
    with create(tmp_path, env=Env(files=files)) as writer:
        writer.append(b"x")
        for _ in range(3):
            writer.flush()
        assert [c for c in files.calls if c.startswith("fsync")] == ["fsync", "fsync_dir", "fsync"]
        assert writer.flushed_offset == writer.end_offset


@pytest.mark.parametrize("version", VERSIONS)
def test_reopen_goes_on(tmp_path: Path, version: int) -> None:
    path, records = unsealed(tmp_path, version)
    with SegmentReader(Env(), path) as reader:
        t = reader.tail
        active = ActiveSegment(
            path, reader.header, t.end_offset, t.crc64, t.record_count, t.next_logical_offset, t.last_record_ts_ms
        )
    path.chmod(0o400)
    writer = SegmentWriter.reopen(Env(), active)
    more = [r._replace(logical_offset=r.logical_offset + 200) for r in samples(version)]
    for rec in more:
        append(writer, rec)
    segment = writer.seal(3)
    with SegmentReader(Env(), path) as reader:
        reader.verify()
    assert read_all(path) == records + more and segment.record_count == 10


def test_reopen_refuses_another_file(tmp_path: Path) -> None:
    path, _ = unsealed(tmp_path)
    with SegmentReader(Env(), path) as reader:
        header, end = reader.header, reader.tail.end_offset
    with pytest.raises(CorruptError):
        SegmentWriter.reopen(Env(), ActiveSegment(path, header, 10**6, 0, 5, 1110, 0))
    other = ActiveSegment(path, fmt.SegmentHeader(3, 1, 7, 0, max_size=8192), end, 0, 5, 1110, 0)
    with pytest.raises(CorruptError):
        SegmentWriter.reopen(Env(), other)
