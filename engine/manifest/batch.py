"""Records on their way into the log, and events larger than one record.

`RecordBatch` holds records as columns, so that one C call encodes them all. `split_event` cuts a body of any size into
CustomEvents of at most 64 KiB, each saying (batch id, i of n); `EventAssembler` puts them together again at replay and
gives a body out only when it is whole.

Owner: the thread that builds the batch; the writer thread once it is submitted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from aof2.engine.errors import LimitError
from aof2.engine.manifest import payloads
from aof2.engine.manifest.format import (
    BLOB_LEN_MAX,
    COMMIT_SCHEMA_ID,
    RECORD_HEADER_LEN,
    ManifestIntegrityError,
    RecordType,
)

# Schemas below this are the log's own (1: commit marker); their blobs have no part header.
EVENT_SCHEMA_MIN: Final = 16
# Written to disk. Never renumber. Any other schema is skipped and counted: a newer AOF2 wrote it.
COMMIT_OF_ROWS: Final = 16  # a commit of the catalog (catalog/batch.py)
LOG_MENDED: Final = 17  # files of the log that were damaged, and what became of them (replicate/mend.py)
USES_SAMPLED: Final = 18  # which files were used (recency/uses.py)
KNOWN_SCHEMAS: Final = frozenset((COMMIT_OF_ROWS, LOG_MENDED, USES_SAMPLED))
PART_HEADER: Final = Struct("<QII")  # batch_id, index, count
PART_BODY_MAX: Final = BLOB_LEN_MAX - PART_HEADER.size
EVENT_LEN_MAX: Final = 64 << 20
_COMMIT_SCHEMA: Final = COMMIT_SCHEMA_ID.to_bytes(4, "little")


class RecordBatch:
    """Records to append together, in order. Cheap to fill, encoded once."""

    __slots__ = ("lengths", "logical_offsets", "payloads", "segment_ids", "timestamps_ms", "types")

    def __init__(self) -> None:
        self.types = array("H")
        self.segment_ids = array("Q")
        self.logical_offsets = array("Q")
        self.timestamps_ms = array("Q")
        self.lengths = array("I")
        self.payloads = bytearray()

    def __len__(self) -> int:
        return len(self.types)

    @property
    def encoded_len(self) -> int:
        return len(self.types) * RECORD_HEADER_LEN + len(self.payloads)

    def add(
        self, payload: payloads.Payload, *, segment_id: int = 0, logical_offset: int = 0, timestamp_ms: int = 0
    ) -> None:
        kind, data = payloads.encode(payload)
        self.add_encoded(kind, data, segment_id, logical_offset, timestamp_ms)

    def add_encoded(self, kind: int, data: bytes, segment_id: int, logical_offset: int, timestamp_ms: int) -> None:
        """`data` is a payload as `payloads.encode` gives it: padded, not empty. Timestamp 0 becomes the append's."""
        if kind == RecordType.CUSTOM_EVENT and data[:4] == _COMMIT_SCHEMA:
            raise ValueError("commit markers are written by commit alone")
        self.types.append(kind)
        self.segment_ids.append(segment_id)
        self.logical_offsets.append(logical_offset)
        self.timestamps_ms.append(timestamp_ms)
        self.lengths.append(len(data))
        self.payloads += data

    def add_of_each(
        self,
        payload: payloads.Payload,
        segment_ids: Sequence[int],
        logical_offsets: Sequence[int] | None = None,
        *,
        timestamp_ms: int = 0,
    ) -> None:
        """The same record of many segments."""
        kind, data = payloads.encode(payload)
        count = len(segment_ids)
        self.types.extend(array("H", [kind]) * count)
        self.segment_ids.extend(segment_ids)
        self.logical_offsets.extend(logical_offsets if logical_offsets is not None else array("Q", [0]) * count)
        self.timestamps_ms.extend(array("Q", [timestamp_ms]) * count)
        self.lengths.extend(array("I", [len(data)]) * count)
        self.payloads += data * count

    def add_columns(
        self,
        payload_type: type[payloads.Payload],
        segment_ids: Sequence[int],
        *fields: Sequence[int],
        logical_offsets: Sequence[int] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Many records of one fixed-size type, a column a field: what a sweep over thousands of chunks writes."""
        kind, packed = payloads.PADDED[payload_type]
        count = len(segment_ids)
        body = b"".join(map(packed.pack, *fields))
        offsets = array("Q", logical_offsets if logical_offsets is not None else bytes(8 * count))
        if len(body) != count * packed.size or len(offsets) != count:
            raise ValueError(f"{count} segments need {count} values in each column")
        ids = array("Q", segment_ids)
        self.types.extend(array("H", [kind]) * count)
        self.segment_ids.extend(ids)
        self.logical_offsets.extend(offsets)
        self.timestamps_ms.extend(array("Q", [timestamp_ms]) * count)
        self.lengths.extend(array("I", [packed.size]) * count)
        self.payloads += body

    def add_event(self, batch_id: int, schema_id: int, body: bytes) -> None:
        for blob in split_event(batch_id, schema_id, body):
            self.add_encoded(RecordType.CUSTOM_EVENT, payloads.encode_event(schema_id, blob), 0, 0, 0)

    def extend(self, other: RecordBatch) -> None:
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))

    def stamp(self, now_ms: int) -> None:
        """Gives records without a timestamp this one."""
        stamps = self.timestamps_ms
        if 0 in stamps:
            for i, value in enumerate(stamps):
                if not value:
                    stamps[i] = now_ms

    def rows(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        """(type, segment_id, logical_offset, timestamp_ms, payload) of each record."""
        pos = 0
        columns = (self.types, self.segment_ids, self.logical_offsets, self.timestamps_ms, self.lengths)
        for kind, segment_id, logical, stamp, length in zip(*columns, strict=True):
            yield kind, segment_id, logical, stamp, bytes(self.payloads[pos : pos + length])
            pos += length


def split_event(batch_id: int, schema_id: int, body: bytes) -> Iterator[bytes]:
    """The blobs of the CustomEvents that carry `body`; an empty body is one part."""
    if schema_id < EVENT_SCHEMA_MIN:
        raise ValueError(f"schema {schema_id} is the log's own; events start at {EVENT_SCHEMA_MIN}")
    if len(body) > EVENT_LEN_MAX:
        raise LimitError(f"an event has at most {EVENT_LEN_MAX} bytes, this one has {len(body)}")
    count = max(1, -(-len(body) // PART_BODY_MAX))
    for index in range(count):
        part = body[index * PART_BODY_MAX : (index + 1) * PART_BODY_MAX]
        yield PART_HEADER.pack(batch_id, index, count) + part


class Event(NamedTuple):
    """A whole event as it was given to `add_event`."""

    batch_id: int
    schema_id: int
    body: bytes


class EventAssembler:
    """Feeds on CustomEvents in log order; returns an event with its last part, never a partial one."""

    def __init__(self) -> None:
        self.incomplete = 0
        self._key: tuple[int, int, int] | None = None
        self._parts: list[bytes] = []

    def feed(self, schema_id: int, blob: bytes) -> Event | None:
        if len(blob) < PART_HEADER.size:
            raise ManifestIntegrityError(f"an event of schema {schema_id} has {len(blob)} bytes, too few for its parts")
        batch_id, index, count = PART_HEADER.unpack_from(blob)
        if not 0 < count <= EVENT_LEN_MAX // PART_BODY_MAX + 1 or index >= count:
            raise ManifestIntegrityError(f"event {batch_id} claims to be part {index} of {count}")
        key = (batch_id, schema_id, count)
        if index == 0:
            self.drop()
            self._key = key
        elif key != self._key or index != len(self._parts):
            raise ManifestIntegrityError(f"part {index} of {count} of event {batch_id} does not follow its others")
        self._parts.append(blob[PART_HEADER.size :])
        if len(self._parts) < count:
            return None
        event = Event(batch_id, schema_id, b"".join(self._parts))
        self._key, self._parts = None, []
        return event

    def drop(self) -> None:
        """Forgets an event whose end never came; counted, because a whole commit cannot leave one."""
        if self._parts:
            self.incomplete += 1
        self._key, self._parts = None, []
