"""AuditWriter on a disk that behaves, a full one and one that fails; what opening finds and mends."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.audit.commit import BATCH_BYTES_MAX, commit_slice, is_pending
from aof2.engine.audit.damage import Tail
from aof2.engine.audit.format import ArtifactPublish, ArtifactRef, ChainBrokenError, Payload
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.audit.writer import AuditWriter
from aof2.engine.env import Env, Files
from aof2.engine.errors import CorruptError, FatalIOError, LimitError, ReadOnlyError, UnsupportedError
from tests.audit.build import HEADER, log_bytes, records, ref, sample
from tests.audit.test_format import PAYLOADS


def test_create_append_reopen(tmp_path: Path) -> None:
    path = tmp_path / "7.asl"
    with AuditWriter(Env(), path) as writer:
        assert path.read_bytes() == HEADER
        assert writer.append([]) == []
        assert writer.append(sample(3)) == [1, 2, 3]
        assert writer.append(sample(4)[3:]) == [4]
        assert writer.end == path.stat().st_size
    assert path.read_bytes() == log_bytes(sample(4))
    state = VisibleState()
    with AuditWriter(Env(), path, on_record=state.apply, acknowledged=4) as writer:
        assert (writer.next_logseq, writer.recovered.tail) == (5, Tail.CLEAN)
        assert writer.append(sample(7)[4:]) == [5, 6, 7]
    assert path.read_bytes() == log_bytes(sample(7))
    assert state.is_visible(ref(1))
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*.tmp"))


@settings(max_examples=40)
@given(st.lists(st.lists(PAYLOADS, max_size=5), max_size=6))
def test_bytes_do_not_depend_on_batches(tmp_path_factory: pytest.TempPathFactory, batches: list[list[Payload]]) -> None:
    path = tmp_path_factory.mktemp("audit") / "1.asl"
    for batch in batches:
        with AuditWriter(Env(), path) as writer:
            writer.append(batch)
    if batches:
        assert path.read_bytes() == log_bytes([p for b in batches for p in b])


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.asl"
    with AuditWriter(Env(), path) as first:
        with pytest.raises(ReadOnlyError, match="another process"):
            AuditWriter(Env(), path)
        first.append(sample(1))
    with pytest.raises(ReadOnlyError, match="closed"):
        first.append(sample(1))
    AuditWriter(Env(), path).close()


def test_a_missing_folder_is_the_caller_s(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AuditWriter(Env(), tmp_path / "no" / "1.asl")


def test_a_batch_too_long_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "1.asl"
    large: list[Payload] = [ArtifactPublish(ArtifactRef(9, bytes(65535)))]
    with AuditWriter(Env(), path) as writer:
        with pytest.raises(LimitError):
            writer.append(large * (BATCH_BYTES_MAX // 65535 + 1))
        assert path.read_bytes() == HEADER
        assert writer.append(large * 2) == [1, 2]
        with pytest.raises(ValueError, match="1 to 65535"):
            writer.append([ArtifactPublish(ArtifactRef(9, b""))])
        assert writer.append(large) == [3]


def test_cut_at_every_byte_is_trimmed_and_goes_on(tmp_path: Path) -> None:
    whole, tail = log_bytes(sample(3)), records(sample(4))[3]
    path = tmp_path / "1.asl"
    for cut in range(len(tail)):
        path.write_bytes(whole + tail[:cut])
        with AuditWriter(Env(), path) as writer:
            assert writer.recovered.dropped_bytes == cut
            assert path.stat().st_size == len(whole)
            assert writer.append(sample(4)[3:]) == [4]
        assert path.read_bytes() == whole + tail


@pytest.mark.parametrize("damage", [b"ASLLOG", b"", HEADER[:23], b"\0" * 24, HEADER[:12] + b"\x17" + HEADER[13:]])
def test_no_header_no_writing(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "1.asl"
    path.write_bytes(damage)
    with pytest.raises(CorruptError):
        AuditWriter(Env(), path)
    assert path.read_bytes() == damage


def test_broken_history_and_newer_logs_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "1.asl"
    broken = bytearray(log_bytes(sample(5)))
    broken[60] ^= 1
    path.write_bytes(broken)
    with pytest.raises(ChainBrokenError) as e:
        AuditWriter(Env(), path)
    assert e.value.path == str(path)
    assert path.read_bytes() == broken
    newer = HEADER[:8] + b"\x02" + HEADER[9:] + b"what version 2 holds"
    path.write_bytes(newer)
    with pytest.raises(UnsupportedError):
        AuditWriter(Env(), path)
    assert path.read_bytes() == newer


def test_what_was_acknowledged_is_never_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "1.asl"
    data = log_bytes(sample(5))
    for found in (data[:-1], data[: -len(records(sample(5))[-1])]):
        path.write_bytes(found)
        with pytest.raises(ChainBrokenError, match="5 was acknowledged"):
            AuditWriter(Env(), path, acknowledged=5)
        assert path.read_bytes() == found
        AuditWriter(Env(), path, acknowledged=4).close()


def filled_to(end: int, count: int) -> list[Payload]:
    """`count` payloads whose log ends at byte `end`."""
    small: list[Payload] = [ArtifactPublish(ArtifactRef(9, b"x"))] * (count - 1)
    left = end - len(log_bytes(small))
    return [*small, ArtifactPublish(ArtifactRef(9, bytes(left - 48 - 8)))]


@pytest.mark.parametrize("count", [1, 255, 300, 511])
@pytest.mark.parametrize("place", [496, *range(504, 513), 519])
def test_an_uncommitted_batch_wherever_its_logseq_lies(tmp_path: Path, place: int, count: int) -> None:
    """Whole but for the commit bytes: completed. Anything else missing: gone entirely."""
    place += count // 8 * 512
    before = filled_to(512 + place, count)
    batch: list[Payload] = [ArtifactPublish(ref(i)) for i in range(4)]
    start, whole = 512 + place, log_bytes(before + batch)
    last = commit_slice(start, len(before) + 1)
    assert (start + last.start) // 512 == (start + last.stop - 1) // 512, "commit bytes lie in one sector"
    pending = bytearray(whole)
    pending[start + last.start : start + last.stop] = bytes(last.stop - last.start)
    assert pending != whole
    path = tmp_path / "1.asl"
    path.write_bytes(pending)
    with AuditWriter(Env(), path) as writer:
        assert writer.recovered.tail is Tail.UNCOMMITTED
        assert writer.next_logseq == len(before) + 5
    assert path.read_bytes() == whole
    inner = [start + len(b"".join(records(before + batch)[len(before) : len(before) + n])) for n in range(5)]
    for cut in range(start, len(whole), 11):
        if cut in inner[1:]:
            continue  # the file grows in one step: it never ends between two records of a batch
        path.write_bytes(pending[:cut])
        AuditWriter(Env(), path).close()
        assert path.read_bytes() == whole[:start]
    for lost in range(start // 512 * 512, len(whole), 512):
        holed = bytearray(pending)
        holed[max(lost, start) : lost + 512] = bytes(min(lost + 512, len(whole)) - max(lost, start))
        path.write_bytes(holed)
        AuditWriter(Env(), path).close()
        assert path.read_bytes() == (whole if only_logseq_lost(holed, whole, start) else whole[:start])


def only_logseq_lost(holed: bytearray, whole: bytes, start: int) -> bool:
    """Whether every byte lost is one of the first logseq's: then the chain proves the rest."""
    return holed[:start] + whole[start : start + 8] + holed[start + 8 :] == whole


