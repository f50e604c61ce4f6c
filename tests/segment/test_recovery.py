"""recover_stream, state by state: pointers good and bad, torn tails, damage, and what it must leave alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from aof2.engine.env import Env, Files
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment import repair
from aof2.engine.segment.format import Pointer, encode_pointer, encode_record
from aof2.engine.segment.model import POINTER_NAME
from aof2.engine.segment.pointer import load_pointer, publish, store_pointer
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.state import StreamState, WarningKind
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import STREAM_ID, create, read_all

W = WarningKind


class OpenedFiles(Files):
    """Remembers which files were opened for reading."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open_ro(self, path: Path) -> int:
        self.opened.append(path.name)
        return super().open_ro(path)


class Stream:
    """Sealed segments 10, 20, … of three records each, 10 bytes a record, and perhaps an active one."""

    def __init__(self, directory: Path, sealed: int = 3, active: int = 0, version: int = 3) -> None:
        self.directory = directory
        self.records: list[bytes] = []
        self.ends: dict[int, int] = {}
        for n in range(1, sealed + 1):
            segment = self._write(n * 10, 3, version).seal(n * 100)
            self.ends[n * 10] = segment.durable_bytes
            publish(Env(), directory, segment, coordinator_watermark=n * 100)
        if active:
            writer = self._write((sealed + 1) * 10, active, version)
            writer.flush()
            self.ends[(sealed + 1) * 10] = writer.end_offset
            writer.close()

    def _write(self, segment_id: int, count: int, version: int) -> SegmentWriter:
        done = len(self.records)
        writer = create(
            self.directory, version, segment_id, base_offset=done * 10, base_record_count=done, reserve_step_bytes=512
        )
        for i in range(done, done + count):
            self.records.append(b"record%04d" % i)
            writer.append(self.records[-1], timestamp_ms=i)
        return writer

    def path(self, segment_id: int) -> Path:
        return self.directory / f"{segment_id}.seg"

    def change(self, segment_id: int, offset: int, data: bytes = b"?") -> None:
        path = self.path(segment_id)
        path.chmod(0o600)
        with path.open("r+b") as f:
            f.seek(offset)
            f.write(data)


def recover(directory: Path, **kw: object) -> StreamState:
    return recover_stream(Env(), directory, stream_id=STREAM_ID, **kw)  # type: ignore[arg-type]


def kinds(state: StreamState) -> list[WarningKind]:
    return [w.kind for w in state.warnings]


def counters(state: StreamState) -> tuple[int, int, int, int]:
    return state.next_segment_id, state.next_logical_offset, state.total_record_count, state.coordinator_watermark


def test_empty_folder(tmp_path: Path) -> None:
    state = recover(tmp_path)
    assert counters(state) == (0, 0, 0, 0) and state.appendable and state.active is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("active", [0, 2])
def test_clean(tmp_path: Path, version: int, active: int) -> None:
    stream = Stream(tmp_path, 3, active, version)
    state = recover(tmp_path)
    newest = 40 if active else 30
    assert counters(state) == (newest + 1, (9 + active) * 10, 9 + active, 300)
    assert state.warnings == () and state.damaged == () and state.unsealed == () and state.appendable
    assert state.older_ids == ((10, 20) if version == 3 else ())
    assert [s.segment_id for s in state.sealed] == ([30] if version == 3 else [10, 20, 30])
    if active:
        assert state.active is not None and state.active.end_offset == stream.ends[40]
    full = recover(tmp_path, full=True)
    assert counters(full) == counters(state)
    assert [(s.segment_id, s.base_offset, s.record_count) for s in full.sealed] == [
        (10, 0, 3),
        (20, 30, 3),
        (30, 60, 3),
    ]


def test_only_the_tail_is_opened(tmp_path: Path) -> None:
    Stream(tmp_path, 3, 1)
    files = OpenedFiles()
    recover_stream(Env(files=files), tmp_path)
    assert set(files.opened) == {"30.seg", "40.seg"}


