"""Damage of every kind: a typed error or a trimmed tail; never a wrong record, a crash or a hang."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import (
    CHUNK_HEADER_LEN,
    RECORD_HEADER,
    ManifestGapError,
    ManifestIntegrityError,
    unpack_chunk_header,
)
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.reader import Chunk, Stream, parse_chunk, split_bundle
from aof2.engine.manifest.writer import ManifestLogWriter

from .helpers import plain, small, small_log, written

REFUSED = (ManifestIntegrityError, UnsupportedError)


def sealed_image(tmp_path: Path) -> tuple[bytes, list[tuple[object, ...]]]:
    rows = small_log(tmp_path, seal=True)
    return (tmp_path / "0.mlog").read_bytes(), rows


def open_image(tmp_path: Path) -> tuple[bytes, list[tuple[object, ...]]]:
    rows = small_log(tmp_path)
    data = (tmp_path / "0.mlog").read_bytes()
    # Keep a little of the preallocated zeros: the rest is more of the same.
    return data[: unpack_chunk_header(data).committed_len + 128], rows


def read(data: bytes, *, last: bool = True) -> list[tuple[object, ...]]:
    chunk = parse_chunk(data, last=last, expect_index=0)
    return [] if chunk is None else plain(list(chunk.records()))


def commit_prefixes(rows: list[tuple[object, ...]]) -> list[list[tuple[object, ...]]]:
    return [rows[:n] for n in range(0, len(rows) + 1, 3)]


def test_a_flipped_bit_anywhere_in_a_sealed_chunk(tmp_path: Path) -> None:
    data, rows = sealed_image(tmp_path)
    harmless = 0
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            try:
                assert read(bytes(bad)) == rows
            except REFUSED:
                continue
            harmless += 1
    # tail_offset above committed_len says nothing, the uploaded flag is not covered, and a chunk that lost its sealed
    # flag is an unsealed chunk with the same records.
    assert harmless < 64 + 2


def test_a_flipped_bit_anywhere_in_an_open_chunk(tmp_path: Path) -> None:
    data, rows = open_image(tmp_path)
    prefixes = commit_prefixes(rows)
    shortened = refused = 0
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            try:
                got = read(bytes(bad))
            except REFUSED:
                refused += 1
                continue
            assert got in prefixes
            shortened += got != rows
    assert refused > len(data) * 4  # most of it had been synced before a later commit, and says so
    # Only the last commit can be given up: nothing after it tells that it had been synced.
    assert 0 < shortened <= 8 * (len(rows) // 4 * 200)


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    sealed, rows = sealed_image(tmp_path / "sealed")
    for at in range(len(sealed)):
        if at == 0:
            assert read(b"") == []  # a name without bytes: never committed
            with pytest.raises(REFUSED):
                read(b"", last=False)
            continue
        with pytest.raises(REFUSED):
            read(sealed[:at])
    data, rows = open_image(tmp_path / "open")
    prefixes = commit_prefixes(rows)
    longest: list[tuple[object, ...]] = []
    for at in range(1, CHUNK_HEADER_LEN):
        with pytest.raises(REFUSED):
            read(data[:at])
    for at in range(CHUNK_HEADER_LEN, len(data)):
        got = read(data[:at])
        assert got in prefixes
        assert len(got) >= len(longest)
        longest = got
    assert longest == rows


def test_a_lost_header_over_synced_bytes_is_damage(tmp_path: Path) -> None:
    data, _ = open_image(tmp_path)
    for lost in (64, 512):
        with pytest.raises(ManifestIntegrityError, match="header is lost"):
            read(bytes(lost) + data[lost:])
    assert read(bytes(len(data))) == []


@pytest.mark.expects_warnings
def test_a_chunk_without_a_commit_is_put_aside_not_deleted(tmp_path: Path) -> None:
    small_log(tmp_path, commits=1)
    path = tmp_path / "0.mlog"
    data = path.read_bytes()
    path.write_bytes(bytes(64) + data[64:])  # its only commit: nothing tells whether it had been synced
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        assert w.position.ordinal == 0
        w.append(p.LocalEvicted(1), segment_id=1)
    assert (tmp_path / "0.mlog.torn").read_bytes() == bytes(64) + data[64:]
    assert len(written(tmp_path)) == 1


def with_header(data: bytes, **changes: int) -> bytes:
    fields = dict(zip(("magic", "version", "header_len", "index", "base", "tail", "committed", "crc", "flags"),
                      struct.unpack_from("<QIIQQQQQQ", data), strict=True))  # fmt: skip
    fields.update(changes)
    return struct.pack("<QIIQQQQQQ", *fields.values()) + data[64:]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"magic": 0x414F46325345474D}, ManifestIntegrityError),
        ({"version": 2}, UnsupportedError),
        ({"version": 0}, ManifestIntegrityError),
        ({"header_len": 72}, ManifestIntegrityError),
        ({"header_len": 0}, ManifestIntegrityError),
        ({"index": 1}, ManifestIntegrityError),
        ({"base": 5}, ManifestIntegrityError),
        ({"committed": 0}, ManifestIntegrityError),
        ({"committed": 2**64 - 1, "tail": 2**64 - 1}, ManifestIntegrityError),
        ({"tail": 0}, ManifestIntegrityError),
        ({"crc": 1}, ManifestIntegrityError),
        ({"flags": 5}, UnsupportedError),
        ({"flags": 1 << 63}, UnsupportedError),
        ({"flags": 2}, ManifestIntegrityError),
    ],
    ids=str,
)
def test_headers_that_lie(tmp_path: Path, changes: dict[str, int], error: type[Exception]) -> None:
    data, _ = sealed_image(tmp_path)
    with pytest.raises(error):
        read(with_header(data, **changes))


def rebuilt(data: bytes, edit: Callable[[bytearray], None]) -> bytes:
    """A sealed chunk with its records changed and its checksum made right again: a newer or a bad writer's."""
    body = bytearray(data[CHUNK_HEADER_LEN:])
    edit(body)
    end = CHUNK_HEADER_LEN + len(body)
    return with_header(data[:64] + bytes(body), committed=end, tail=end, crc=native.crc64(bytes(body)))


