"""The blob's bytes, and what a strict footer refuses."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.blob.format import ENTRY, TRAILER, Codec, decode_footer, encode_footer, needed_tail
from aof2.engine.blob.reader import BlobReader
from aof2.engine.errors import CorruptError, UnsupportedError
from tests.blob.build import encode_blob, entry, mixed, read_all, slow_crc64, trailer, zstd


def test_the_crc_here_is_crc64_nvme() -> None:
    assert slow_crc64(b"123456789") == 0xAE8B14860A799888


def test_sizes() -> None:
    assert (ENTRY.size, TRAILER.size) == (16, 104)


def test_golden_bytes() -> None:
    """Three blocks, the middle one compressible, built by hand."""
    noise, text, rest = random.Random(2).randbytes(4096), (b"tier " * 820)[:4096], b"the end"
    raw = noise + text + rest
    stored = [noise, zstd(text), rest]
    entries = entry(noise, noise, 0) + entry(text, zstd(text), 1) + entry(rest, rest, 0)
    golden = b"".join(stored) + entries + trailer(entries, raw)
    assert encode_blob(raw, chunk_id=7, generation=3, block_bytes=4096) == golden
    assert golden[-104:-96] == b"BOLB2FOA"
    reader = BlobReader(lambda offset, length: golden[offset : offset + length], len(golden))
    assert read_all(reader) == raw
    assert reader.footer.frame_range(1) == (len(stored[0]), len(stored[1]))
    assert reader.footer.frames_range(0, 2) == (0, len(b"".join(stored)))
    assert reader.footer.raw_range(2) == (8192, 7)
    assert encode_footer(reader.footer) == golden[reader.footer.starts[-1] :]
    assert reader.footer.blob_len == len(golden)


def test_an_empty_chunk_is_a_trailer() -> None:
    assert encode_blob(b"", chunk_id=7, generation=3, block_bytes=4096) == trailer(b"", b"")


def test_a_raw_blob_starts_with_the_chunk() -> None:
    raw = mixed(20_000)
    blob = encode_blob(raw, chunk_id=1, generation=1, block_bytes=4096, level=0)
    assert blob.startswith(raw)
    assert {f.codec for f in decode_footer(blob, len(blob)).frames} == {Codec.RAW}


GOOD = b"x" * 5000
ENTRIES = entry(GOOD[:4096], GOOD[:4096], 0) + entry(GOOD[4096:], GOOD[4096:], 0)


def blob_with(entries: bytes = ENTRIES, **lies: object) -> bytes:
    return GOOD + entries + trailer(entries, GOOD, **lies)  # type: ignore[arg-type]


def test_the_hand_made_one_is_good() -> None:
    blob = blob_with()
    footer = decode_footer(blob, len(blob))
    assert (footer.chunk_id, footer.generation, footer.raw_len, footer.frame_count) == (7, 3, 5000, 2)
    assert footer.starts == (0, 4096, 5000)
    with pytest.raises(IndexError):
        footer.frame_range(2)
    with pytest.raises(IndexError):
        footer.raw_range(-1)


@pytest.mark.parametrize(
    "lies",
    [
        {"magic": 0},
        {"version": 0},
        {"footer_len": 0},
        {"footer_len": 103},
        {"footer_len": 120},
        {"footer_len": 152},
        {"footer_len": 2**32 - 1},
        {"frame_count": 0},
        {"frame_count": 1},
        {"frame_count": 3},
        {"frame_count": 2**32 - 1},
        {"block_bytes": 0},
        {"block_bytes": 1},
        {"block_bytes": 2048},
        {"block_bytes": 4097},
        {"block_bytes": 8192},
        {"block_bytes": 128 << 20},
        {"block_bytes": 2**32 - 1},
        {"raw_len": 0},
        {"raw_len": 4096},
        {"raw_len": 4999},
        {"raw_len": 5001},
        {"raw_len": 8193},
        {"raw_len": (64 << 30) + 1},
        {"raw_len": 2**64 - 1},
        {"raw_crc64": 0},
        {"footer_crc64": 0},
    ],
    ids=str,
)
def test_lying_trailers(lies: dict[str, object]) -> None:
    blob = blob_with(**lies)
    with pytest.raises(CorruptError):
        decode_footer(blob, len(blob))


@pytest.mark.parametrize(
    "entries",
    [
        struct.pack("<IIQ", 0, 0, 0) + ENTRIES[16:],
        struct.pack("<IIQ", 0, 1, 0) + ENTRIES[16:],
        struct.pack("<IIQ", 4095, 0, 0) + ENTRIES[16:],
        struct.pack("<IIQ", 4097, 1, 0) + ENTRIES[16:],
        struct.pack("<IIQ", 4000, 1, 0) + ENTRIES[16:],
        ENTRIES[:16] + struct.pack("<IIQ", 905, 0, 0),
        ENTRIES[:16] + struct.pack("<IIQ", 2**32 - 1, 1, 0),
        ENTRIES[:16],
        b"",
        ENTRIES + ENTRIES[16:],
        ENTRIES[16:] + ENTRIES[:16],
        ENTRIES[:15],
    ],
)
def test_lying_entries(entries: bytes) -> None:
    blob = blob_with(entries)
    with pytest.raises(CorruptError):
        decode_footer(blob, len(blob))


def test_newer_is_told_from_damaged() -> None:
    """Version, flags and codecs of a newer writer carry a good crc64; damage does not."""
    codec = struct.pack("<IIQ", 4096, 3, 0) + ENTRIES[16:]
    for blob in (blob_with(version=2), blob_with(version=2**32 - 1), blob_with(flags=1), blob_with(codec)):
        with pytest.raises(UnsupportedError, match="newer"):
            decode_footer(blob, len(blob))
    for blob in (blob_with(version=2, footer_crc64=1), blob_with(flags=1, footer_crc64=1)):
        with pytest.raises(CorruptError, match="crc64"):
            decode_footer(blob, len(blob))


def test_a_tail_cut_anywhere() -> None:
    blob = blob_with()
    for size in range(len(blob)):
        with pytest.raises(CorruptError):
            decode_footer(blob[:size], size)
    for keep in range(104, 136):
        assert needed_tail(blob[-keep:], len(blob)) == 136
        with pytest.raises(ValueError, match="136 bytes"):
            decode_footer(blob[-keep:], len(blob))
    assert decode_footer(blob[-136:], len(blob)) == decode_footer(blob, len(blob))
    for wrong in (136, len(blob) - 1, len(blob) + 1):
        with pytest.raises(CorruptError):
            decode_footer(blob[-136:], wrong)


@given(st.binary(max_size=400))
def test_noise_is_no_footer(noise: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_footer(noise, len(noise))


@given(st.integers(0, 135), st.integers(1, 255))
def test_a_changed_footer_byte(at: int, change: int) -> None:
    blob = bytearray(blob_with())
    blob[len(GOOD) + at] ^= change
    with pytest.raises(CorruptError):
        decode_footer(bytes(blob), len(blob))
