"""engine/FORMATS.md is true: its tables add up, and its examples decode to what they say and encode to themselves."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import pytest

import aof2.engine
from aof2.engine.audit import format as audit_format
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.blob import format as blob_format
from aof2.engine.blob import pack
from aof2.engine.blob.reader import BlobReader
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.env import Env
from aof2.engine.follow.heartbeat import parse_heartbeat
from aof2.engine.inbox import format as inbox_format
from aof2.engine.intents import format as intent_format
from aof2.engine.manifest import format as manifest_format
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest import snapshot as manifest_snapshot
from aof2.engine.manifest.format import LogPosition, RecordType
from aof2.engine.manifest.index import Progress, Residency
from aof2.engine.manifest.reader import parse_chunk
from aof2.engine.manifest.snapshot import decode_snapshot, encode_snapshot
from aof2.engine.recency import saved
from aof2.engine.recency import uses as recency_uses
from aof2.engine.recency.segmented import USED_BIT
from aof2.engine.remote.keys import InboxPackKey, parse_key
from aof2.engine.segment import format as segment_format
from aof2.engine.segment.index import SegmentIndex
from aof2.engine.segment.reader import SegmentReader
from aof2.native import crc64
from tests.blob.build import encode_blob, read_all

PAGE = (Path(str(aof2.engine.__file__)).parent / "FORMATS.md").read_text()
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8}


def example(name: str) -> bytes:
    (block,) = re.findall(rf"```hex {re.escape(name)}\n(.*?)```", PAGE, re.DOTALL)
    data = b""
    for line in block.splitlines():
        match = re.match(r"([0-9a-f]{4}): ((?:[0-9a-f]{2} ?)+)", line)
        assert match, line
        assert int(match[1], 16) == len(data), f"{name}: {line} is not at the offset it says"
        data += bytes.fromhex(match[2])
    return data


def tables() -> list[tuple[str, int, list[tuple[int, int, str]]]]:
    """(title, length in the title, [(offset, size, field)]) of each struct on the page."""
    found = []
    for title, length, body in re.findall(r"### ([^\n]+?) \((\d+) bytes[^)]*\)\n(.*?)(?=\n#|\Z)", PAGE, re.DOTALL):
        rows = []
        for offset, kind, count, field in re.findall(r"\| (\d+) \| ([ui]\d+)(?:\[(\d+)\])? \| (\w+) \|", body):
            rows.append((int(offset), SIZES[kind] * int(count or 1), field))
        found.append((title, int(length), rows))
    return found


def test_the_heartbeat_on_the_page_is_one() -> None:
    (block,) = re.findall(r"```json heartbeat\n(.*?)```", PAGE, re.DOTALL)
    beat = parse_heartbeat(block.encode())
    assert beat is not None
    assert beat.streams[1].position == (12, 4096, 5170)
    assert parse_heartbeat(msgspec.json.encode(beat)) == beat
    assert parse_heartbeat(msgspec.json.encode(msgspec.structs.replace(beat, format_version=2))) is None


def test_every_struct_is_on_the_page_with_its_real_length() -> None:
    lengths = {title: length for title, length, _ in tables()}
    assert lengths == {
        "RecencyHeader": saved.HEADER.size,
        "UsesSample": recency_uses.HEADER.size,
        "UsesEntry": recency_uses.ENTRY.size,
        "SegmentHeader v2": segment_format.HEADER_BYTES[segment_format.Version.V2],
        "Record v2": segment_format.RECORD_BYTES[segment_format.Version.V2],
        "SegmentFooter v2": segment_format.FOOTER_BYTES[segment_format.Version.V2],
        "SegmentHeader v3": segment_format.HEADER_BYTES[segment_format.Version.V3],
        "Record v3": segment_format.RECORD_BYTES[segment_format.Version.V3],
        "SegmentFooter v3": segment_format.FOOTER_BYTES[segment_format.Version.V3],
        "Pointer": 48,
        "ChunkHeader": manifest_format.CHUNK_HEADER.size,
        "RecordHeader": manifest_format.RECORD_HEADER.size,
        "SnapshotHeader": manifest_snapshot.HEADER_LEN,
        "SectionEntry": manifest_snapshot.SECTION.size,
        "ManifestEntry": manifest_snapshot.ENTRY.size,
        "LogHeader": 24,
        "LogRecord": 16,
        "ArtifactRef": 8,
        "IntentRecord": intent_format.RECORD.size,
        "FrameEntry": blob_format.ENTRY.size,
        "BlobTrailer": blob_format.TRAILER.size,
        "PackEntry": pack.ENTRY.size,
        "PackTrailer": pack.TRAILER.size,
    }


@pytest.mark.parametrize(("title", "length", "rows"), tables(), ids=lambda v: v if isinstance(v, str) else "")
def test_offsets_add_up(title: str, length: int, rows: list[tuple[int, int, str]]) -> None:
    position = 0
    for offset, size, field in rows:
        assert offset == position, f"{title}.{field}"
        position += size
    assert position == length


def test_payload_table_names_every_type() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\w+) \| .+ \|$", PAGE.split("### Payloads")[1].split("### Commits")[0], re.MULTILINE
    )
    assert [(int(i), name) for i, name in rows] == [(int(t), t.label) for t in RecordType]
    audit_rows = re.findall(r"^\| (0x\d\d) \| (\w+) \|", PAGE, re.MULTILINE)
    assert [(int(i, 16), name) for i, name in audit_rows] == [(int(t), t.name) for t in audit_format.RecordType]


@pytest.mark.parametrize("version", [2, 3])
def test_segments(tmp_path: Path, version: int) -> None:
    path = tmp_path / "3.seg"
    data = example(f"segment-v{version}")
    path.write_bytes(data)
    with SegmentReader(Env(), path) as reader:
        reader.verify()
        assert reader.sealed
        assert (reader.header.stream_id, reader.header.segment_id) == (7, 3)
        records = [(bytes(r.payload), r.logical_offset, r.timestamp_ms, r.ext_id, r.flags) for r in reader.records()]
        footer = reader.footer
        assert footer is not None
        assert footer.record_count == 2
        assert (
            segment_format.encode_header(reader.header)
            == data[: segment_format.HEADER_BYTES[segment_format.Version(version)]]
        )
        assert (
            segment_format.encode_footer(footer)
            == data[-segment_format.FOOTER_BYTES[segment_format.Version(version)] :]
        )
    ext_id = 90 if version == 3 else 0
    assert records == [(b"hello\n", 1000, 1_700_000_000_001, ext_id, 0), (b"!", 1006, 1_700_000_000_002, 0, 1)]
    if version == 3:
        assert (reader.header.base_offset, reader.header.base_record_count, reader.header.ext_id) == (1000, 40, 9)
        assert (footer.coordinator_watermark, footer.last_record_ts_ms) == (55, 1_700_000_000_002)


def test_segment_index() -> None:
    raw, payload = example("segment-v3"), b"hello\n!"
    data = example("segment-index")
    index = SegmentIndex.decode(data)
    assert (index.record_count, index.payload_bytes, index.raw_bytes) == (2, len(payload), len(raw))
    assert index.raw(0, len(raw), lambda start, length: payload[start : start + length]) == raw
    assert index.check(payload, 0, 0, 2) == 2
    assert data == raw[:96] + raw[-96:] + raw[96:132] + raw[138:174]


def test_pointer() -> None:
    data = example("current.sealed")
    pointer = segment_format.decode_pointer(data)
    assert (pointer.segment_id, pointer.coordinator_watermark, pointer.durable_bytes) == (3, 55, 175)
    assert segment_format.encode_pointer(pointer) == data


def test_manifest_chunk() -> None:
    data = example("manifest-chunk")
    chunk = parse_chunk(data, last=False)
    assert chunk is not None
    assert chunk.header.pack() == data[:64]
    opened, uploaded, marker = chunk.records()
    assert opened.decoded() == p.SegmentOpened(1000, 1)
    assert (opened.segment_id, opened.timestamp_ms) == (3, 1_700_000_000_000)
    assert uploaded.decoded() == p.UploadDone("a/b.blob", "e1")
    assert uploaded.logical_offset == 5
    assert isinstance(marker.decoded(), p.CustomEvent)
    assert marker.logical_offset == 2
    for record in (opened, uploaded, marker):
        assert p.encode(record.decoded()) == (record.type_id, record.payload)


def test_snapshot() -> None:
    data = example("snapshot")
    snapshot = decode_snapshot(data)
    assert (snapshot.snapshot_id, snapshot.position) == (1, LogPosition(1, 64, 3))
    entry = snapshot.index.entries[3]
    assert (entry.base_offset, entry.key, entry.etag, entry.upload) == (1000, "a/b.blob", "e1", Progress.DONE)
    assert entry.residency == Residency.TIER0 | Residency.TIER2
    assert snapshot.sections == {"db:chunk_catalog": b"rows"}
    again = encode_snapshot(
        snapshot.index,
        snapshot_id=1,
        position=snapshot.position,
        created_ms=snapshot.created_ms,
        sections=snapshot.sections,
    )
    assert b"".join(again) == data


def test_audit_log() -> None:
    data = example("audit")
    records = list(Replay(data))
    kinds = [audit_format.encode_payload(r.payload)[0] for r in records]
    assert kinds == [0x01, 0x30, 0x10, 0x11, 0x20, 0x31]
    state = VisibleState.of(records)
    assert state.problems == []
    assert (len(state), state.problems) == (0, [])
    rebuilt, previous = audit_format.encode_header(), bytes(32)
    for r in records:
        kind, payload = audit_format.encode_payload(r.payload)
        record = audit_format.encode_record(previous, r.logseq, kind, payload)
        rebuilt, previous = rebuilt + record, record[-32:]
    assert rebuilt == data


def test_blob() -> None:
    data = example("blob")
    raw = b"A" * 4096 + b"xyz"
    reader = BlobReader(lambda offset, length: data[offset : offset + length], len(data), chunk_id=12)
    assert read_all(reader) == raw
    assert reader.read_block(1) == b"xyz"
    assert reader.footer.sha256 == hashlib.sha256(raw).digest()
    # zstd's output may change with its version; the footer's bytes may not.
    again = encode_blob(raw, chunk_id=12, generation=2, block_bytes=4096)
    assert read_all(BlobReader(lambda o, n: again[o : o + n], len(again))) == raw
    assert blob_format.encode_footer(reader.footer) == data[-136:]


def test_pack() -> None:
    data = example("pack")
    members = pack.decode_directory(data, len(data), tenant="default")
    assert [(m.chunk_id, m.generation, m.raw_len, m.compressed) for m in members] == [
        (12, 2, 300, True),
        (13, 1, 3, False),
    ]
    for member, raw in zip(members, (b"A" * 300, b"xyz"), strict=True):
        blob = data[member.offset : member.offset + member.stored_len]
        reader = BlobReader(lambda o, n, blob=blob: blob[o : o + n], len(blob), sha256=member.sha256)
        assert read_all(reader) == raw
        assert pack.member_of(reader.footer, member.offset) == member
    assert pack.encode_directory(members, pack.name_hash("default", members)) == data[-256:]


def test_intent_log() -> None:
    data = example("intent-log")
    kinds, fh, time_ns = intent_format.IntentKind, 1 << 61 | 1, 1_700_000_000_123_456_789
    ino, top = 1 << 40 | 300, 1 << 40 | 1
    born, closed, unlinked = intent_format.parse(data, check=True)
    assert born == (kinds.BORN, ino, top, b"part-0", 0o100644, 1000, 1000, time_ns, fh, 0o100101, 80, 0)
    assert closed == (kinds.CLOSED, ino, 0, b"", 0, 0, 0, 0, fh, intent_format.DROPPED, 152, 0)
    assert unlinked == (kinds.UNLINKED, ino, top, b"part-0", 0, 0, 0, time_ns + 1, 0, 0, 232, 0)
    assert intent_format.pack(kinds.UNLINKED, ino, parent=top, name=b"part-0", time_ns=time_ns + 1) == data[152:]


def test_intent_moves() -> None:
    data = example("intent-moves")
    kinds, time_ns = intent_format.IntentKind, 1_700_000_000_123_456_789
    ino, top, above = 1 << 40 | 300, 1 << 40 | 1, 1 << 40 | 301
    replaced, exchanged = intent_format.parse(data, check=True)
    assert replaced == (
        kinds.REPLACED, ino, top, b"part-0\0data", 0o100000, 0, 0, time_ns + 2, top, 1, 88, 1 << 40 | 200
    )  # fmt: skip
    assert exchanged == (
        kinds.EXCHANGED, ino, top, b"data\0old", 0o100000, 4, 2, time_ns + 3, above, 0o040000, 168, 1 << 40 | 302
    )  # fmt: skip
    assert (replaced.names, exchanged.names) == ((b"part-0", b"data"), (b"data", b"old"))
    fields = exchanged._asdict()
    del fields["end"]
    assert intent_format.pack(**fields) == data[88:]


def test_intent_xattrs() -> None:
    data = example("intent-xattrs")
    kinds, ino, time_ns = intent_format.IntentKind, 1 << 40 | 300, 1_700_000_000_123_456_789
    was_set, removed = intent_format.parse(data, check=True)
    assert was_set == (kinds.XATTR_SET, ino, 0, b"user.colour\0green", 0o100000, 0, 0, time_ns + 4, 0, 0, 96, 0)
    assert was_set.names == (b"user.colour", b"green")
    assert removed == (kinds.XATTR_REMOVED, ino, 0, b"user.colour", 0o100000, 0, 0, time_ns + 5, 0, 0, 184, 0)


def test_recency_example() -> None:
    data = example("recency")
    found = saved.decode(data)
    assert found is not None
    assert found.closed
    assert found.image.counts == (2, 1, 1)
    assert [key & 0xFF for key in found.image.keys] == [2, 5, 3, 4]
    assert list(found.image.sizes) == [16 | USED_BIT, 1, 4 | USED_BIT, 16]
    assert b"".join(saved.encode(found.image, 1_760_000_000_000, closed=True)) == data


def test_inbox_commit() -> None:
    (text,) = re.findall(r"```json inbox-commit\n(.*?)```", PAGE, re.DOTALL)
    commit = inbox_format.decode(text.encode(), inbox_format.Commit)
    assert inbox_format.encode(commit).decode() == text
    assert inbox_format.problem_of(commit, key="inbox/default/daily.commit") == ""
    members, numbers = [], [blob.number for one in commit.files for blob in one.blobs]
    body = bytearray()
    for number, data in zip(numbers, (b"1,2\n", b"3,4\n"), strict=True):
        writer = BlobWriter(body.extend, chunk_id=number, generation=1)
        writer.add_block(data)
        footer = writer.finish()
        members.append(pack.member_of(footer, len(body) - footer.blob_len))
    hashed = pack.name_hash(commit.tenant, members)
    made = bytes(body) + pack.encode_directory(members, hashed)
    (staged,) = commit.objects
    assert parse_key(staged.key) == InboxPackKey("default", "daily", "9f49ac5c", numbers[0], hashed)
    assert (staged.size, staged.crc64) == (len(made), f"{crc64(made):016x}")
    for one, member in zip(commit.files, members, strict=True):
        (blob,) = one.blobs
        assert (blob.offset, blob.length, blob.sha256) == (member.offset, member.stored_len, member.sha256.hex())
        assert one.sha256 == blob.sha256


def test_uses_example() -> None:
    data = example("uses")
    sample = recency_uses.decode(data)
    assert (sample.uses, sample.missed, sample.shift, sample.low_water) == (5, 1, 1, 0.9)
    assert (sample.to_ms - sample.from_ms, sample.limit_units * 4096) == (60_000, 1 << 30)
    assert [(one.ino & 0xFF, one.did.name, one.units) for one in sample.entries] == [
        (3, "HIT", 16),
        (5, "MISS", 256),
        (8, "CAME", 4),
    ]
    assert all(recency_uses.is_sampled(one.ino, sample.shift) for one in sample.entries)
    assert recency_uses.encode(sample) == data


def inode_example() -> InodeRow:
    times = {"mtime_ns": 1700000000123456789, "ctime_ns": 1700000000123456789, "atime_ns": -1500000001}
    numbers = {"uid": 1000, "gid": 1000, "size": 5000, "generation": 1, "parent": 1 << 40 | 1}
    return InodeRow(1 << 40 | 300, 0o100644, last_name=b"part-0", **numbers, **times)


def test_inode_row() -> None:
    """The channel's reader has the same example (`tests/channel/test_told.py`)."""
    assert t.encode(inode_example()) == example("inode-row")
    assert t.INODES.decode(example("inode-row")) == inode_example()
