"""Records of a log chunk as columns: verified and split by the native scan, payloads looked at by numpy.

Every record begins at a multiple of 8, and so does its payload; so a chunk is an array of u64, and the first word of
each payload is one gather. Only remote keys are decoded one by one, and each of them once.

Owner: pure. A crash leaves nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aof2 import native
from aof2.engine.manifest import payloads, tier_events
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, RECORD_HEADER_LEN, TYPE_COUNT, RecordType
from aof2.engine.manifest.reader import Chunk

U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

LABELS: Final = tuple(RecordType(number).label for number in range(TYPE_COUNT))
KEYED: Final = (
    RecordType.UPLOAD_STARTED,
    RecordType.UPLOAD_DONE,
    RecordType.UPLOAD_FAILED,
    RecordType.TIER2_DELETE_QUEUED,
    RecordType.TIER2_DELETED,
)
_HAS_VALUE: Final = np.isin(
    np.arange(TYPE_COUNT), [t for t in RecordType if t not in KEYED and t is not RecordType.CUSTOM_EVENT]
)
_IS_KEYED: Final = np.isin(np.arange(TYPE_COUNT), KEYED)
_HALF: Final = np.uint64(0xFFFF_FFFF)


class Columns(NamedTuple):
    """`value`: what the record counts: bytes, a tier (HydrationStarted), a reason; else 0. `schema_id`: of
    CustomEvents. `key`: which of `keys` it names, −1 for none."""

    ordinal: U64
    chunk_offset: U64
    type_id: NDArray[np.uint16]
    segment_id: U64
    logical_offset: U64
    timestamp_ms: U64
    payload_len: NDArray[np.uint32]
    schema_id: NDArray[np.uint32]
    value: U64
    key: NDArray[np.int32]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.ordinal)

    def where(self, mask: Mask) -> Columns:
        """Those records alone."""
        columns: Any = (column[mask] for column in self[:-1])
        made: Any = [*columns, self.keys]
        return Columns(*made)

    def of_type(self, *types: RecordType) -> Mask:
        found: Mask = np.isin(self.type_id, types)
        return found


def columns_of(chunk: Chunk, from_offset: int = CHUNK_HEADER_LEN) -> Columns:
    """The records that start at or after `from_offset`, where one starts."""
    first = chunk.row_at(from_offset)
    rows = [np.frombuffer(column, dtype=column.format)[first : chunk.count] for column in chunk.rows]
    offset, kind, _, payload_len, segment_id, logical_offset, timestamp_ms = rows
    words = np.frombuffer(chunk.data, dtype="<u8", count=len(chunk.data) // 8)
    at = (offset >> np.uint64(3)).astype(np.int64) + RECORD_HEADER_LEN // 8
    word = words[at] if len(at) else np.empty(0, np.uint64)
    known = np.minimum(kind, TYPE_COUNT - 1)
    is_known = kind < TYPE_COUNT
    is_event = kind == RecordType.CUSTOM_EVENT
    value = np.where(_HAS_VALUE[known] & is_known, word, np.uint64(0))
    schema_id = np.where(is_event, word & _HALF, np.uint64(0)).astype(np.uint32)
    dropped = np.flatnonzero(is_event & (schema_id == tier_events.WARM_DROPPED) & (payload_len >= 16))
    # Its u64 begins 6 bytes into the payload: two bytes of the first word, six of the second.
    value[dropped] = word[dropped] >> np.uint64(48) | words[at[dropped] + 1] << np.uint64(16)
    codes, keys = _keys(chunk, np.flatnonzero(_IS_KEYED[known] & is_known), words[at - 1], offset, kind, payload_len)
    return Columns(
        np.arange(len(offset), dtype=np.uint64) + np.uint64(chunk.header.base_record + first),
        offset,
        kind,
        segment_id,
        logical_offset,
        timestamp_ms,
        payload_len,
        schema_id,
        value,
        codes,
        keys,
    )


def _keys(
    chunk: Chunk, rows: NDArray[Any], crc: U64, offset: U64, kind: NDArray[Any], length: NDArray[Any]
) -> tuple[NDArray[np.int32], list[str]]:
    """Remote keys: equal payloads, told by the crc64 that each record has anyway, are decoded once."""
    codes = np.full(len(offset), -1, np.int32)
    keys: dict[str, int] = {}
    same: dict[tuple[int, int], int] = {}
    for row, slot in zip(rows.tolist(), zip(kind[rows].tolist(), crc[rows].tolist(), strict=True), strict=True):
        code = same.get(slot)
        if code is None:
            start = int(offset[row]) + RECORD_HEADER_LEN
            payload: Any = payloads.decode(slot[0], bytes(chunk.data[start : start + int(length[row])]))
            code = same[slot] = keys.setdefault(payload.key, len(keys))
        codes[row] = code
    return codes, list(keys)


def event_blobs(chunk: Chunk, columns: Columns, schema_id: int) -> list[bytes]:
    """The blobs of the chunk's CustomEvents of that schema, in order."""
    found = []
    for row in np.flatnonzero(columns.schema_id == schema_id).tolist():
        start = int(columns.chunk_offset[row]) + RECORD_HEADER_LEN
        payload: Any = payloads.decode(
            RecordType.CUSTOM_EVENT, bytes(chunk.data[start : start + int(columns.payload_len[row])])
        )
        found.append(payload.blob)
    return found


def key_marks(keys: list[str]) -> U64:
    """A number for each key, the same wherever it is met."""
    return np.array([native.crc64(key.encode()) for key in keys] or [0], dtype=np.uint64)