@pytest.mark.parametrize("length", [0, 4, 2**32 - 8, 2**32 - 1, 1 << 20])
def test_record_lengths_that_lie(tmp_path: Path, length: int) -> None:
    data, _ = sealed_image(tmp_path)
    bad = rebuilt(data, lambda body: body.__setitem__(slice(4, 8), length.to_bytes(4, "little")))
    with pytest.raises(ManifestIntegrityError) as e:
        read(bad)
    assert (e.value.chunk_index, e.value.offset) == (0, 64)


def test_a_payload_checksum_names_chunk_segment_and_offset(tmp_path: Path) -> None:
    data, _ = sealed_image(tmp_path)
    bad = rebuilt(data, lambda body: body.__setitem__(40, body[40] ^ 1))
    with pytest.raises(ManifestIntegrityError) as e:
        read(bad)
    assert (e.value.chunk_index, e.value.segment_id, e.value.offset) == (0, 1, 64)
    assert "chunk 0" in str(e.value)


def test_known_types_with_flags_are_from_the_future(tmp_path: Path) -> None:
    data, _ = sealed_image(tmp_path)
    # Flags are in the record header; the markers' spans cover it, so only a chunk without markers gets that far.
    body = RECORD_HEADER.pack(13, 1, 8, 1, 0, 1, native.crc64(bytes(8))) + bytes(8)
    with pytest.raises(UnsupportedError):
        read(rebuilt(data, lambda b: b.__setitem__(slice(None), body)))


def test_unknown_types_are_skipped_and_keep_their_flags(tmp_path: Path) -> None:
    data, _ = sealed_image(tmp_path)
    body = RECORD_HEADER.pack(42, 0x8001, 16, 1, 0, 1, native.crc64(b"q" * 16)) + b"q" * 16
    body += RECORD_HEADER.pack(13, 0, 8, 7, 0, 1, native.crc64(bytes(8))) + bytes(8)
    chunk = parse_chunk(rebuilt(data, lambda b: b.__setitem__(slice(None), body)), last=True)
    assert chunk is not None
    assert [(r.type, r.flags) for r in chunk.records()] == [("Unknown42", 0x8001), ("LocalEvicted", 0)]
    index = ManifestIndex()
    index.apply_chunk(chunk)
    assert list(index.entries) == [7]


