"""The writer and the reader on a real folder: names, growth, rotation, sealing, toggles, failures."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.env import Env, Files
from aof2.engine.errors import FatalIOError, LimitError, ReadOnlyError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import mark_uploaded
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LOG_SEGMENT_ID, LogPosition, unpack_chunk_header
from aof2.engine.manifest.quarantine import lift, quarantine, read_quarantine
from aof2.engine.manifest.reader import ManifestIntegrityError, Stream, parse_chunk
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter

from .helpers import PAYLOADS, Clock, small, small_log, written


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_chunk_is_temporary_until_its_first_commit(tmp_path: Path) -> None:
    w = ManifestLogWriter.open(Env(), tmp_path)
    assert names(tmp_path) == []
    w.append(p.SegmentOpened(0, 1), segment_id=1)
    assert names(tmp_path) == ["0.mlog.tmp"]
    assert (tmp_path / "0.mlog.tmp").stat().st_size == 256 << 10
    w.commit()
    assert names(tmp_path) == ["0.mlog"]
    w.close()


def test_append_commit_rotate_are_separate_steps(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        assert w.append(p.SegmentOpened(0, 1), segment_id=1) == 0
        assert w.position == LogPosition(0, CHUNK_HEADER_LEN, 0)
        assert written(tmp_path) == []
        end = w.commit()
        assert end.ordinal == 2  # the record and its commit marker
        assert w.append(p.LocalEvicted(3), segment_id=1) == 2
        assert w.position == end
        assert len(written(tmp_path)) == 1
        sealed = w.rotate()
        assert sealed is not None
        assert sealed.record_count == 4
        assert len(written(tmp_path)) == 2
        assert w.position == LogPosition(1, CHUNK_HEADER_LEN, 4)
        assert w.rotate() is None


def test_a_sealed_chunk_is_cut_read_only_and_keeps_its_checksum_when_marked_uploaded(tmp_path: Path) -> None:
    before = small_log(tmp_path, seal=True)
    path = tmp_path / "0.mlog"
    header = unpack_chunk_header(path.read_bytes())
    assert header.sealed
    assert not header.uploaded
    assert path.stat().st_size == header.committed_len
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    mark_uploaded(Env(), path)
    assert unpack_chunk_header(path.read_bytes()).uploaded
    assert written(tmp_path) == before


def test_growth_comes_in_64_kib_steps(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        w.append(p.CustomEvent(20, bytes(65535)))
        w.commit()
        assert (tmp_path / "0.mlog").stat().st_size == 128 << 10
        batch = RecordBatch()
        batch.add_event(1, 16, bytes(300_000))
        w.append_batch(batch)
        w.commit()
        assert (tmp_path / "0.mlog").stat().st_size % (64 << 10) == 0
        assert w.needs_rotation()
    assert len(written(tmp_path)) == 6


@given(st.lists(st.tuples(PAYLOADS, st.integers(0, 2**64 - 2), st.integers(1, 2**64 - 1)), min_size=1, max_size=20))
def test_a_batch_and_single_appends_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[p.Payload, int, int]]
) -> None:
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    env = Env(now_ms=Clock())
    with ManifestLogWriter.open(env, one, small()) as w1, ManifestLogWriter.open(env, many, small()) as w2:
        batch = RecordBatch()
        for payload, segment_id, stamp in rows:
            w1.append(payload, segment_id=segment_id, logical_offset=stamp, timestamp_ms=stamp)
            batch.add(payload, segment_id=segment_id, logical_offset=stamp, timestamp_ms=stamp)
        w2.append_batch(batch)
    assert (one / "0.mlog").read_bytes() == (many / "0.mlog").read_bytes()


def test_columns_give_the_same_records_as_rows(tmp_path: Path) -> None:
    rows, columns = RecordBatch(), RecordBatch()
    for i in range(50):
        rows.add(p.CompressionDone(i * 10, i), segment_id=i, logical_offset=7 + i, timestamp_ms=5)
    numbers = range(50)
    columns.add_columns(
        p.CompressionDone, numbers, [i * 10 for i in numbers], numbers, logical_offsets=range(7, 57), timestamp_ms=5
    )
    assert list(rows.rows()) == list(columns.rows())
    columns.add_columns(p.LocalEvicted, [1, 2], [3, 4])
    assert list(columns.rows())[-1] == (13, 2, 0, 0, (4).to_bytes(8, "little"))
    for bad in ([1, 2, 3], [1]):
        with pytest.raises(ValueError, match="column"):
            RecordBatch().add_columns(p.LocalEvicted, bad, [3, 4])


def test_rotation_by_size_stitches_ordinals(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        for i in range(2000):
            w.append(p.UploadStarted("k" * (1 + i % 200)), segment_id=i)
            w.commit(sync=False)
            if w.needs_rotation():
                w.rotate()
    records = list(Stream(tmp_path).records())
    assert len(Stream(tmp_path).chunks) > 10
    assert [r.ordinal for r in records] == list(range(4000))
    assert [r.segment_id for r in records if r.type_id == 5] == list(range(2000))


def test_rotation_by_timer_but_never_for_bookkeeping_alone(tmp_path: Path) -> None:
    clock = Clock()
    with ManifestLogWriter.open(Env(now_ms=clock), tmp_path) as w:
        w.append(p.UploadDone("manifest/1/0.mlog", "e"), segment_id=LOG_SEGMENT_ID)
        w.append(p.SnapshotMarker(0, 64, 1), segment_id=LOG_SEGMENT_ID)
        w.commit()
        clock.ms += 3_600_000
        assert not w.needs_rotation()
        assert w.rotation_wait_s() is None
        w.append(p.LocalEvicted(1), segment_id=4)
        w.commit()
        assert not w.needs_rotation()
        clock.ms += 249
        assert not w.needs_rotation()
        clock.ms += 1
        assert w.needs_rotation()


def test_steady_commits_do_not_put_rotation_off_for_ever(tmp_path: Path) -> None:
    clock = Clock()
    with ManifestLogWriter.open(Env(now_ms=clock), tmp_path, LogSettings(durable=False)) as w:
        for _ in range(60):
            w.append(p.LocalEvicted(1), segment_id=4)
            w.commit()
            if w.needs_rotation():
                break
            clock.ms += 100
        assert clock.ms - 1_700_000_000_000 == 5_000


def test_a_clock_that_goes_back_does_not_hold_rotation_up(tmp_path: Path) -> None:
    clock = Clock()
    with ManifestLogWriter.open(Env(now_ms=clock), tmp_path) as w:
        w.append(p.LocalEvicted(1), segment_id=4)
        w.commit()
        clock.ms -= 86_400_000
        assert w.needs_rotation()


def test_bookkeeping_is_recognised_again_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    for records in ([(p.UploadDone("manifest/1/0.mlog", "e"), LOG_SEGMENT_ID)], [(p.LocalEvicted(1), 4)]):
        with ManifestLogWriter.open(Env(now_ms=clock), tmp_path) as w:
            for payload, segment_id in records:
                w.append(payload, segment_id=segment_id)
        with ManifestLogWriter.open(Env(now_ms=clock), tmp_path) as w:
            clock.ms += 60_000
            assert w.needs_rotation() == (records[0][1] == 4)


def test_reopening_goes_on_where_the_log_ended(tmp_path: Path) -> None:
    before = small_log(tmp_path)
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        w.append(p.LocalEvicted(9), segment_id=9)
    after = written(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1


def test_what_was_not_committed_is_trimmed_and_not_appended_twice(tmp_path: Path) -> None:
    before = small_log(tmp_path)
    w = ManifestLogWriter.open(Env(), tmp_path, small())
    w.append(p.LocalEvicted(77), segment_id=77)
    image = (tmp_path / "0.mlog").read_bytes()  # payload bytes are in the file, the header knows nothing of them
    w.close()
    (tmp_path / "0.mlog").write_bytes(image)
    assert written(tmp_path) == before
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        w.append(p.LocalEvicted(77), segment_id=77)
    assert [r[2] for r in written(tmp_path)].count(77) == 1


class CountingFiles(Files):
    def __init__(self) -> None:
        self.fsyncs = 0
        self.fail_fsync = False
        self.fail_space = False

    def fsync(self, fd: int) -> None:
        self.fsyncs += 1
        if self.fail_fsync:
            raise FatalIOError("fsync failed: Input/output error")
        super().fsync(fd)

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        if self.fail_space:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().preallocate(fd, offset, length)


def test_durable_false_never_syncs_and_still_commits(tmp_path: Path) -> None:
    files = CountingFiles()
    with ManifestLogWriter.open(Env(files=files), tmp_path, small(durable=False)) as w:
        for i in range(500):
            w.append(p.LocalEvicted(i), segment_id=i)
            w.commit()
            if w.needs_rotation():
                w.rotate()
    assert files.fsyncs == 0
    assert len(written(tmp_path)) == 500


def test_a_commit_without_sync_is_readable_and_synced_by_the_next(tmp_path: Path) -> None:
    files = CountingFiles()
    with ManifestLogWriter.open(Env(files=files), tmp_path, small()) as w:
        for i in range(10):
            w.append(p.LocalEvicted(i), segment_id=i)
            w.commit(sync=False)
        assert files.fsyncs == 0
        assert len(written(tmp_path)) == 10
        w.sync()
        assert w.fsyncs == 1
        w.sync()
        assert w.fsyncs == 1


@pytest.mark.expects_warnings
def test_a_failed_fsync_is_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = CountingFiles()
    w = ManifestLogWriter.open(Env(files=files), tmp_path, small())
    w.append(p.LocalEvicted(1), segment_id=1)
    w.commit()
    w.append(p.LocalEvicted(2), segment_id=2)
    files.fail_fsync = True
    with pytest.raises(FatalIOError):
        w.commit()
    files.fail_fsync = False
    for write in (lambda: w.append(p.LocalEvicted(3), segment_id=3), w.commit, w.sync):
        with pytest.raises(ReadOnlyError):
            write()
    w.close()
    assert [r.levelname for r in caplog.records] == ["CRITICAL"]


def test_no_room_changes_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    files = CountingFiles()
    with ManifestLogWriter.open(Env(files=files), tmp_path, small()) as w:
        files.fail_space = True
        with pytest.raises(OSError, match="No space"):
            w.append(p.LocalEvicted(1), segment_id=1)
        assert names(tmp_path) == []
        files.fail_space = False
        w.append(p.LocalEvicted(2), segment_id=2)
        w.commit()
        files.fail_space = True
        batch = RecordBatch()
        batch.add_event(1, 16, bytes(200_000))
        with pytest.raises(OSError, match="No space"):
            w.append_batch(batch)
        w.append(p.LocalEvicted(3), segment_id=3)
        w.commit()
        files.fail_space = False
        w.append_batch(batch)
    assert [r[2] for r in written(tmp_path)][:2] == [2, 3]


def test_an_ordinary_user_can_do_all_of_it(tmp_path: Path) -> None:
    """Sealed chunks are read-only for their owner, too: marking and cutting them must not need root."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o5 != 0o5 and parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(0o755)
    directory = tmp_path / "log"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            small_log(directory, seal=True)
            mark_uploaded(Env(), directory / "0.mlog")
            with open_sealed(directory / "0.mlog") as f:
                f.truncate(4096)
            (directory / "0.mlog").chmod(0o400)
            with ManifestLogWriter.open(Env(), directory, small()) as w:
                w.append(p.LocalEvicted(1), segment_id=1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert (directory / "0.mlog").stat().st_size == unpack_chunk_header(
        (directory / "0.mlog").read_bytes()
    ).committed_len


def open_sealed(path: Path) -> BinaryIO:
    path.chmod(0o600)
    return open(path, "r+b")


def test_one_writer_a_stream(tmp_path: Path) -> None:
    with (
        ManifestLogWriter.open(Env(), tmp_path),
        pytest.raises(ReadOnlyError, match="another process"),
    ):
        ManifestLogWriter.open(Env(), tmp_path)
    ManifestLogWriter.open(Env(), tmp_path).close()


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    w = ManifestLogWriter.open(Env(), tmp_path)
    w.close()
    w.close()
    with pytest.raises(ReadOnlyError):
        w.append(p.LocalEvicted(1))


def test_a_quarantined_stream_is_readable_but_takes_no_writer(tmp_path: Path) -> None:
    before = small_log(tmp_path)
    quarantine(Env(), tmp_path, ManifestIntegrityError("bad", chunk_index=3, segment_id=4, offset=5))
    mark = quarantine(Env(), tmp_path, ManifestIntegrityError("later damage", chunk_index=9))
    assert (mark.what, mark.chunk_index, mark.segment_id, mark.offset) == ("chunk 3: bad (segment 4)", 3, 4, 5)
    assert written(tmp_path) == before
    with pytest.raises(ReadOnlyError, match="quarantined"):
        ManifestLogWriter.open(Env(), tmp_path)
    lift(Env(), tmp_path)
    assert read_quarantine(tmp_path) is None
    ManifestLogWriter.open(Env(), tmp_path).close()


def test_a_rollback_leaves_no_trace(tmp_path: Path) -> None:
    plain_dir, rolled = tmp_path / "plain", tmp_path / "rolled"
    for directory in (plain_dir, rolled):
        with ManifestLogWriter.open(Env(now_ms=Clock()), directory, small()) as w:
            for i in range(3):
                if directory == rolled:
                    w.append(p.LocalEvicted(99), segment_id=99)
                    w.rollback()
                w.append(p.LocalEvicted(i), segment_id=i)
                w.commit()
                w.rollback()
    assert (plain_dir / "0.mlog").read_bytes() == (rolled / "0.mlog").read_bytes()


def test_settings_out_of_range_name_the_value() -> None:
    for bad in (
        {"chunk_capacity": 1000},
        {"chunk_capacity": 2 << 20},
        {"record_len_max": 0},
        {"rotation_period_ms": 0},
    ):
        with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
            LogSettings(**bad)  # type: ignore[arg-type]


def test_a_commit_has_a_limit(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        batch = RecordBatch()
        for _ in range(3):
            batch.add_event(1, 16, bytes(60 << 20))
        with pytest.raises(LimitError):
            w.append_batch(batch)


def test_records_start_where_they_say(tmp_path: Path) -> None:
    small_log(tmp_path)
    chunk = parse_chunk((tmp_path / "0.mlog").read_bytes(), last=True)
    assert chunk is not None
    every = list(chunk.records())
    for i, record in enumerate(every):
        assert list(chunk.records(record.chunk_offset)) == every[i:]
    assert list(chunk.records(chunk.end)) == []
    with pytest.raises(ManifestIntegrityError, match="no record starts here"):
        list(chunk.records(every[1].chunk_offset + 8))


def test_commits_that_were_given_up_never_come_back(tmp_path: Path) -> None:
    """A trimmed commit's bytes must not be found again behind a new commit that happens to end where it began."""
    path = tmp_path / "0.mlog"
    env = Env(now_ms=Clock())
    with ManifestLogWriter.open(env, tmp_path, small()) as w:
        w.append(p.LocalEvicted(1), segment_id=1)
        w.commit()
        header = path.read_bytes()[:CHUNK_HEADER_LEN]
        for n in (2, 3):
            w.append(p.LocalEvicted(n), segment_id=n)
            w.commit(sync=False)
        image = header + path.read_bytes()[CHUNK_HEADER_LEN:]  # as if only the data had reached the disk
    path.write_bytes(image)
    assert [r[2] for r in written(tmp_path)] == [1]
    with ManifestLogWriter.open(env, tmp_path, small()) as w:
        w.append(p.LocalEvicted(9), segment_id=9)
    torn = bytearray(path.read_bytes())
    torn[48] ^= 1  # and now the header did not: replay falls back to the markers
    path.write_bytes(torn)
    assert [r[2] for r in written(tmp_path)] == [1, 9]
