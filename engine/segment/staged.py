"""Records that are to come into a stream later: payloads back to back, and an index of them with offsets from 0 on.

The stream gives them other offsets, times that do not go back, and checksums anew, when it takes them in
(`append/delivery.py`, `append/arriving.py`).

Invariants: header and footer are made last, so what was begun and not ended is no index.

Owner: one thread. A crash leaves nothing: the bytes are its user's.
"""

from __future__ import annotations

from typing import Final

from aof2.engine.segment import format as fmt
from aof2.native import Buffer, crc64
from aof2.native.segment_index import RECORD_HEADER_LEN, index_encode

_HEADER: Final = fmt.HEADER_BYTES[fmt.Version.V3]
_SEGMENT_ID: Final = 1  # the stream gives it another


class StagedIndex:
    """Of one payload file, while that is being written."""

    def __init__(self, time_ms: int) -> None:
        size = fmt.U32_MAX  # no limit of its own: the stream has one
        self._time_ms = time_ms
        self._header = fmt.SegmentHeader(int(fmt.Version.V3), 0, _SEGMENT_ID, time_ms, 0, 0, size, 0)
        self._crc64 = crc64(fmt.encode_header(self._header))
        self.payload_bytes = 0
        self.records = 0

    @property
    def raw_bytes(self) -> int:
        """What the records take in a segment, headers included."""
        return self.payload_bytes + self.records * RECORD_HEADER_LEN

    def add(self, payload: Buffer, lengths: memoryview, ext_ids: memoryview, flags: memoryview) -> bytearray:
        """The headers of records whose payloads lie one behind the other."""
        encoded = index_encode(
            *(payload, lengths, ext_ids, flags),
            timestamp_ms=self._time_ms,
            logical_first=self.payload_bytes,
            crc64=self._crc64,
        )
        self._crc64 = encoded.crc64
        self.records += len(lengths)
        self.payload_bytes += memoryview(payload).nbytes
        return encoded.headers

    def head(self) -> bytes:
        """What stands before the headers."""
        footer = fmt.SegmentFooter(
            *(int(fmt.Version.V3), self.records, _HEADER + self.raw_bytes, self._crc64),
            segment_id=_SEGMENT_ID,
            last_record_ts_ms=self._time_ms,
        )
        return fmt.encode_header(self._header) + fmt.encode_footer(footer)
