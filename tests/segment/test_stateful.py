"""A stream under random use against a plain list: appends, flushes, seals, crashes, torn tails."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aof2.engine.env import Env
from aof2.engine.segment.format import Pointer, Version
from aof2.engine.segment.model import POINTER_NAME, SealedSegment, segment_path
from aof2.engine.segment.pointer import load_pointer, publish
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.state import StreamState
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import STREAM_ID, Rec, append, create, read_all

CAPACITY = 4096
SECTOR = 512


class StreamMachine(RuleBasedStateMachine):
    """`records` is the truth; the first `flushed` of them may never be lost."""

    @initialize(version=st.sampled_from([2, 3]))
    def start(self, version: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="aof2-stream-"))
        self.version = version
        self.records: list[Rec] = []
        self.flushed = 0
        self.sealed_ids: list[int] = []
        self.watermark = 0
        self.unpublished: SealedSegment | None = None
        self.writer: SegmentWriter | None = None
        self.durable_offset = 0  # of the active file, as recovery left it
        self.next_id, self.next_logical = 0, 0
        self.clock_ms = 0
        self.env = Env(now_ms=lambda: self.clock_ms)

    def teardown(self) -> None:
        if self.writer:
            self.writer.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def open_writer(self) -> SegmentWriter:
        if self.writer is None:
            self.publish()
            self.writer = create(
                self.directory,
                self.version,
                self.next_id,
                env=self.env,
                base_offset=self.next_logical,
                base_record_count=len(self.records),
                capacity=CAPACITY,
                reserve_step_bytes=600,
            )
            self.durable_offset = 0
            self.next_id += 1
        return self.writer

    @rule(
        payload=st.binary(max_size=200),
        gap=st.sampled_from([0, 0, 0, 17]),
        ext_id=st.integers(0, 2**64 - 1),
        flags=st.integers(0, 3),
    )
    def append(self, payload: bytes, gap: int, ext_id: int, flags: int) -> None:
        if self.version == Version.V2:
            payload, ext_id = payload.replace(b"\0", b"!") or b"!", 0  # zeros hide a lost v2 header
        writer = self.open_writer()
        if not writer.room_for(len(payload)):
            self.seal(watermark_step=1)
            writer = self.open_writer()
        self.clock_ms += 1
        rec = Rec(payload, writer.next_logical_offset + gap, self.clock_ms, ext_id, flags)
        append(writer, rec)
        self.records.append(rec)
        self.next_logical = rec.logical_offset + len(payload)

    @rule(payloads=st.lists(st.binary(min_size=1, max_size=40).filter(all), max_size=6))
    def append_many(self, payloads: list[bytes]) -> None:
        writer = self.open_writer()
        if not writer.room_for(sum(map(len, payloads)), len(payloads)):
            return
        self.clock_ms += 1
        logical = writer.append_many(payloads).logical_offset
        for payload in payloads:
            self.records.append(Rec(payload, logical, self.clock_ms))
            logical += len(payload)
        self.next_logical = logical

    @precondition(lambda self: self.writer)
    @rule()
    def flush(self) -> None:
        assert self.writer is not None
        self.writer.flush()
        self.flushed = len(self.records)

    @precondition(lambda self: self.writer and self.writer.record_count)
    @rule(watermark_step=st.integers(1, 5))
    def seal(self, watermark_step: int) -> None:
        assert self.writer is not None
        self.watermark += watermark_step
        self.unpublished = self.writer.seal(self.watermark)
        self.sealed_ids.append(self.unpublished.segment_id)
        self.writer = None
        self.flushed = len(self.records)

    @precondition(lambda self: self.unpublished)
    @rule()
    def publish(self) -> None:
        if self.unpublished:
            publish(self.env, self.directory, self.unpublished, coordinator_watermark=self.watermark)
            self.unpublished = None

    @rule()
    def lose_pointer(self) -> None:
        if self.version == Version.V3:  # a v2 stream's watermark is in the pointer alone
            (self.directory / POINTER_NAME).unlink(missing_ok=True)

    @rule(lost=st.lists(st.booleans(), max_size=CAPACITY // SECTOR))
    def crash(self, lost: list[bool]) -> None:
        """The process ends. With `lost`, so does the power: those sectors never got what was not flushed."""
        if self.writer:
            start = max(self.writer.flushed_offset, self.durable_offset)
            data = bytearray(self.writer.path.read_bytes())
            for n in (n for n, gone in enumerate(lost) if gone):
                begin, end = max(start, n * SECTOR), min(len(data), (n + 1) * SECTOR)
                data[begin:end] = bytes(max(0, end - begin))
            self.writer.path.write_bytes(data)
            self.writer.close()
            self.writer = None
        self.unpublished = None
        self.recover(torn=any(lost))

    def recover(self, *, torn: bool) -> None:
        state = recover_stream(self.env, self.directory, stream_id=STREAM_ID)
        found = self.read(*state.older_ids, *(s.segment_id for s in state.sealed))
        found += read_all(state.active.path) if state.active else []
        assert found == self.records[: len(found)]
        assert not state.damaged and not state.unsealed
        if torn:
            assert len(found) >= self.flushed
        else:
            assert len(found) == len(self.records)
        self.adopt(state, found)

    def adopt(self, state: StreamState, found: list[Rec]) -> None:
        assert state.total_record_count == len(found)
        if self.version == Version.V3 or self.sealed_ids == []:
            assert state.coordinator_watermark == self.watermark
        self.records = found
        self.flushed = len(found)
        self.next_id = state.next_segment_id
        self.next_logical = state.next_logical_offset
        if found:
            assert self.next_logical >= found[-1].logical_offset + len(found[-1].payload)
        self.durable_offset = state.active.end_offset if state.active else 0
        if state.active:
            self.writer = SegmentWriter.reopen(self.env, state.active, capacity=CAPACITY, reserve_step_bytes=600)

    def read(self, *ids: int) -> list[Rec]:
        return [rec for i in ids for rec in read_all(segment_path(self.directory, i))]

    @invariant()
    def pointer_names_a_sealed_segment(self) -> None:
        pointer = load_pointer(self.directory) if hasattr(self, "directory") else None
        if isinstance(pointer, Pointer):
            assert pointer.segment_id in self.sealed_ids
            with SegmentReader(self.env, segment_path(self.directory, pointer.segment_id)) as reader:
                assert reader.verify().end_offset == pointer.durable_bytes


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestStream.pytestmark = [pytest.mark.expects_warnings]
