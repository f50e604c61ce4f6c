"""Partitions: records of segments within bounds, cut at records so that each is about as much work as the next.

A partition is one range of a segment, as a rule. Segments much smaller than a partition share one, in their order: a
task costs Spark tens of milliseconds before it reads a byte.

Invariants: every record within the bounds is in exactly one range; a range knows where its first payload begins, so
that a task reads its own headers and payloads and nothing else.

Owner: frozen values, made in Spark's planner and sent to its tasks. Crash: nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from aof2.engine.spark.filters import Bounds
from aof2.engine.spark.streams import RECORD, IndexFile, Segment

RANGE_COST_BYTES: Final = 256 << 10  # what opening two more files weighs beside reading


@dataclass(frozen=True, slots=True)
class Range:
    """Records [first, first + count) of a segment; by their headers they are offsets [logical_start, logical_end)."""

    segment: Segment
    first: int
    count: int
    logical_start: int
    logical_end: int

    @property
    def payload_start(self) -> int:
        return self.logical_start - self.segment.base_offset

    @property
    def payload_end(self) -> int:
        return self.logical_end - self.segment.base_offset

    @property
    def work_bytes(self) -> int:
        return max(0, self.logical_end - self.logical_start) + self.count * RECORD + RANGE_COST_BYTES


def ranges(segments: Iterable[Segment], bounds: Bounds, partition_bytes: int) -> Iterator[Range]:
    """Header and footer tell which segments have nothing within the bounds; the index of others, where to cut."""
    offsets, times = bounds.offsets, bounds.times_ms
    for segment in segments:
        if segment.end_offset <= offsets.start or segment.base_offset >= offsets.end:
            continue
        if segment.last_ms < times.start or segment.first_ms >= times.end:
            continue
        with IndexFile(segment) as index:
            yield from _cut(segment, index, bounds, partition_bytes)


def _cut(segment: Segment, index: IndexFile, bounds: Bounds, partition_bytes: int) -> Iterator[Range]:
    first, end = _selected(segment, index, bounds)
    if first >= end:
        return
    low, high = (min(max(segment.base_offset, index.logical_offset(i)), segment.end_offset) for i in (first, end))
    work_bytes = segment.payload_bytes + segment.record_count * RECORD
    step = max(1, partition_bytes * segment.payload_bytes // work_bytes)
    pieces = min(max(1, -(-(high - low) // step)), end - first)
    cuts = {index.near(low + (high - low) * i // pieces) for i in range(1, pieces)}
    for start, stop in pairwise([first, *sorted(c for c in cuts if first < c < end), end]):
        yield Range(segment, start, stop - start, index.logical_offset(start), index.logical_offset(stop))


def _selected(segment: Segment, index: IndexFile, bounds: Bounds) -> tuple[int, int]:
    """Records within the bounds: from the first up to before the second."""
    first, end = 0, segment.record_count
    offsets, times = bounds.offsets, bounds.times_ms
    if offsets.start > segment.base_offset:
        first = index.find(offsets.start)
    if offsets.end < segment.end_offset:
        end = index.find(offsets.end)
    if times.start > segment.first_ms:
        first = max(first, index.find_time(times.start))
    if times.end <= segment.last_ms:
        end = min(end, index.find_time(times.end))
    return first, end


def partitions(found: Iterable[Range], partition_bytes: int) -> list[tuple[Range, ...]]:
    """Ranges in order, small ones together."""
    groups: list[list[Range]] = []
    room = 0
    for piece in found:
        if not groups or piece.work_bytes > room:
            groups.append([])
            room = partition_bytes + RANGE_COST_BYTES
        groups[-1].append(piece)
        room -= piece.work_bytes
    return [tuple(group) for group in groups]
