"""What is left of a range with damaged records: the whole ones, and where each of the others should be.

A damaged header tells neither its offset nor its length for certain. But offsets have no gaps, so every header says by
its own offset where its payload begins: the records behind a damaged one are found again, and what the damaged one
claims is believed by none of them. The same goes for the range itself: the headers it was cut by may be damaged.

Owner: pure functions. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from aof2.engine.segment.index import RecordRange
from aof2.engine.spark.streams import RECORD, Segment
from aof2.native.segment_index import index_check, index_starts

_LENGTH_AND_OFFSET = Struct("<I4xQ")


@dataclass(frozen=True, slots=True)
class Good:
    """Records that follow one another, all of them whole."""

    records: RecordRange


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that is not: where it should be, as far as it and its neighbours tell. Less of it may be there."""

    logical_offset: int
    length: int


def salvage(segment: Segment, headers: memoryview, payload: memoryview) -> Iterator[Good | Bad]:
    """`headers` are those of consecutive records, `payload` is what there is of the segment's payload file."""
    at, count = 0, len(headers) // RECORD
    floor = segment.base_offset  # behind the last record that is whole
    while at < count:
        length, logical = _LENGTH_AND_OFFSET.unpack_from(headers, at * RECORD)
        plausible = floor <= logical <= segment.end_offset
        whole = _whole(segment, headers[at * RECORD :], logical, payload) if plausible else None
        if whole:
            yield Good(whole)
            at += whole.count
            floor = segment.base_offset + int(whole.starts[-1])
            continue
        offset = logical if plausible else floor
        yield Bad(offset, min(length, segment.end_offset - offset))
        at += 1


def _whole(segment: Segment, headers: memoryview, logical: int, payload: memoryview) -> RecordRange | None:
    """The whole records at the front; None if the first is not."""
    found = index_starts(headers, next_logical=logical, start=logical - segment.base_offset)
    ordered = headers[: found.good * RECORD]
    good = index_check(ordered, found.starts[: found.good + 1], payload, 0)
    return RecordRange(headers[: good * RECORD], found.starts[: good + 1], 0) if good else None
