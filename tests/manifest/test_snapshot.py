"""Snapshots: exact round trips, damage at every byte, and replay that starts from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, LimitError, UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import Event, RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, ManifestGapError
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.snapshot import (
    decode_snapshot,
    encode_snapshot,
    list_snapshots,
    load_snapshot,
    newest_snapshot,
)
from aof2.engine.manifest.writer import ManifestLogWriter
from tests.manifest.replay import replay, take_snapshot

from .helpers import PAYLOADS, small, small_log

AT = LogPosition(3, 640, 99)


def folded(rows: list[tuple[p.Payload, int]]) -> ManifestIndex:
    index = ManifestIndex()
    for stamp, (payload, segment_id) in enumerate(rows):
        kind, data = p.encode(payload)
        index.apply(kind, segment_id, stamp, data)
    return index


SAMPLE = folded(
    [
        (p.SegmentOpened(1, 2), 5),
        (p.SealSegment(1, 2, 3, 4, 1), 5),
        (p.UploadDone("key/é", "etag"), 5),
        (p.UploadStarted("pending"), 6),
        (p.UploadFailed("pending", 3), 6),
        (p.Tier2DeleteQueued("gone"), 7),
        (p.UploadDone("manifest/1/0.mlog", "x"), LOG_SEGMENT_ID),
        (p.SnapshotMarker(1, 2, 3), LOG_SEGMENT_ID),
    ]
)


def encoded(index: ManifestIndex = SAMPLE, **sections: bytes) -> bytes:
    return b"".join(encode_snapshot(index, snapshot_id=4, position=AT, created_ms=1, sections=sections))


@given(st.lists(st.tuples(PAYLOADS, st.integers(0, 2**64 - 1)), max_size=40), st.binary(max_size=50))
def test_round_trip(rows: list[tuple[p.Payload, int]], section: bytes) -> None:
    index = folded(rows)
    data = encoded(index, **{"db:chunk_catalog": section})
    snapshot = decode_snapshot(data)
    assert snapshot.index.same_state(index)
    assert (snapshot.snapshot_id, snapshot.position, snapshot.created_ms) == (4, AT, 1)
    assert snapshot.sections == {"db:chunk_catalog": section}
    assert encoded(snapshot.index, **snapshot.sections) == data


def test_a_flipped_bit_at_every_byte_is_refused() -> None:
    data = encoded(**{"db:x": b"rows"})
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x10
        with pytest.raises((CorruptError, UnsupportedError)):
            decode_snapshot(bytes(bad))


def test_truncation_at_every_byte_is_refused() -> None:
    data = encoded()
    for at in range(len(data)):
        with pytest.raises(CorruptError):
            decode_snapshot(data[:at])
    with pytest.raises(CorruptError):
        decode_snapshot(data + bytes(8))


def reheaded(data: bytes, at: int, value: int, size: int) -> bytes:
    """The snapshot with a header field changed and the header's checksum made right again."""
    bad = bytearray(data)
    bad[at : at + size] = value.to_bytes(size, "little")
    sections = min(int.from_bytes(bad[68:72], "little"), (len(bad) - 96) // 56)
    crc = native.crc64(bytes(bad[96 : 96 + 56 * sections]), native.crc64(bytes(bad[:88])))
    bad[88:96] = crc.to_bytes(8, "little")
    return bytes(bad)


@pytest.mark.parametrize(
    ("at", "value", "size", "error"),
    [
        (8, 4, 4, UnsupportedError),
        (8, 2, 4, CorruptError),
        (12, 104, 4, CorruptError),
        (16, 2**63, 8, CorruptError),
        (16, 0, 8, CorruptError),
        (64, 64, 4, CorruptError),
        (68, 2**32 - 1, 4, CorruptError),
        (68, 0, 4, CorruptError),
        (72, 2**62, 8, CorruptError),
        (96 + 32, 2**63, 8, CorruptError),
        (96 + 40, 2**63, 8, CorruptError),
    ],
)
def test_fields_that_lie_under_a_valid_checksum(at: int, value: int, size: int, error: type[Exception]) -> None:
    with pytest.raises(error) as e:
        decode_snapshot(reheaded(encoded(), at, value, size))
    assert "checksum" not in str(e.value)


def test_a_key_that_is_not_text_is_refused_under_valid_checksums() -> None:
    data = bytearray(encoded(folded([(p.UploadDone("abcd", "e"), 1)])))
    at = data.index(b"abcde")
    data[at] = 0xFF
    row = 96 + 56  # the table's second section, `strings`
    data[row + 48 : row + 56] = native.crc64(bytes(data[at : at + 5])).to_bytes(8, "little")
    with pytest.raises(CorruptError, match="UTF-8"):
        decode_snapshot(reheaded(bytes(data), 80, 0, 8))


@pytest.mark.parametrize(("at", "value"), [(121, 1), (116, 0x10), (118, 200), (120, 8)])
def test_reserved_bytes_of_an_entry_are_refused_under_valid_checksums(at: int, value: int) -> None:
    data = bytearray(encoded())
    start = 96 + 7 * 56 - 56  # six sections; `entries` is the first body
    data[start + at] = value
    length = int.from_bytes(data[96 + 40 : 96 + 48], "little")
    data[96 + 48 : 96 + 56] = native.crc64(bytes(data[start : start + length])).to_bytes(8, "little")
    with pytest.raises(UnsupportedError):
        decode_snapshot(reheaded(bytes(data), 80, 0, 8))


def test_reserved_header_bytes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="reserved"):
        decode_snapshot(reheaded(encoded(), 80, 1, 8))


