"""SegmentReader: ranges, tails, lifetimes, and files that are not what they say."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment import format as fmt
from aof2.engine.segment import reader as reader_module
from aof2.engine.segment.model import Position
from aof2.engine.segment.reader import SegmentReader
from aof2.native import Fault, crc64
from tests.segment.support import Rec, create, plain, read_all, sealed, unsealed

VERSIONS = [2, 3]


def numbered(tmp_path: Path, count: int, *, seal: bool, version: int = 3) -> tuple[Path, list[bytes]]:
    payloads = [b"%d" % i * (i % 5 + 1) for i in range(count)]
    with create(tmp_path, version, capacity=1 << 20) as writer:
        writer.append_many(payloads)
        if seal:
            writer.seal(1)
        else:
            writer.flush()
    return writer.path, payloads


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seal", [True, False])
def test_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, seal: bool) -> None:
    monkeypatch.setattr(reader_module, "ROWS_PER_BATCH", 7)
    path, payloads = numbered(tmp_path, 40, seal=seal, version=version)
    starts = [sum(map(len, payloads[:i])) for i in range(40)]
    with SegmentReader(Env(), path) as reader:
        for first in (30, 0, 6, 7, 8, 39, 40, 41, 100):  # backwards too: marks come and go
            for count in (None, 0, 1, 9, 100):
                got = [bytes(r.payload) for r in reader.records(first, count)]
                assert got == payloads[first : None if count is None else first + count]
        for logical in (0, 1, 50, starts[20], starts[20] + 1, starts[39], 10**6):
            want = [p for p, s in zip(payloads, starts, strict=True) if s + len(p) > logical]
            assert [bytes(r.payload) for r in reader.records_from(logical)] == want
        everything = list(reader.records())
        for record in everything[::5]:
            again = list(reader.records(record.position, 3))
            assert again == everything[record.record_index : record.record_index + 3]


@pytest.mark.parametrize("seal", [True, False])
def test_position_that_is_no_record(tmp_path: Path, seal: bool) -> None:
    path, _ = numbered(tmp_path, 10, seal=seal)
    with SegmentReader(Env(), path) as reader:
        for offset in (0, 95, 10**9):
            with pytest.raises(CorruptError):
                list(reader.records(Position(1, offset, 0)))
        if seal:
            with pytest.raises(CorruptError):
                list(reader.records(Position(1, 97, 0)))
        else:
            assert list(reader.records(Position(1, 97, 0))) == []


def test_payloads_outlive_the_reader(tmp_path: Path) -> None:
    segment, records = sealed(tmp_path)
    reader = SegmentReader(Env(), segment.path)
    held = list(reader.records())
    reader.close()
    reader.close()
    gc.collect()
    assert [plain(r) for r in held] == records


def test_close_in_the_middle_of_reading(tmp_path: Path) -> None:
    path, payloads = numbered(tmp_path, 10, seal=True)
    with SegmentReader(Env(), path) as reader:
        iterator = reader.records()
        assert bytes(next(iterator).payload) == payloads[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_unsealed_tail(tmp_path: Path, version: int) -> None:
    path, records = unsealed(tmp_path, version)
    with SegmentReader(Env(), path) as reader:
        assert not reader.sealed and reader.footer is None and not reader.tail.torn
        end = reader.tail.end_offset
        assert str(reader.tail) == f"tail: clean at {end}"
        assert reader.verify() == reader.tail
        with pytest.raises(CorruptError):
            reader.sealed_segment()
    with path.open("r+b") as f:
        f.seek(end - 2)
        f.write(b"??")
    with SegmentReader(Env(), path) as reader:
        assert [plain(r) for r in reader.records()] == records[:-1]
        assert reader.tail.torn and reader.tail.fault == Fault.CRC
        assert str(reader.tail).startswith(f"tail: trimmed at {reader.tail.end_offset}, ")
    with pytest.raises(CorruptError) as error:
        read_all(path, durable=end)
    assert error.value.offset == reader.tail.end_offset and error.value.path == str(path)


def test_durable_bytes_that_are_gone(tmp_path: Path) -> None:
    path, records = unsealed(tmp_path)
    with SegmentReader(Env(), path) as reader:
        end = reader.tail.end_offset
    assert read_all(path, durable=end) == records
    with path.open("r+b") as f:  # cut between two records: nothing is torn, and yet
        f.truncate(end - 36 - 4)
    assert read_all(path) == records[:-1]
    with pytest.raises(CorruptError):
        read_all(path, durable=end)


def test_reading_a_segment_that_is_written(tmp_path: Path) -> None:
    with create(tmp_path) as writer:
        writer.append(b"one", timestamp_ms=1)
        reader = SegmentReader(Env(), writer.path, end=writer.end_offset)
        writer.append(b"two", timestamp_ms=2)
        writer.seal(1)
        assert not reader.sealed
        assert [plain(r) for r in reader.records()] == [Rec(b"one", 0, 1)]
        assert not reader.tail.torn
        reader.close()


@pytest.mark.parametrize("size", [0, 1, 51, 52, 95])
def test_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    segment, _ = sealed(tmp_path)
    path = tmp_path / "short"
    path.write_bytes(segment.path.read_bytes()[:size])
    with pytest.raises(CorruptError, match="too few"):
        SegmentReader(Env(), path)
    with pytest.raises(FileNotFoundError):
        SegmentReader(Env(), tmp_path / "none")


def rebuilt(path: Path, **footer_fields: int) -> Path:
    """A v3 file whose footer tells something else under a right checksum."""
    data = path.read_bytes()
    fields = fmt.decode_footer(3, data[-96:])
    footer = {name: getattr(fields, name) for name in fields.__slots__} | footer_fields
    out = path.with_name("lying")
    out.write_bytes(data[:-96] + fmt.encode_footer(fmt.SegmentFooter(**footer)))
    return out


@pytest.mark.parametrize(
    "lie",
    [
        {"record_count": 4},
        {"record_count": 6},
        {"record_count": 0},
        {"record_count": 2**64 - 1},
        {"segment_crc64": 1},
        {"last_record_ts_ms": 1},
        {"durable_bytes": 0},
        {"durable_bytes": 2**64 - 1},
        {"segment_id": 8},
        {"ext_id": 8},
    ],
)
def test_lying_footer(tmp_path: Path, lie: dict[str, int]) -> None:
    segment, _ = sealed(tmp_path)
    path = rebuilt(segment.path, **lie)
    with pytest.raises(CorruptError), SegmentReader(Env(), path) as reader:
        reader.verify()
    with pytest.raises(CorruptError), SegmentReader(Env(), path) as reader:
        list(reader.records())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("length", [0, 1, 11, 13, 2**31, 2**32 - 1])
@pytest.mark.parametrize("seal", [True, False])
def test_lying_payload_len(tmp_path: Path, version: int, length: int, seal: bool) -> None:
    path = sealed(tmp_path, version)[0].path if seal else unsealed(tmp_path, version)[0]
    path.chmod(0o600)
    with path.open("r+b") as f:
        f.seek(fmt.HEADER_BYTES[fmt.Version(version)])
        f.write(struct.pack("<I", length))
    if seal:
        with pytest.raises(CorruptError):
            read_all(path)
    else:
        assert read_all(path) == []


def with_record(tmp_path: Path, **record: int) -> Path:
    """An unsealed v3 file whose second record is made by hand, with a right checksum."""
    with create(tmp_path) as writer:
        writer.append(b"abc", timestamp_ms=1)
        end = writer.end_offset
    fields = {"logical_offset": 3, "timestamp_ms": 2, "ext_id": 0, "flags": 0} | record
    with writer.path.open("r+b") as f:
        f.seek(end)
        f.write(fmt.encode_record(3, b"def", **fields))
    return writer.path


def test_flags_of_a_newer_writer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        read_all(with_record(tmp_path, flags=4))


def test_records_that_go_back(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="ORDER"):
        read_all(with_record(tmp_path, logical_offset=2))


def test_larger_than_max_size(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path)
    data = bytearray(segment.path.read_bytes())
    data[56:60] = struct.pack("<I", 192)
    data[88:96] = struct.pack("<Q", crc64(bytes(data[:88])))
    (tmp_path / "large").write_bytes(data)
    with pytest.raises(CorruptError):
        SegmentReader(Env(), tmp_path / "large")


def test_v2_footer_with_flags_of_a_newer_writer(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path, 2)
    segment.path.chmod(0o600)
    data = bytearray(segment.path.read_bytes())
    data[-8] |= 8
    segment.path.write_bytes(data)
    with pytest.raises(UnsupportedError):
        SegmentReader(Env(), segment.path)


@pytest.mark.parametrize("version", VERSIONS)
def test_torn_footer_reads_as_unsealed(tmp_path: Path, version: int) -> None:
    segment, records = sealed(tmp_path, version)
    data = bytearray(segment.path.read_bytes())
    at = segment.durable_bytes
    if version == 2:
        data[at : at + 8] = bytes(8)  # the page with the count was lost
    else:
        data[at + 50 :] = bytes(46)
    path = tmp_path / "torn"
    path.write_bytes(data)
    with SegmentReader(Env(), path) as reader:
        assert not reader.sealed and reader.footer_error is not None
        assert [plain(r) for r in reader.records()] == records
        assert reader.tail.end_offset == at
        with pytest.raises(CorruptError):
            reader.verify()
    data[at - 1] ^= 1  # records before a footer were synced: this was no torn write
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        read_all(path)