def test_a_payload_that_does_not_decode_is_an_error_with_its_place(tmp_path: Path) -> None:
    data, _ = sealed_image(tmp_path)
    lie = b"\xff\xff" + bytes(6)
    body = RECORD_HEADER.pack(5, 0, 8, 77, 0, 1, native.crc64(lie)) + lie
    chunk = parse_chunk(rebuilt(data, lambda b: b.__setitem__(slice(None), body)), last=True)
    assert chunk is not None
    with pytest.raises(ManifestIntegrityError) as e:
        ManifestIndex().apply_chunk(chunk)
    assert (e.value.chunk_index, e.value.segment_id, e.value.offset) == (0, 77, 64)
    with pytest.raises(ManifestIntegrityError):
        next(chunk.records()).decoded()


def three_chunks(directory: Path) -> None:
    with ManifestLogWriter.open(Env(), directory, small()) as w:
        for i in range(3):
            w.append(p.LocalEvicted(i), segment_id=i)
            w.rotate()
        w.append(p.LocalEvicted(3), segment_id=3)


def test_a_skipped_index_is_a_gap(tmp_path: Path) -> None:
    three_chunks(tmp_path)
    (tmp_path / "1.mlog").unlink()
    with pytest.raises(ManifestGapError) as e:
        list(Stream(tmp_path).records())
    assert e.value.chunk_index == 1


def test_a_chunk_under_another_name_is_refused(tmp_path: Path) -> None:
    three_chunks(tmp_path)
    (tmp_path / "1.mlog").rename(tmp_path / "9.mlog")
    (tmp_path / "2.mlog").rename(tmp_path / "1.mlog")
    with pytest.raises(ManifestIntegrityError, match="says chunk 2"):
        list(Stream(tmp_path).records())


def test_names_with_leading_zeros_are_not_chunks(tmp_path: Path) -> None:
    three_chunks(tmp_path)
    (tmp_path / "01.mlog").write_bytes((tmp_path / "1.mlog").read_bytes())
    assert len(Stream(tmp_path).chunks) == 4


def test_ordinals_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    three_chunks(tmp_path)
    other = tmp_path / "other"
    with ManifestLogWriter.open(Env(), other, small()) as w:
        for i in range(5):
            w.append(p.LocalEvicted(i), segment_id=i)
            w.append(p.LocalEvicted(i), segment_id=i)
            w.rotate()
    (tmp_path / "2.mlog").unlink()
    (tmp_path / "2.mlog").write_bytes((other / "2.mlog").read_bytes())
    with pytest.raises(ManifestIntegrityError, match="starts at record"):
        list(Stream(tmp_path).records())


def bundle(directory: Path) -> bytes:
    three_chunks(directory)
    return b"".join((directory / f"{i}.mlog").read_bytes() for i in range(3))


def test_bundles_read_like_their_chunks_and_may_overlap_them(tmp_path: Path) -> None:
    data = bundle(tmp_path)
    rows = written(tmp_path)
    (tmp_path / "bundle-0-2.mlogs").write_bytes(data)
    assert written(tmp_path) == rows
    for i in range(3):
        (tmp_path / f"{i}.mlog").unlink()
        assert written(tmp_path) == rows


def test_bundles_cut_or_misnamed_are_refused(tmp_path: Path) -> None:
    data = bundle(tmp_path / "src")
    first = unpack_chunk_header(data).committed_len
    for at in range(len(data)):
        cut = tmp_path / "cut"
        cut.mkdir(exist_ok=True)
        (cut / "bundle-0-2.mlogs").write_bytes(data[:at])
        with pytest.raises(ManifestIntegrityError):
            list(Stream(cut).records())
    assert [index for index, _, _ in split_bundle(len(data), lambda at: data[at : at + 64], 0, 2, path="")] == [0, 1, 2]
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (swapped / "bundle-0-2.mlogs").write_bytes(data[first:] + data[:first])
    with pytest.raises(ManifestIntegrityError, match="where 0 belongs"):
        Stream(swapped)
    twice = tmp_path / "twice"
    twice.mkdir()
    (twice / "bundle-0-2.mlogs").write_bytes(data)
    (twice / "bundle-1-1.mlogs").write_bytes(data[first : 2 * first])
    with pytest.raises(ManifestIntegrityError, match="also in"):
        Stream(twice)


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_at_all(data: bytes, header: bool) -> None:
    if header:
        data = struct.pack("<QII", 0x414F46324D4C4F47, 1, 64) + data
    for last in (True, False):
        try:
            chunk = parse_chunk(data, last=last)
        except REFUSED:
            continue
        assert chunk is None or isinstance(chunk, Chunk)