@given(st.integers(0, 4096), st.integers(1, 2**64 - 1))
def test_commit_bytes(offset: int, logseq: int) -> None:
    field = struct.pack("<Q", logseq)
    last = commit_slice(offset, logseq)
    assert any(field[last])
    assert (offset + last.start) // 512 == (offset + last.stop - 1) // 512
    assert last == slice(0, 8) or offset % 512 > 504
    pending = bytearray(field)
    pending[last] = bytes(last.stop - last.start)
    assert is_pending(bytes(pending), offset, logseq)
    assert is_pending(bytes(8), offset, logseq)
    assert is_pending(b"", offset, logseq)
    assert not is_pending(field, offset, logseq)


class FullDisk(Files):
    """Takes `room` more bytes, then ENOSPC in the middle of a write, as disks do."""

    def __init__(self) -> None:
        self.room: int | None = None

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self.room is not None and len(data) > self.room:
            super().pwrite(fd, memoryview(data)[: self.room], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.room is not None:
            self.room -= len(data)
        super().pwrite(fd, data, offset)


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, count: int) -> None:
    path = tmp_path / "1.asl"
    files = FullDisk()
    with AuditWriter(Env(files=files), path) as writer:
        writer.append(sample(2))
        before = path.read_bytes()
        batch = sample(2 + count)[2:]
        size = len(log_bytes(sample(2 + count))) - len(before)
        for room in [*range(0, size, 13), size - 1, *([size, size + 7] if count > 1 else [])]:
            files.room = room
            with pytest.raises(OSError, match="No space") as e:
                writer.append(batch)
            assert e.value.errno == errno.ENOSPC
            assert path.read_bytes() == before
        files.room = None
        assert writer.append(batch) == list(range(3, 3 + count))
    assert path.read_bytes() == log_bytes(sample(2 + count))


