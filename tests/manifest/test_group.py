"""Group commit: many callers, few fsyncs, nobody left waiting."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import trio

from aof2.engine import group as group_module
from aof2.engine.env import Env, Files
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter, SealedChunk

from .group import GroupCommit
from .helpers import small, written


def one(segment_id: int) -> RecordBatch:
    batch = RecordBatch()
    batch.add(p.LocalEvicted(segment_id), segment_id=segment_id)
    return batch


class GatedFiles(Files):
    """fsync waits at a gate, so that a test decides who arrives meanwhile; or fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.fail = False
        self.no_space = False

    def fsync(self, fd: int) -> None:
        self.arrived.set()
        self.gate.wait()
        if self.fail:
            raise FatalIOError("fsync failed: Input/output error")
        super().fsync(fd)

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        if self.no_space:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().preallocate(fd, offset, length)


def test_64_concurrent_commits_cost_two_fsyncs(tmp_path: Path) -> None:
    files = GatedFiles()
    writer = ManifestLogWriter.open(Env(files=files), tmp_path)
    group = GroupCommit(writer).start()
    group.commit_now(one(1000))
    before = writer.fsyncs
    files.gate.clear()
    files.arrived.clear()
    first = group.submit(one(0), sync=True)
    files.arrived.wait()
    rest = [group.submit(one(i), sync=True) for i in range(1, 64)]
    files.gate.set()
    positions = [f.result() for f in [first, *rest]]
    assert writer.fsyncs - before == 2
    assert positions == sorted(positions)
    group.close()
    assert [r[2] for r in written(tmp_path)] == [1000, *range(64)]


def test_real_threads_share_fsyncs(tmp_path: Path) -> None:
    writer = ManifestLogWriter.open(Env(), tmp_path, LogSettings(rotation_period_ms=3_600_000))
    group = GroupCommit(writer).start()
    barrier = threading.Barrier(64)

    def commit(i: int) -> None:
        barrier.wait()
        group.commit_now(one(i))

    threads = [threading.Thread(target=commit, args=(i,)) for i in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    group.close()
    assert sorted(int(str(r[2])) for r in written(tmp_path)) == list(range(64))
    assert writer.fsyncs < 64


def test_without_sync_it_is_answered_at_once_and_synced_within_the_period(tmp_path: Path) -> None:
    files = GatedFiles()
    writer = ManifestLogWriter.open(Env(files=files), tmp_path, small())
    group = GroupCommit(writer, commit_period_ms=1).start()
    files.gate.clear()
    position = group.submit(one(1), sync=False).result()
    assert isinstance(position, LogPosition)
    assert [r[2] for r in written(tmp_path)] == [1]
    files.arrived.wait()  # the timer's fsync, asked for by nobody
    files.gate.set()
    group.flush()
    assert writer.fsyncs == 1
    group.close()


def test_rotation_hands_sealed_chunks_over(tmp_path: Path) -> None:
    sealed: list[SealedChunk] = []
    done = threading.Event()

    def on_sealed(chunk: SealedChunk) -> None:
        sealed.append(chunk)
        done.set()

    writer = ManifestLogWriter.open(Env(), tmp_path, small(rotation_period_ms=1))
    group = GroupCommit(writer, on_sealed=on_sealed).start()
    group.commit_now(one(1))
    assert done.wait(60)
    group.close()
    assert sealed[0].header.chunk_index == 0
    assert sealed[0].header.sealed


def test_a_batch_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    files = GatedFiles()
    group = GroupCommit(ManifestLogWriter.open(Env(files=files), tmp_path, small())).start()
    group.commit_now(one(1))
    files.no_space = True
    big = RecordBatch()
    big.add_event(1, 16, bytes(200_000))
    with pytest.raises(OSError, match="No space"):
        group.commit_now(big)
    group.commit_now(one(2))
    files.no_space = False
    group.close()
    assert [r[2] for r in written(tmp_path)] == [1, 2]


@pytest.mark.expects_warnings
def test_a_failed_fsync_fails_everyone_and_everything_after(tmp_path: Path) -> None:
    files = GatedFiles()
    group = GroupCommit(ManifestLogWriter.open(Env(files=files), tmp_path, small())).start()
    files.gate.clear()
    futures: list[Future[LogPosition]] = [group.submit(one(i), sync=True) for i in range(5)]
    files.fail = True
    files.gate.set()
    errors = [type(f.exception()) for f in futures]
    assert errors[0] is FatalIOError
    assert set(errors) <= {FatalIOError, ReadOnlyError}
    with pytest.raises(ReadOnlyError):
        group.commit_now(one(9))
    group.close()


def test_a_caller_that_gives_up_hurts_nobody(tmp_path: Path) -> None:
    files = GatedFiles()
    group = GroupCommit(ManifestLogWriter.open(Env(files=files), tmp_path, small())).start()
    files.gate.clear()
    first = group.submit(one(1), sync=True)
    files.arrived.wait()
    second, third = group.submit(one(2), sync=True), group.submit(one(3), sync=True)
    assert second.cancel()
    files.gate.set()
    assert first.result() < third.result()
    group.commit_now(one(4))
    group.close()
    assert [r[2] for r in written(tmp_path)] == [1, 3, 4]


@pytest.mark.expects_warnings
def test_a_hook_that_fails_does_not_end_the_log(tmp_path: Path) -> None:
    called = threading.Event()

    def on_sealed(_: SealedChunk) -> None:
        called.set()
        raise RuntimeError("the uploader's own business")

    group = GroupCommit(ManifestLogWriter.open(Env(), tmp_path, small(rotation_period_ms=1)), on_sealed=on_sealed)
    group.start()
    group.commit_now(one(1))
    assert called.wait(60)
    group.commit_now(one(2))
    group.close()
    assert [r[2] for r in written(tmp_path)] == [1, 2]


def test_closing_finishes_what_was_submitted_and_refuses_the_rest(tmp_path: Path) -> None:
    group = GroupCommit(ManifestLogWriter.open(Env(), tmp_path, small())).start()
    futures = [group.submit(one(i), sync=False) for i in range(100)]
    group.close()
    group.close()
    assert all(isinstance(f.result(), LogPosition) for f in futures)
    with pytest.raises(ReadOnlyError):
        group.submit(one(1), sync=True)
    with pytest.raises(ValueError, match="empty"):
        group.submit(RecordBatch(), sync=True)
    assert len(written(tmp_path)) == 100


def test_threads_wait_for_room_in_the_queue_and_the_loop_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "QUEUE_LEN_MAX", 4)
    files = GatedFiles()
    group = GroupCommit(ManifestLogWriter.open(Env(files=files), tmp_path, small()), commit_period_ms=60_000).start()
    files.gate.clear()
    first = group.submit(one(0), sync=True)
    files.arrived.wait()  # from here on the thread takes nothing
    submitted: list[int] = []

    def submit_ten() -> None:
        for i in range(1, 11):
            group.submit(one(i), sync=False)
            submitted.append(i)

    async def on_the_loop() -> list[object]:
        return [group.submit(one(100 + i), sync=False) for i in range(20)]

    futures = trio.run(on_the_loop)
    thread = threading.Thread(target=submit_ten)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and len(submitted) <= 4
    files.gate.set()
    thread.join()
    group.close()
    assert first.done() and all(f.done() for f in futures)  # type: ignore[attr-defined]
    assert sorted(int(str(r[2])) for r in written(tmp_path)) == [*range(11), *range(100, 120)]
