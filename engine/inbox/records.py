"""Records, staged: cut into segments as long as the stream's, each a payload blob and an index blob.

The payload stays where it is put: it will be the payload file's chunk. Offsets, times and checksums of the records
depend on where in the stream they come to lie, so the index is staged with offsets from 0 on, and the writer makes the
stream's own of it.

Invariants: a record is in one segment; none is empty or longer than the door allows; their order is that of `add`.

Owner: one thread. A crash leaves what `stage.py` says.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from aof2.engine.errors import LimitError
from aof2.engine.inbox.stage import Attempt
from aof2.engine.segment import format as fmt
from aof2.engine.segment.staged import StagedIndex
from aof2.native.segment_index import RECORD_HEADER_LEN

_FIXED: Final = fmt.HEADER_BYTES[fmt.Version.V3] + fmt.FOOTER_BYTES[fmt.Version.V3]
BATCH_BYTES: Final = 4 << 20


class RecordStage:
    """Records of one attempt."""

    def __init__(self, attempt: Attempt, *, segment_bytes: int, record_max_bytes: int) -> None:
        self._attempt = attempt
        self._room = segment_bytes - _FIXED
        self._record_max = record_max_bytes
        self._begin()
        self.records = 0

    def _begin(self) -> None:
        self._index = StagedIndex(time.time_ns() // 1_000_000)
        self._payload = bytearray()
        self._headers = bytearray()

    def add(self, payload: memoryview, lengths: memoryview, ext_ids: memoryview, flags: memoryview) -> None:
        """Records whose payloads lie one behind the other. LimitError for one that no stream takes."""
        if len(lengths) and not 0 < min(lengths) <= max(lengths) <= self._record_max:
            raise LimitError(f"a record has 1 to {self._record_max} bytes here; one has {_odd(lengths)}")
        ends = list(accumulate(lengths, initial=0))
        first = 0
        while first < len(lengths):
            count = self._fitting(ends, first)
            if not count:
                self.flush()
                continue
            part = payload[ends[first] : ends[first + count]]
            of = slice(first, first + count)
            self._headers += self._index.add(part, lengths[of], ext_ids[of], flags[of])
            self._payload += part
            self.records += count
            first += count

    def add_payloads(self, payloads: Iterable[bytes]) -> None:
        """One record each."""
        some: list[bytes] = []
        size = 0
        for payload in payloads:
            some.append(payload)
            size += len(payload)
            if size >= BATCH_BYTES:
                self._add_some(some)
                some, size = [], 0
        self._add_some(some)

    def _add_some(self, payloads: list[bytes]) -> None:
        count = len(payloads)
        lengths = memoryview(array("I", map(len, payloads)))
        ext_ids, flags = memoryview(array("Q", bytes(8 * count))), memoryview(array("I", bytes(4 * count)))
        self.add(memoryview(b"".join(payloads)), lengths, ext_ids, flags)

    def _fitting(self, ends: list[int], first: int) -> int:
        """How many records from there on the segment has room for."""
        room = self._room - self._index.raw_bytes
        low, high = 0, len(ends) - 1 - first
        while low < high:
            middle = (low + high + 1) // 2
            if ends[first + middle] - ends[first] + middle * RECORD_HEADER_LEN <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def flush(self) -> None:
        """What is there becomes a segment."""
        if self._index.records:
            payload = self._attempt.put_chunk(self._payload)
            index = self._attempt.put_chunk(self._index.head() + self._headers)
            self._attempt.add_segment(payload, index, self._index.records)
        self._begin()


def _odd(lengths: memoryview) -> int:
    return 0 if not min(lengths) else max(lengths)
