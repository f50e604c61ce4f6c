"""Random operations against a plain model: replay(log) = replay(snapshot + tail) = model, whatever comes between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest import retention
from aof2.engine.manifest.batch import Event, RecordBatch
from aof2.engine.manifest.chunk import mark_uploaded
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.snapshot import list_snapshots
from aof2.engine.manifest.writer import ManifestLogWriter
from tests.manifest.replay import replay, take_snapshot

from .helpers import PAYLOADS, plain, small

ROWS = st.tuples(PAYLOADS, st.integers(0, 6), st.integers(0, 2**64 - 1))


class LogMachine(RuleBasedStateMachine):
    """The model is a list of committed rows and the state they fold to."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.whole = Path(tempfile.mkdtemp())  # every chunk ever sealed, never retained away
        self.env = Env(seed=0)
        self.writer = self.reopened()
        self.committed: list[tuple[p.Payload, int, int]] = []
        self.staged: list[tuple[p.Payload, int, int]] = []
        self.events: list[bytes] = []
        self.staged_events: list[bytes] = []
        self.last: LogPosition | None = None

    def reopened(self) -> ManifestLogWriter:
        return ManifestLogWriter.open(self.env, self.directory, small(durable=False))

    def teardown(self) -> None:
        self.writer.close()
        shutil.rmtree(self.directory)
        shutil.rmtree(self.whole)

    @rule(row=ROWS)
    def append(self, row: tuple[p.Payload, int, int]) -> None:
        payload, segment_id, stamp = row
        self.writer.append(payload, segment_id=segment_id, timestamp_ms=stamp or 1)
        self.staged.append((payload, segment_id, stamp or 1))

    @rule(rows=st.lists(ROWS, min_size=1, max_size=30))
    def append_batch(self, rows: list[tuple[p.Payload, int, int]]) -> None:
        batch = RecordBatch()
        for payload, segment_id, stamp in rows:
            batch.add(payload, segment_id=segment_id, timestamp_ms=stamp or 1)
            self.staged.append((payload, segment_id, stamp or 1))
        self.writer.append_batch(batch)

    @rule(size=st.sampled_from([0, 10, 5000, 70_000]))
    def append_event(self, size: int) -> None:
        body = bytes([len(self.events) % 256]) * size
        batch = RecordBatch()
        batch.add_event(len(self.events), 16, body)
        self.writer.append_batch(batch)
        self.staged_events.append(body)

    @rule()
    def commit(self) -> None:
        self.writer.commit()
        self.settle()

    def settle(self) -> None:
        self.committed += self.staged
        self.events += self.staged_events
        self.staged, self.staged_events = [], []

    @rule()
    def rotate(self) -> None:
        sealed = self.writer.rotate()
        self.settle()
        if sealed:
            shutil.copy(sealed.path, self.whole / sealed.path.name)
            mark_uploaded(self.env, sealed.path, sync=False)

    @rule()
    def snapshot(self) -> None:
        self.writer.commit()
        self.settle()
        taken = take_snapshot(self.writer, replay(self.directory))
        self.committed.append(
            (p.SnapshotMarker(taken.position.chunk_index, taken.position.chunk_offset, taken.snapshot_id),
             LOG_SEGMENT_ID, 0)
        )  # fmt: skip
        self.last = taken.position

    @precondition(lambda self: self.last is not None)
    @rule()
    def retain(self) -> None:
        retention.apply(self.env, self.directory, self.last)

    @rule()
    def close_and_reopen(self) -> None:
        self.writer.close()
        self.settle()
        self.writer = self.reopened()

    @rule()
    def die_and_reopen(self) -> None:
        """What was not committed is gone; nothing else is."""
        self.writer._chunk = None  # the mapping and the lock go with the process
        self.writer.close()
        self.staged, self.staged_events = [], []
        self.writer = self.reopened()

    def model(self) -> ManifestIndex:
        index = ManifestIndex()
        for payload, segment_id, stamp in self.committed:
            kind, data = p.encode(payload)
            index.apply(kind, segment_id, stamp, data)
        return index

    @invariant()
    def replay_gives_the_model(self) -> None:
        assert replay(self.directory).same_state(self.model())

    @invariant()
    def the_whole_log_gives_it_too(self) -> None:
        for path in self.directory.glob("*.mlog"):
            shutil.copy(path, self.whole / path.name)
        if not list(self.whole.iterdir()):
            return
        rows = plain(list(Stream(self.whole).records()))
        events: list[Event] = []
        index = replay(self.whole, on_event=events.append)
        assert [e.body for e in events] == self.events
        assert index.same_state(self.model())
        assert len([r for r in rows if not (r[1] == 15 and r[2] == 0 and r[5][:4] == b"\x10\0\0\0")]) == len(
            self.committed
        )  # type: ignore[index]

    @invariant()
    def snapshots_stay_few(self) -> None:
        assert len(list_snapshots(self.directory)) < 60


LogMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLog = LogMachine.TestCase