@pytest.mark.expects_warnings
@pytest.mark.parametrize(
    ("pointer", "kind"),
    [
        (None, W.POINTER_MISSING),
        (b"", W.POINTER_DAMAGED),
        (b"x" * 48, W.POINTER_DAMAGED),
        (encode_pointer(Pointer(20, 200, 0))[:8] + b"\2" + encode_pointer(Pointer(20, 200, 0))[9:], W.POINTER_DAMAGED),
        (encode_pointer(Pointer(25, 200, 300)), W.POINTER_STALE),  # missing
        (encode_pointer(Pointer(30, 300, 1)), W.POINTER_STALE),  # another length
        (encode_pointer(Pointer(30, 299, 0)), W.POINTER_STALE),  # another watermark
    ],
)
@pytest.mark.parametrize("active", [0, 2])
def test_bad_pointer_is_only_slower(
    tmp_path: Path, pointer: bytes | None, kind: W, active: int, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(tmp_path, 3, active)
    path = tmp_path / POINTER_NAME
    path.unlink()
    if pointer is not None:
        path.write_bytes(pointer)
    state = recover(tmp_path)
    assert kind in kinds(state)
    assert [s.segment_id for s in state.sealed] == [10, 20, 30] and state.older_ids == ()
    assert counters(state) == ((40 if active else 30) + 1, (9 + active) * 10, 9 + active, 300)
    assert load_pointer(tmp_path) == Pointer(30, 300, stream.ends[30])
    logged = [(r.event, r.stream_dir) for r in caplog.records]  # type: ignore[attr-defined]
    assert (str(kind), str(tmp_path)) in logged
    assert recover(tmp_path).warnings == ()


@pytest.mark.expects_warnings
def test_sealed_but_not_published(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 3, 1)
    stream.path(30).chmod(0o600)
    store_pointer(Env(), tmp_path, Pointer(10, 100, stream.ends[10]))
    state = recover(tmp_path)
    assert kinds(state) == [W.POINTER_STALE] and state.older_ids == ()
    assert [s.segment_id for s in state.sealed] == [10, 20, 30]
    assert load_pointer(tmp_path) == Pointer(30, 300, stream.ends[30])
    assert stat.S_IMODE(stream.path(30).stat().st_mode) == 0o400


@pytest.mark.expects_warnings
def test_pointer_to_a_segment_that_went_elsewhere(tmp_path: Path) -> None:
    folder, away = tmp_path / "stream", tmp_path / "away"
    folder.mkdir()
    away.mkdir()
    stream = Stream(folder, 3)
    for n in (10, 20, 30):
        stream.path(n).rename(away / f"{n}.seg")
    state = recover(folder, locate=lambda n: away / f"{n}.seg")
    assert counters(state) == (31, 90, 9, 300) and state.warnings == ()
    state = recover(folder)
    assert kinds(state) == [W.POINTER_STALE]
    assert state.next_segment_id == 31, "an id is not given out twice"


@pytest.mark.expects_warnings
@pytest.mark.parametrize("version", [2, 3])
def test_torn_tail(tmp_path: Path, version: int) -> None:
    stream = Stream(tmp_path, 1, 3, version)
    head = 28 if version == 2 else 36
    end = stream.ends[20]
    stream.change(20, end - 3)
    state = recover(tmp_path)
    assert kinds(state) == [W.TORN_TAIL] and state.warnings[0].size_bytes == head + 10
    assert "bytes of torn tail" in str(state.warnings[0])
    assert state.active is not None and state.active.end_offset == end - head - 10
    assert counters(state) == (21, 50, 5, 100)
    assert not list(tmp_path.glob("*.torn"))
    assert recover(tmp_path).warnings == ()


@pytest.mark.expects_warnings
def test_records_beyond_the_tear_are_kept(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 1, 3)
    end = stream.ends[20]
    cut = end - 2 * 46
    stream.change(20, cut + 40)
    wanted = stream.path(20).read_bytes()[cut:end]
    state = recover(tmp_path)
    assert kinds(state) == [W.TORN_TAIL] and "20.seg.torn" in state.warnings[0].message
    assert (tmp_path / "20.seg.torn").read_bytes() == wanted
    assert state.active is not None and state.active.end_offset == cut
    # Torn again, elsewhere: the first copy stays.
    writer = SegmentWriter.reopen(Env(), state.active)
    writer.append_many([b"a" * 10, b"b" * 10])
    writer.flush()
    writer.close()
    stream.change(20, cut + 40, b"!")
    recover(tmp_path)
    assert (tmp_path / "20.seg.torn").read_bytes() == wanted and (tmp_path / "20.seg.torn.1").exists()


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(8192)])
def test_no_header_no_segment(tmp_path: Path, content: bytes) -> None:
    stream = Stream(tmp_path, 2)
    stream.path(30).write_bytes(content)
    state = recover(tmp_path)
    assert not stream.path(30).exists() and state.active is None and state.warnings == ()
    assert counters(state) == (31, 60, 6, 200)