def test_section_names_have_a_limit() -> None:
    with pytest.raises(LimitError):
        encoded(**{"x" * 33: b""})


def test_replay_starts_at_the_newest_snapshot(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        for i in range(400):
            w.append(p.SegmentOpened(i, 1), segment_id=i)
            w.commit(sync=False)
            if w.needs_rotation():
                w.rotate()
            if i in (150, 300):
                w.commit()
                take_snapshot(w, replay(tmp_path))
    whole = replay(tmp_path)
    assert list_snapshots(tmp_path) == [1, 2]
    assert whole.snapshot is not None
    assert whole.snapshot[0] == 2
    start = load_snapshot(tmp_path, 2).position
    records = list(Stream(tmp_path).records(start))
    marker = next(r for r in records if r.type_id == 14)
    assert marker.chunk_offset == start.chunk_offset
    assert marker.decoded() == p.SnapshotMarker(start.chunk_index, start.chunk_offset, 2)
    for index in range(start.chunk_index):
        (tmp_path / f"{index}.mlog").unlink()
    assert replay(tmp_path).same_state(whole)
    (tmp_path / "snapshot_2.bin").unlink()
    with pytest.raises(ManifestGapError):
        replay(tmp_path)
    (tmp_path / "snapshot_1.bin").unlink()
    with pytest.raises(ManifestGapError, match="no snapshot covers"):
        replay(tmp_path)


@pytest.mark.expects_warnings
def test_a_damaged_snapshot_costs_a_longer_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_log(tmp_path)
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        take_snapshot(w, replay(tmp_path))
    whole = replay(tmp_path)
    path = tmp_path / "snapshot_1.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert replay(tmp_path).same_state(whole)
    assert newest_snapshot(tmp_path) is None
    assert [r.getMessage() for r in caplog.records] == ["snapshot passed over"] * 2


def test_a_snapshot_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "snapshot_9.bin").write_bytes(encoded())
    with pytest.raises(CorruptError, match="says 4"):
        load_snapshot(tmp_path, 9)


def test_a_snapshot_before_anything_was_written(tmp_path: Path) -> None:
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        snapshot = take_snapshot(w, ManifestIndex())
        assert snapshot.position == LogPosition(0, 64, 0)
    assert replay(tmp_path).snapshot == (1, 0, 64)


def test_events_reach_the_engine_whole_and_in_order(tmp_path: Path) -> None:
    bodies = [b"first", bytes(150_000), b""]
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        for i, body in enumerate(bodies[:2]):
            batch = RecordBatch()
            batch.add_event(i, 20, body)
            w.append_batch(batch)
            w.commit()
        take_snapshot(w, replay(tmp_path), sections={"db:t": b"rows"})
        batch = RecordBatch()
        batch.add_event(2, 20, bodies[2])
        w.append_batch(batch)
    events: list[Event] = []
    sections: list[dict[str, bytes]] = []
    replay(tmp_path, on_event=events.append, on_sections=sections.append)
    assert sections == [{"db:t": b"rows"}]
    assert [e.body for e in events] == bodies[2:]
    (tmp_path / "snapshot_1.bin").unlink()
    events.clear()
    replay(tmp_path, on_event=events.append)
    assert [e.body for e in events] == bodies