class FailingDisk(Files):
    """fsync fails at the nth call; truncate can be made to fail as well."""

    def __init__(self) -> None:
        self.syncs_left: int | None = None
        self.cuts_fail = False

    def fsync(self, fd: int) -> None:
        if self.syncs_left is not None:
            self.syncs_left -= 1
            if self.syncs_left < 0:
                raise FatalIOError("fsync failed: Input/output error")
        super().fsync(fd)

    def truncate(self, fd: int, length: int) -> None:
        if self.cuts_fail:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(fd, length)


@pytest.mark.parametrize(("count", "good"), [(1, 0), (3, 0), (3, 1)])
def test_a_failed_fsync_is_for_good(tmp_path: Path, count: int, good: int) -> None:
    path = tmp_path / "1.asl"
    files = FailingDisk()
    with AuditWriter(Env(files=files), path) as writer:
        writer.append(sample(2))
        files.syncs_left = good
        with pytest.raises(FatalIOError):
            writer.append(sample(2 + count)[2:])
        files.syncs_left = None
        with pytest.raises(ReadOnlyError, match="fsync failed"):
            writer.append(sample(1))
        assert writer.next_logseq == 3
    got = [r.payload for r in Replay(path)]
    assert got in (sample(2), sample(2 + count)), "whole or absent"


def test_a_write_that_cannot_be_taken_back_is_fatal(tmp_path: Path) -> None:
    class Worse(FullDisk, FailingDisk):
        def __init__(self) -> None:
            FullDisk.__init__(self)
            FailingDisk.__init__(self)

    files = Worse()
    with AuditWriter(Env(files=files), tmp_path / "1.asl") as writer:
        files.room, files.cuts_fail = 10, True
        with pytest.raises(FatalIOError, match="taken back"):
            writer.append(sample(2))
        with pytest.raises(ReadOnlyError):
            writer.append(sample(2))


def test_opening_syncs_what_a_killed_process_left(tmp_path: Path) -> None:
    """Records read back may be in the page cache only: an open that cannot sync them must not hand them out."""
    path = tmp_path / "1.asl"
    path.write_bytes(log_bytes(sample(3)))
    files = FailingDisk()
    files.syncs_left = 0
    with pytest.raises(FatalIOError):
        AuditWriter(Env(files=files), path)
    AuditWriter(Env(), path).close()  # the lock went with the failed one


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    path = tmp_path / "1.asl"
    path.write_bytes(b"not a log")
    with pytest.raises(CorruptError):
        AuditWriter(Env(), path)
    path.unlink()
    with AuditWriter(Env(), path) as writer:
        writer.append(sample(2))
    for _ in Replay(path):
        break
    assert sorted(os.listdir("/proc/self/fd")) == before