@pytest.mark.expects_warnings
def test_lost_header_with_records_is_put_aside(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 1, 3)
    stream.change(20, 0, bytes(96))
    data = stream.path(20).read_bytes()
    state = recover(tmp_path)
    assert kinds(state) == [W.TORN_HEADER] and state.active is None
    assert (tmp_path / "20.seg.torn").read_bytes() == data and not stream.path(20).exists()
    assert recover(tmp_path).warnings == ()


@pytest.mark.expects_warnings
@pytest.mark.parametrize("others", [True, False])
def test_first_record_torn(tmp_path: Path, others: bool) -> None:
    stream = Stream(tmp_path, 1, 3 if others else 1)
    stream.change(20, 100)
    state = recover(tmp_path)
    assert state.active is None and not stream.path(20).exists() and state.damaged == ()
    assert kinds(state) == [W.TORN_HEADER]
    assert (tmp_path / "20.seg.torn").exists()


@pytest.mark.expects_warnings
@pytest.mark.parametrize("size", [0, 1, 60, 96, 120])
@pytest.mark.parametrize("full", [True, False])
def test_a_sealed_segment_cut_short_is_damage_not_litter(tmp_path: Path, size: int, full: bool) -> None:
    stream = Stream(tmp_path, 3)
    if not full:
        (tmp_path / "current.sealed").unlink()
    path = stream.path(20)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:size])
    state = recover_stream(Env(), tmp_path, full=full)
    assert [d.segment_id for d in state.damaged] == [20]
    assert path.stat().st_size == size


@pytest.mark.expects_warnings
def test_folders_where_files_belong_are_damage(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 2)
    (tmp_path / "current.sealed").unlink()
    (tmp_path / "current.sealed").mkdir()
    stream.path(30).mkdir()
    state = recover_stream(Env(), tmp_path)
    assert [d.segment_id for d in state.damaged] == [30]
    assert [s.segment_id for s in state.sealed] == [10, 20]


@pytest.mark.expects_warnings
@pytest.mark.parametrize("offset", [0, 8, 20, 90])
def test_damaged_header_is_left_alone(tmp_path: Path, offset: int) -> None:
    stream = Stream(tmp_path, 2, 2)
    stream.change(30, offset)
    data = stream.path(30).read_bytes()
    state = recover(tmp_path)
    assert kinds(state) == [W.DAMAGED_SEGMENT] and [d.segment_id for d in state.damaged] == [30]
    assert isinstance(state.damaged[0].error, UnsupportedError if offset == 8 else CorruptError)
    assert stream.path(30).read_bytes() == data and not state.appendable
    assert counters(state) == (31, 60, 6, 200)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("offset", [-1, -90, 110])
def test_damaged_sealed_segment(tmp_path: Path, offset: int) -> None:
    """Footer or records: the file is listed, the rest is recovered; header and footer still count if whole."""
    stream = Stream(tmp_path, 3)
    size = stream.path(30).stat().st_size
    stream.change(30, offset if offset > 0 else size + offset)
    data = stream.path(30).read_bytes()
    state = recover(tmp_path)
    assert [d.segment_id for d in state.damaged] == [30] and not state.appendable
    assert stream.path(30).read_bytes() == data
    assert load_pointer(tmp_path) == Pointer(30, 300, stream.ends[30])
    want = (31, 90, 9, 300) if offset > 0 else (31, 60, 6, 200)
    assert counters(state) == want


@pytest.mark.expects_warnings
def test_damaged_but_not_published_is_not_published(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 3)
    store_pointer(Env(), tmp_path, Pointer(20, 200, stream.ends[20]))
    stream.change(30, 110)
    state = recover(tmp_path)
    assert [d.segment_id for d in state.damaged] == [30]
    assert load_pointer(tmp_path) == Pointer(20, 200, stream.ends[20])


@pytest.mark.expects_warnings
def test_older_damage_does_not_stop_the_stream(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 3, 1)
    stream.change(20, 0)
    state = recover(tmp_path, full=True)
    assert [d.segment_id for d in state.damaged] == [20] and state.appendable
    assert counters(state) == (41, 100, 10, 300)


