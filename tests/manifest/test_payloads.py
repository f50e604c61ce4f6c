"""Payload bytes: exact sizes, round trips, refusal of what does not add up."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.errors import LimitError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import (
    EVENT_SCHEMA_MIN,
    PART_BODY_MAX,
    EventAssembler,
    RecordBatch,
    split_event,
)
from aof2.engine.manifest.format import ManifestIntegrityError, ReasonCode, RecordType

from .helpers import PAYLOADS

EXACT = [
    (p.SegmentOpened(1, 2), 0, "0100000000000000 02000000 00000000"),
    (p.SealSegment(1, 2, None), 1, "0100000000000000 0200000000000000"),
    (
        p.SealSegment(1, 2, 3, 4, 1),
        1,
        "0100000000000000 0200000000000000 0300000000000000 0400000000000000 01 00000000000000",
    ),
    (p.CompressionStarted(9), 2, "09000000 00000000"),
    (p.CompressionDone(1, 2), 3, "0100000000000000 02000000 00000000"),
    (p.CompressionFailed(1), 4, "01000000 00000000"),
    (p.UploadStarted("ab"), 5, "0200 6162 00000000"),
    (p.UploadDone("ab", "c"), 6, "0200 0100 6162 63 00"),
    (p.UploadFailed("ab", 3), 7, "0200 03000000 6162"),
    (p.Tier2DeleteQueued("a"), 8, "0100 61 0000000000"),
    (p.Tier2Deleted("a"), 9, "0100 61 0000000000"),
    (p.HydrationStarted(2), 10, "0200000000000000"),
    (p.HydrationDone(5), 11, "0500000000000000"),
    (p.HydrationFailed(4), 12, "04000000 00000000"),
    (p.LocalEvicted(6), 13, "0600000000000000"),
    (p.SnapshotMarker(1, 2, 3), 14, "0100000000000000 0200000000000000 0300000000000000"),
    (p.CustomEvent(7, b"xyz"), 15, "07000000 0300 78797a 00000000000000"),
]


@pytest.mark.parametrize(("payload", "type_id", "hex_bytes"), EXACT, ids=lambda v: str(v)[:30])
def test_bytes_are_exact(payload: p.Payload, type_id: int, hex_bytes: str) -> None:
    kind, data = p.encode(payload)
    assert kind == type_id
    assert data == bytes.fromhex(hex_bytes)
    assert p.decode(kind, data) == payload


def test_every_type_is_covered() -> None:
    assert {type_id for _, type_id, _ in EXACT} == {int(t) for t in RecordType}
    assert sorted(p.DECODERS) == list(range(16))
    assert [r.value for r in ReasonCode] == [0, 1, 2, 3, 4]
    assert RecordType.TIER2_DELETE_QUEUED.label == "Tier2DeleteQueued"


@given(PAYLOADS)
def test_round_trip(payload: p.Payload) -> None:
    kind, data = p.encode(payload)
    assert data
    assert len(data) % 8 == 0
    assert p.decode(kind, data) == payload


@given(st.integers(0, 15), st.binary(max_size=64))
def test_any_bytes_decode_or_are_refused(kind: int, data: bytes) -> None:
    try:
        payload = p.decode(kind, data)
    except ManifestIntegrityError:
        return
    assert p.encode(payload) == (kind, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (0, b""),
        (0, bytes(24)),
        (5, b"\xff\xff" + bytes(6)),
        (5, b"\x02\x00\xff\xfe" + bytes(4)),
        (6, b"\x01\x00\x01\x00abcd"),
        (15, struct.pack("<IH", 3, 0xFFFF) + b"ab"),
        (13, bytes(16)),
    ],
)
def test_lengths_that_lie_are_refused(kind: int, data: bytes) -> None:
    with pytest.raises(ManifestIntegrityError):
        p.decode(kind, data)


def test_limits() -> None:
    for bad in (p.UploadStarted(""), p.UploadStarted("x" * 1025), p.UploadDone("k", "e" * 1025)):
        with pytest.raises(LimitError):
            p.encode(bad)
    with pytest.raises(LimitError):
        p.encode(p.CustomEvent(20, bytes(65536)))
    assert len(p.encode(p.CustomEvent(20, bytes(65535)))[1]) == 65544
    with pytest.raises(ValueError, match="commit markers"):
        RecordBatch().add(p.CustomEvent(1, bytes(24)))


@given(st.binary(max_size=300), st.integers(EVENT_SCHEMA_MIN, 2**32 - 1))
def test_small_events_are_one_part(body: bytes, schema_id: int) -> None:
    (blob,) = split_event(5, schema_id, body)
    event = EventAssembler().feed(schema_id, blob)
    assert event == (5, schema_id, body)


@pytest.mark.parametrize("size", [0, 1, PART_BODY_MAX, PART_BODY_MAX + 1, 3 * PART_BODY_MAX + 17])
def test_large_events_come_back_only_when_whole(size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    blobs = list(split_event(9, 16, body))
    assembler = EventAssembler()
    *first, last = [assembler.feed(16, blob) for blob in blobs]
    assert first == [None] * (len(blobs) - 1)
    assert last == (9, 16, body)


def test_an_event_cut_short_is_dropped_and_counted() -> None:
    one = list(split_event(1, 16, bytes(PART_BODY_MAX + 1)))
    assembler = EventAssembler()
    assert assembler.feed(16, one[0]) is None
    (two,) = split_event(2, 16, b"x")
    assert assembler.feed(16, two) == (2, 16, b"x")
    assert assembler.incomplete == 1
    with pytest.raises(ManifestIntegrityError):
        assembler.feed(16, one[1])


@pytest.mark.parametrize("header", [(1, 0, 0), (1, 5, 5), (1, 0, 2**32 - 1)])
def test_parts_that_lie_are_refused(header: tuple[int, int, int]) -> None:
    with pytest.raises(ManifestIntegrityError):
        EventAssembler().feed(16, struct.pack("<QII", *header))
