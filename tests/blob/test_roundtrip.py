"""Every size and mix through writer and reader, whole, by block and by range; and what damage does."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.blob.format import FOOTER_GUESS, Codec, decode_footer, encode_footer, make_footer
from aof2.engine.blob.reader import BlobReader, check_identity, decode_frame, decode_frames
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.native import crc64
from tests.blob.build import encode_blob, entry, mixed, read_all, slow_crc64, trailer, zstd

BLOCK = 4096


def over(blob: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: blob[offset : offset + length]


def reader_of(blob: bytes, generation: int | None = None, **expect: object) -> BlobReader:
    reader = BlobReader(over(blob), len(blob), **expect)  # type: ignore[arg-type]
    check_identity(reader.footer, generation=generation)
    return reader


SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 40 * BLOCK + 17]


@pytest.mark.parametrize("level", [0, 1, 3, 19])
@pytest.mark.parametrize("kind", ["noise", "zeros", "mixed"])
@pytest.mark.parametrize("size", SIZES)
def test_every_size(size: int, kind: str, level: int) -> None:
    raw = {"noise": random.Random(size).randbytes(size), "zeros": bytes(size), "mixed": mixed(size)}[kind]
    blob = encode_blob(raw, chunk_id=9, generation=2, block_bytes=BLOCK, level=level)
    reader = reader_of(blob, chunk_id=9, generation=2, sha256=hashlib.sha256(raw).digest())
    assert read_all(reader) == raw
    assert reader.footer.frame_count == -(-size // BLOCK)
    blocks = [raw[i : i + BLOCK] for i in range(0, size, BLOCK)]
    assert [reader.read_block(i) for i in range(len(blocks))] == blocks
    assert reader.footer.raw_crc64 == crc64(raw)
    for i, block in enumerate(blocks):
        offset, length = reader.footer.frame_range(i)
        assert decode_frame(reader.footer, i, blob[offset : offset + length]) == block
    assert read_all(reader) == raw
    codecs = {f.codec for f in reader.footer.frames}
    if kind == "noise" or level == 0:
        assert codecs <= {Codec.RAW}
        assert blob.startswith(raw)
    elif size >= BLOCK:
        assert Codec.ZSTD in codecs
        assert len(blob) < size + 16 * len(blocks) + 104


def test_default_blocks_are_a_mebibyte() -> None:
    raw = mixed(3 * (1 << 20) + 5, run=1 << 19)
    reader = reader_of(encode_blob(raw, chunk_id=1, generation=1))
    assert reader.footer.frame_count == 4
    assert read_all(reader) == raw


MIXED = mixed(10 * BLOCK + 100)
MIXED_BLOB = encode_blob(MIXED, chunk_id=1, generation=1, block_bytes=BLOCK)


def test_there_is_no_block_behind_the_last() -> None:
    reader = reader_of(MIXED_BLOB)
    with pytest.raises(IndexError):
        reader.read_block(reader.footer.frame_count)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=64), st.integers(1, 300)), max_size=20),
    st.sampled_from([4096, 8192, 65536]),
    st.integers(-3, 9),
)
def test_any_content(runs: list[tuple[bytes, int]], block_bytes: int, level: int) -> None:
    raw = b"".join(piece * times for piece, times in runs)
    blob = encode_blob(raw, chunk_id=2**64 - 1, generation=2**64 - 1, block_bytes=block_bytes, level=level)
    assert read_all(reader_of(blob)) == raw
    assert blob == encode_blob(
        bytearray(raw), chunk_id=2**64 - 1, generation=2**64 - 1, block_bytes=block_bytes, level=level
    )


def test_the_footer_takes_one_read_or_two() -> None:
    for blocks, reads in ((249, 1), (250, 2)):
        blob = encode_blob(bytes(blocks * BLOCK), chunk_id=1, generation=1, block_bytes=BLOCK)
        asked: list[tuple[int, int]] = []

        def pread(at: int, size: int, blob: bytes = blob, asked: list[tuple[int, int]] = asked) -> bytes:
            asked.append((at, size))
            return blob[at : at + size]

        BlobReader(pread, len(blob))
        assert len(asked) == reads
        assert asked[0] == (len(blob) - FOOTER_GUESS, FOOTER_GUESS)


# -- the writer's own rules --


def test_streaming_equals_encoding_at_once() -> None:
    out = io.BytesIO()
    writer = BlobWriter(out.write, chunk_id=1, generation=1, block_bytes=BLOCK, sha256=hashlib.sha256(MIXED).digest())
    for i in range(0, len(MIXED), BLOCK):
        block = MIXED[i : i + BLOCK]
        frame = writer.add_block(memoryview(block), crc64(block))
        assert frame.raw_crc64 == crc64(block)
    footer = writer.finish()
    assert out.getvalue() == MIXED_BLOB
    assert footer == reader_of(MIXED_BLOB).footer


def test_a_block_that_changed_is_not_stored() -> None:
    out = bytearray()
    writer = BlobWriter(out.extend, chunk_id=5, generation=1, block_bytes=BLOCK)
    writer.add_block(bytes(BLOCK))
    before = bytes(out)
    with pytest.raises(CorruptError, match="block 1 of chunk 5 has changed"):
        writer.add_block(b"x" * BLOCK, crc64(b"y" * BLOCK))
    assert out == before


def test_blocks_come_in_order_and_whole() -> None:
    def fresh() -> BlobWriter:
        return BlobWriter(bytearray().extend, chunk_id=1, generation=1, block_bytes=BLOCK)

    writer = fresh()
    with pytest.raises(ValueError, match="0 bytes"):
        writer.add_block(b"")
    with pytest.raises(ValueError, match="4097 bytes"):
        writer.add_block(bytes(BLOCK + 1))
    writer.add_block(bytes(BLOCK))
    writer.add_block(b"short")
    with pytest.raises(ValueError, match="after the last"):
        writer.add_block(b"more")
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.finish()
    done = fresh()
    done.finish()
    with pytest.raises(ValueError, match="after the last"):
        done.add_block(b"x")
    for size in (0, 2048, 5000, 128 << 20):
        with pytest.raises(ValueError, match="power of two"):
            BlobWriter(bytearray().extend, chunk_id=1, generation=1, block_bytes=size)
    with pytest.raises(ValueError, match="32 bytes"):
        BlobWriter(bytearray().extend, chunk_id=1, generation=1, sha256=b"short")


def test_a_small_saving_is_not_taken() -> None:
    """Under 1/16 saved a block stays raw: any reader of a raw block needs no decompression."""
    noise = random.Random(1).randbytes(BLOCK)
    for zeros, codec in ((150, Codec.RAW), (600, Codec.ZSTD)):
        raw = noise[: BLOCK - zeros] + bytes(zeros)
        assert len(zstd(raw)) < BLOCK
        footer = reader_of(encode_blob(raw, chunk_id=1, generation=1, block_bytes=BLOCK)).footer
        assert footer.frames[0].codec is codec


# -- another blob, damage, hostility --


def test_another_blob_is_named() -> None:
    blob = encode_blob(b"bytes", chunk_id=4, generation=2)
    with pytest.raises(CorruptError, match="it is chunk 4, expected chunk 5"):
        reader_of(blob, chunk_id=5, generation=2)
    with pytest.raises(CorruptError, match="it is generation 2, expected generation 3"):
        reader_of(blob, chunk_id=4, generation=3)
    with pytest.raises(CorruptError, match="it is chunk 4 generation 2, expected chunk 0 generation 0"):
        check_identity(reader_of(blob).footer, chunk_id=0, generation=0)
    with pytest.raises(CorruptError, match="sha256"):
        reader_of(blob, sha256=bytes(32))
    with pytest.raises(CorruptError, match=r"^s3://b/k: "):
        reader_of(blob, sha256=bytes(32), path="s3://b/k")


def small_blob() -> tuple[bytes, bytes]:
    rng = random.Random(11)
    raw = (b"tier one, tier two " * 300)[:BLOCK] + rng.randbytes(200) + bytes(BLOCK - 200) + b"tail" * 30
    return raw, encode_blob(raw, chunk_id=1, generation=1, block_bytes=BLOCK)


def test_a_flip_of_every_bit() -> None:
    raw, blob = small_blob()
    good = reader_of(blob).footer
    assert {f.codec for f in good.frames} == {Codec.ZSTD}
    errors = 0
    for i in range(len(blob)):
        for bit in range(8):
            bad = bytearray(blob)
            bad[i] ^= 1 << bit
            try:
                reader = reader_of(bytes(bad))
                blocks = []
                for k in range(reader.footer.frame_count):
                    try:
                        blocks.append(reader.read_block(k))
                    except CorruptError:
                        errors += 1
                        continue
                    assert blocks[-1] == raw[k * BLOCK : (k + 1) * BLOCK], (i, bit)
                if len(blocks) == reader.footer.frame_count:
                    assert read_all(reader) == raw
            except (CorruptError, UnsupportedError):
                errors += 1
            else:
                assert i < good.starts[-1], "a flip in the footer went unseen"
    assert errors > 7 * len(blob)


def test_a_flip_in_raw_frames_is_always_seen() -> None:
    raw = random.Random(4).randbytes(BLOCK + 300)
    blob = encode_blob(raw, chunk_id=1, generation=1, block_bytes=BLOCK)
    for i in range(0, len(raw), 3):
        bad = bytearray(blob)
        bad[i] ^= 1 << (i % 8)
        reader = reader_of(bytes(bad))
        with pytest.raises(CorruptError, match="crc64"):
            reader.read_block(i // BLOCK)
        with pytest.raises(CorruptError):
            read_all(reader)
        assert reader.read_block(1 - i // BLOCK) == raw[(1 - i // BLOCK) * BLOCK :][:BLOCK]


def test_cut_at_every_byte() -> None:
    _, blob = small_blob()
    for cut in range(len(blob)):
        with pytest.raises(CorruptError):
            reader_of(blob[:cut])
        with pytest.raises(CorruptError):
            read_all(BlobReader(over(blob[:cut]), len(blob)))


def test_frames_of_the_wrong_length() -> None:
    _, blob = small_blob()
    footer = reader_of(blob).footer
    offset, length = footer.frame_range(0)
    for wrong in (blob[offset : offset + length - 1], blob[offset : offset + length + 1], b""):
        with pytest.raises(CorruptError, match="frame of"):
            decode_frame(footer, 0, wrong)
    other = footer.frame_range(1)
    with pytest.raises(CorruptError):
        decode_frame(footer, 0, blob[other[0] : other[0] + other[1]])


def hostile(frame: bytes, block: bytes) -> BlobReader:
    """A blob whose footer is all right and whose one frame is `frame`, said to be `block`."""
    entries = entry(block, frame, 1)
    return reader_of(frame + entries + trailer(entries, block))


def test_a_frame_that_claims_more_than_its_block_is_not_decompressed() -> None:
    block = b"x" * 4096
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    header = bomb[:18]
    huge = bytearray(zstandard.ZstdCompressor().compress(block))
    assert huge[4] & 0xE0 == 0x60  # single segment, content size in two bytes
    for frame in (
        bomb[:4000],
        header,
        b"\x28\xb5\x2f\xfd\xe0" + (2**63).to_bytes(8, "little") + bytes(huge[7:]),
        zstd(b"x" * 4095),
        zstd(b"x" * 4097),
        zstd(b""),
        zstandard.ZstdCompressor(write_content_size=False).compress(block),
        zstd(block) + zstd(b""),
        zstd(block) + b"\0",
        b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip",
        zstd(b"x" * 2048) * 2,
        zstd(block)[:-1],
        b"not a zstd frame",
    ):
        with pytest.raises(CorruptError, match="zstd frame"):
            hostile(bytes(frame), block).read_block(0)


def test_a_window_larger_than_a_block_is_refused() -> None:
    """Content size right, window of 128 MiB: decompressing would reserve it."""
    block = b"y" * 4096
    good = zstd(block)
    windowed = good[:4] + bytes([good[4] & ~0x20, 17 << 3]) + good[5:]
    assert zstandard.get_frame_parameters(windowed).window_size == 128 << 20
    assert zstandard.get_frame_parameters(windowed).content_size == 4096
    with pytest.raises(CorruptError, match="zstd frame"):
        hostile(windowed, block).read_block(0)


def test_a_good_frame_of_other_bytes() -> None:
    entries = entry(b"a" * 4096, zstd(b"b" * 4096), 1)
    reader = reader_of(zstd(b"b" * 4096) + entries + trailer(entries, b"a" * 4096))
    with pytest.raises(CorruptError, match="crc64"):
        reader.read_block(0)


def test_the_sha256_is_checked_for_the_whole() -> None:
    raw = b"a" * 5000
    entries = entry(raw[:4096], raw[:4096], 0) + entry(raw[4096:], raw[4096:], 0)
    reader = reader_of(raw + entries + trailer(entries, raw, sha256=bytes(32)))
    assert reader.read_block(0) == raw[:4096]
    with pytest.raises(CorruptError, match="hashes to"):
        read_all(reader)
    assert slow_crc64(raw) == reader.footer.raw_crc64


@pytest.mark.parametrize("level", [0, 3])
def test_holes_take_nothing_and_read_as_zeros(level: int) -> None:
    """Frames without a byte between others, and at the end; what is called one and is not is damage."""
    block = 4096
    pieces = [bytes(block), b"x" * block, bytes(block), bytes(block), b"end" * 100]
    holes = {0, 2, 3}
    out = bytearray()
    writer = BlobWriter(out.extend, chunk_id=5, generation=2, block_bytes=block, level=level)
    for i, piece in enumerate(pieces):
        if i in holes:
            writer.add_hole(len(piece))
        else:
            writer.add_block(piece)
    footer = writer.finish()
    asked: list[int] = []

    def pread(offset: int, length: int) -> bytes:
        asked.append(length)
        return bytes(out[offset : offset + length])

    reader = BlobReader(pread, len(out))
    assert footer == reader.footer
    assert [f.codec is Codec.HOLE for f in footer.frames] == [i in holes for i in range(5)]
    assert footer.sha256 == hashlib.sha256(b"".join(pieces)).digest()
    assert read_all(reader) == b"".join(pieces)
    assert b"".join(decode_frames(reader.footer, 2, 2, b"")) == bytes(2 * block)
    assert 0 not in asked, "a range of nothing was asked for"
    assert len(out) <= 4096 + 300 + 5 * 16 + 104
    liar = msgspec.structs.replace(footer.frames[1], stored_len=0, codec=Codec.HOLE)
    frames = (footer.frames[0], liar, *footer.frames[2:])
    wrong = encode_footer(
        make_footer(frames, chunk_id=5, generation=2, block_bytes=block, raw_len=footer.raw_len, sha256=footer.sha256)
    )
    with pytest.raises(CorruptError, match="hole"):
        decode_footer(wrong, len(wrong) + footer.frames[4].stored_len)