@pytest.mark.expects_warnings
def test_durable_hint(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 1, 3)
    end = stream.ends[20]
    assert recover(tmp_path, durable_hints={20: end, 10: stream.ends[10]}).warnings == ()
    stream.change(20, end - 3)
    data = stream.path(20).read_bytes()
    state = recover(tmp_path, durable_hints={20: end})
    assert [d.segment_id for d in state.damaged] == [20] and not state.appendable
    assert stream.path(20).read_bytes() == data
    assert [d.segment_id for d in recover(tmp_path, durable_hints={10: 10**6}).damaged] == [10]
    stream.path(20).write_bytes(b"")
    assert [d.segment_id for d in recover(tmp_path, durable_hints={20: end}).damaged] == [20]
    assert stream.path(20).exists()
    stream.path(20).unlink()
    assert [d.segment_id for d in recover(tmp_path, durable_hints={20: end}).damaged] == [20]


@pytest.mark.expects_warnings
def test_unsealed_older_segment_is_reported_and_left(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 1, 2)
    stream._write(30, 2, 3).close()
    with stream.path(20).open("r+b") as f:
        f.seek(stream.ends[20])
        f.write(b"torn")
    data = stream.path(20).read_bytes()
    state = recover(tmp_path)
    assert kinds(state) == [W.UNSEALED_OLDER]
    assert stream.path(20).read_bytes() == data
    assert state.active is not None and state.active.segment_id == 30
    assert counters(state) == (31, 70, 7, 100)
    (older,) = state.unsealed
    repair.trim(Env(), older)
    SegmentWriter.reopen(Env(), older).seal(150)
    state = recover(tmp_path)
    assert state.unsealed == () and [s.segment_id for s in state.sealed] == [10, 20]
    assert len(read_all(stream.path(20))) == 2


@pytest.mark.expects_warnings
def test_foreign_files(tmp_path: Path) -> None:
    stream = Stream(tmp_path, 2, 1)
    for name in ("07.seg", "x.seg", "notes.txt", "5.seg.torn"):
        (tmp_path / name).write_bytes(b"mine")
    for name in ("current.sealed.tmp", "9.seg.tmp", "9.seg.torn.tmp"):
        (tmp_path / name).write_bytes(b"left over")
    state = recover(tmp_path)
    assert kinds(state) == [W.UNKNOWN_FILE] * 2
    assert not list(tmp_path.glob("*.tmp")) and (tmp_path / "notes.txt").exists()
    stream.path(30).rename(stream.path(31))
    state = recover(tmp_path)
    assert [d.segment_id for d in state.damaged] == [31]
    state = recover_stream(Env(), tmp_path, stream_id=STREAM_ID + 1)
    assert {d.segment_id for d in state.damaged} >= {20}


@pytest.mark.expects_warnings
def test_seal_cut_short(tmp_path: Path) -> None:
    """A footer at the end of the records in a file that was not cut yet: the seal did not happen."""
    stream = Stream(tmp_path, 2)
    data = stream.path(20).read_bytes()
    stream.path(20).chmod(0o600)
    stream.path(20).write_bytes(data + bytes(500))
    store_pointer(Env(), tmp_path, Pointer(10, 100, stream.ends[10]))
    state = recover(tmp_path)
    assert kinds(state) == [W.TORN_TAIL] and state.active is not None
    SegmentWriter.reopen(Env(), state.active).seal(200)
    assert stream.path(20).read_bytes() == data


def test_gaps_in_logical_offsets_survive(tmp_path: Path) -> None:
    writer = create(tmp_path)
    writer.append(b"abc", logical_offset=10)
    writer.append(b"def", logical_offset=1000)
    publish(Env(), tmp_path, writer.seal(1))
    assert recover(tmp_path).next_logical_offset == 1003


@pytest.mark.expects_warnings
def test_payload_that_mimics_a_footer(tmp_path: Path) -> None:
    """A tail trimmed right behind a payload that ends like a footer is still an unsealed segment."""
    from aof2.engine.segment.format import SegmentFooter, encode_footer

    with create(tmp_path) as writer:
        writer.append(b"abc", timestamp_ms=1)
        at = writer.end_offset + 36 + 10
        writer.append(b"x" * 10 + encode_footer(SegmentFooter(3, 1, at, 0, segment_id=7)), timestamp_ms=2)
        end = writer.end_offset
        writer.flush()
    with writer.path.open("r+b") as f:
        f.seek(end)
        f.write(encode_record(3, b"torn", 10**6, 3)[:20])
    state = recover(tmp_path)
    assert state.active is not None and state.active.end_offset == end
    again = recover(tmp_path)
    assert again.active == state.active and again.sealed == ()
