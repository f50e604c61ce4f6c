"""ENC/ASL-LOG/1 byte for byte, and what strict decoding refuses."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    Payload,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
    artifact_ref,
    decode_header,
    decode_payload,
    encode_header,
    encode_payload,
    encode_record,
    encode_ref,
)
from aof2.engine.audit.reader import Replay
from aof2.engine.errors import CorruptError, UnsupportedError
from tests.audit.build import HEADER, log_bytes, payload_bytes, ref, sample

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
HASH = st.binary(min_size=32, max_size=32)
REFS = st.one_of(
    st.builds(ArtifactRef, st.just(1), HASH),
    st.builds(ArtifactRef, U32.filter(lambda i: i != 1), st.binary(min_size=1, max_size=80)),
)
PAYLOADS = st.one_of(
    st.builds(SegmentSeal, U64, HASH),
    st.builds(Tombstone, REFS, U32, U32),
    st.builds(TombstoneLift, REFS, U64),
    st.builds(SnapshotAnchor, U64, HASH),
    st.builds(ArtifactPublish, REFS),
    st.builds(ArtifactUnpublish, REFS),
)


def test_golden_bytes() -> None:
    """A whole log spelled out in hex, its hashes made here."""
    digest = bytes(range(32))
    first = bytes.fromhex("0100000000000000 30000000 28000000 01000000 2000 0000") + digest
    first_hash = hashlib.sha256(bytes(32) + first).digest()
    second = bytes.fromhex("0200000000000000 10000000 30000000 01000000 2000 0000") + digest
    second += bytes.fromhex("03000000 04000000")
    second_hash = hashlib.sha256(first_hash + second).digest()
    third = bytes.fromhex("0300000000000000 11000000 30000000 01000000 2000 0000") + digest
    third += bytes.fromhex("0200000000000000")
    third_hash = hashlib.sha256(second_hash + third).digest()
    fourth = bytes.fromhex("0400000000000000 01000000 28000000 0807060504030201") + b"\xaa" * 32
    fourth_hash = hashlib.sha256(third_hash + fourth).digest()
    fifth = bytes.fromhex("0500000000000000 20000000 28000000 0100000000000000") + b"\xbb" * 32
    fifth_hash = hashlib.sha256(fourth_hash + fifth).digest()
    sixth = bytes.fromhex("0600000000000000 31000000 0a000000 05000000 0200 0000 c0de")
    sixth_hash = hashlib.sha256(fifth_hash + sixth).digest()
    golden = bytes.fromhex("41 53 4c 4c 4f 47 30 31 01000000 18000000 0000000000000000")
    golden += first + first_hash + second + second_hash + third + third_hash
    golden += fourth + fourth_hash + fifth + fifth_hash + sixth + sixth_hash

    artifact = ArtifactRef(1, digest)
    values: list[Payload] = [
        ArtifactPublish(artifact),
        Tombstone(artifact, 3, 4),
        TombstoneLift(artifact, 2),
        SegmentSeal(0x0102030405060708, b"\xaa" * 32),
        SnapshotAnchor(1, b"\xbb" * 32),
        ArtifactUnpublish(ArtifactRef(5, b"\xc0\xde")),
    ]
    made = encode_header()
    prev = bytes(32)
    for logseq, value in enumerate(values, 1):
        made += encode_record(prev, logseq, *encode_payload(value))
        prev = made[-32:]
    assert made == golden == log_bytes(values)
    assert [r.payload for r in Replay(golden)] == values
    assert prev == sixth_hash == encode_record(fifth_hash, 6, 0x31, sixth[16:])[-32:]


@given(PAYLOADS)
def test_payloads_round_trip_and_match_the_hand_made(payload: Payload) -> None:
    record_type, data = encode_payload(payload)
    assert (record_type, data) == payload_bytes(payload)
    assert decode_payload(record_type, data) == payload


@given(PAYLOADS, st.binary(min_size=1, max_size=9))
def test_a_payload_is_exactly_one(payload: Payload, more: bytes) -> None:
    record_type, data = encode_payload(payload)
    with pytest.raises(CorruptError):
        decode_payload(record_type, data + more)
    for cut in range(len(data)):
        with pytest.raises(CorruptError):
            decode_payload(record_type, data[:cut])


@given(st.sampled_from([0x01, 0x10, 0x11, 0x20, 0x30, 0x31]), st.binary(max_size=80))
def test_what_decodes_encodes_to_the_same_bytes(record_type: int, data: bytes) -> None:
    try:
        value = decode_payload(record_type, data)
    except CorruptError:
        return
    assert value is not None
    assert encode_payload(value) == (record_type, data)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<IHH", 1, 0, 0),
        struct.pack("<IHH", 1, 31, 0),
        struct.pack("<IHH", 1, 33, 0),
        struct.pack("<IHH", 1, 32, 1),
        struct.pack("<IHH", 9, 0xFFFF, 0),
        struct.pack("<IHH", 9, 0, 0),
    ],
    ids=["empty", "short", "long", "reserved", "lying", "unknown-empty"],
)
def test_artifact_rules(head: bytes) -> None:
    for tail in (bytes(32), bytes(31), bytes(33), b""):
        if head == struct.pack("<IHH", 1, 31, 0) and len(tail) != 31:
            continue
        with pytest.raises(CorruptError):
            decode_payload(0x30, head + tail)


def test_a_sha256_digest_has_32_bytes_others_any() -> None:
    assert decode_payload(0x30, struct.pack("<IHH", 9, 1, 0) + b"x") == ArtifactPublish(ArtifactRef(9, b"x"))
    with pytest.raises(ValueError, match="32 bytes"):
        encode_ref(ArtifactRef(1, b"short"))
    with pytest.raises(ValueError, match="1 to 65535"):
        encode_ref(ArtifactRef(2, b""))
    with pytest.raises(ValueError, match="1 to 65535"):
        encode_ref(ArtifactRef(2, bytes(65536)))
    with pytest.raises(ValueError, match="32 bytes"):
        encode_payload(SegmentSeal(1, b""))


def test_unknown_types_are_nobody_s_error() -> None:
    assert decode_payload(0x99, b"anything") is None


def test_artifact_ref_preimage() -> None:
    content = hashlib.sha256(b"bytes").digest()
    preimage = b"\x07\0\0\0default" + struct.pack("<QQ", 12, 3) + b"\x20\0\0\0" + content
    assert artifact_ref("default", 12, 3, content) == ArtifactRef(1, hashlib.sha256(preimage).digest())
    others = {
        artifact_ref(*args).digest
        for args in [
            ("default", 12, 3, content),
            ("default", 3, 12, content),
            ("defaul", 12, 3, content),
            ("default", 12, 4, content),
            ("default", 12, 3, content[:-1]),
            ("", 12, 3, content),
        ]
    }
    assert len(others) == 6


def header(magic: bytes = b"ASLLOG01", version: int = 1, size: int = 24, flags: int = 0) -> bytes:
    return struct.pack("<8sIIQ", magic, version, size, flags)


def test_header_policy() -> None:
    assert encode_header() == HEADER == header()
    assert decode_header(HEADER, 24) == 24
    assert decode_header(header(size=40), 40) == 40
    for bad in (header(version=2), header(version=2**32 - 1), header(flags=1), header(flags=1 << 63)):
        with pytest.raises(UnsupportedError, match="newer"):
            decode_header(bad, 1000)
    for bad in (header(magic=b"10GOLLSA"), header(version=0), header(size=23), header(size=0), header(size=1001)):
        with pytest.raises(CorruptError):
            decode_header(bad, 1000)
    for cut in range(24):
        with pytest.raises(CorruptError):
            decode_header(HEADER[:cut], cut)


def test_a_longer_header_is_skipped() -> None:
    plain = log_bytes(sample())
    longer = header(size=40) + b"sixteen more of." + plain[24:]
    assert [r.payload for r in Replay(longer)] == sample()
    assert next(iter(Replay(longer))).offset == 40


def test_a_newer_version_is_not_read_at_all() -> None:
    """A layout change means a new file: an old reader neither replays nor trims the newer one."""
    with pytest.raises(UnsupportedError):
        Replay(header(version=2) + log_bytes([ArtifactPublish(ref(1))])[24:]).run()
