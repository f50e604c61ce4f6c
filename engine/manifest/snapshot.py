"""Snapshots (AOF2SNAP, version 3): the index at one place in the log, so that replay can start there.

File: a 96-byte header, a table of sections, the sections. `entries` is fixed-size structs keyed by segment id,
`strings` the keys and etags they point into; `pending_uploads`, `pending_deletes`, `log_objects` and `last_marker` are
msgpack; every other section belongs to the engine (one a catalog database, named `db:<name>`) and is opaque here.
Header and table share a crc64, each section has its own, and the header says how long the file is.

Version policy. A newer version is refused (UnsupportedError) and an older snapshot, or the whole log, is used instead.
Version 3 is the first; 1 and 2 never left their specification. Unknown section names are carried, not refused: they are
the engine's. An upgrade is simply the next snapshot.

Invariants
- A snapshot is written only for a position that is committed and synced, so replay from it never starts past the log.
- It gets its name by rename, after fsync. The SnapshotMarker is appended after that; a snapshot without one is valid.

A crash leaves `snapshot_<id>.bin.tmp` (removed by the next snapshot) or a whole snapshot.
Owner: the log's writer thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, LimitError, UnsupportedError
from aof2.engine.manifest.format import SNAPSHOT_NAME, LogPosition, pad8
from aof2.engine.manifest.index import ManifestEntry, ManifestIndex, Progress, Residency

log = logging.getLogger(__name__)

SNAPSHOT_MAGIC: Final = 0x414F4632534E4150  # "AOF2SNAP"
SNAPSHOT_VERSION: Final = 3
# magic, version, header_len, entry_count, chunk_index, chunk_offset, snapshot_id, ordinal, created_ms, entry_len,
# section_count, file_len, 8 reserved bytes, then the crc of header and table
HEADER: Final = Struct("<QIIQQQQQQIIQ")
HEADER_CRC_AT: Final = 88
HEADER_LEN: Final = 96
SECTION: Final = Struct("<32sQQQ")  # name, offset, length, crc64
SECTION_COUNT_MAX: Final = 1024
ENTRY: Final = Struct("<12Q4IHH5B7s")
ENTRY_LEN: Final = 128
_COLUMNS: Final = (
    *("segment_id", "base_offset", "durable_bytes", "segment_crc64", "ext_id", "coordinator_watermark"),
    *("compressed_bytes", "resident_bytes", "reclaimed_bytes", "last_ms", "string_offset", "source_tier"),
    *("epoch", "job_id", "dictionary_id", "reason_code", "key_len", "etag_len"),
    *("state", "compression", "upload", "hydration", "residency", "reserved"),
)
# `state` is the first four fields of an entry, a bit each.
_STATES: Final = tuple(tuple(bool(state >> bit & 1) for bit in range(4)) for state in range(16))
_STATE_OF: Final = {bits: state for state, bits in enumerate(_STATES)}
_FIELDS: Final = ManifestEntry.__struct_fields__

CRASH_POINTS: Final = (
    "manifest.snapshot.temp",
    "manifest.snapshot.synced",
    "manifest.snapshot.renamed",
)

_RESIDENCY_MAX: Final = int(Residency.TIER0 | Residency.TIER1 | Residency.TIER2)
_bits = attrgetter(*_FIELDS[:4])
_numbers, _small, _progress = (attrgetter(*names) for names in (_COLUMNS[1:10], _COLUMNS[11:16], _COLUMNS[19:23]))
_in_order_of_fields = itemgetter(*(_COLUMNS.index(name) for name in _FIELDS if name in _COLUMNS))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A decoded snapshot: the index as it was at `position`, and the engine's sections."""

    snapshot_id: int
    position: LogPosition
    created_ms: int
    index: ManifestIndex
    sections: dict[str, bytes]


def snapshot_name(snapshot_id: int) -> str:
    return f"snapshot_{snapshot_id}.bin"


def _pack_entry(segment_id: int, e: ManifestEntry, strings: bytearray) -> bytes:
    key, etag = e.key.encode(), e.etag.encode()
    at = len(strings)
    strings += key + etag
    lengths = len(key), len(etag)
    return ENTRY.pack(segment_id, *_numbers(e), at, *_small(e), *lengths, _STATE_OF[_bits(e)], *_progress(e), bytes(7))


def encode_snapshot(
    index: ManifestIndex,
    *,
    snapshot_id: int,
    position: LogPosition,
    created_ms: int,
    sections: Mapping[str, bytes] | None = None,
    entries: Iterable[tuple[int, ManifestEntry]] | None = None,
) -> list[bytes | bytearray]:
    """The bytes of a snapshot, in pieces to be written one behind the other: of a million segments nothing is held
    twice. The same state gives the same bytes. `entries`, by segment id, stand in for the index's own, and are taken
    one at a time."""
    packed, strings = bytearray(), bytearray()
    for segment_id, e in sorted(index.entries.items()) if entries is None else entries:
        packed += _pack_entry(segment_id, e, strings)
    pack = msgspec.msgpack.encode
    parts: dict[str, bytes | bytearray] = {
        "entries": packed,
        "strings": strings,
        "pending_uploads": pack(sorted((s, k, r) for (s, k), r in index.pending_uploads.items())),
        "pending_deletes": pack(sorted(index.pending_deletes)),
        "log_objects": pack(sorted(index.log_objects.items())),
        "last_marker": pack(index.snapshot),
        **(sections or {}),
    }
    return _assemble(parts, len(packed) // ENTRY_LEN, snapshot_id, position, created_ms)


def _assemble(
    parts: Mapping[str, bytes | bytearray], entry_count: int, snapshot_id: int, position: LogPosition, created_ms: int
) -> list[bytes | bytearray]:
    at = HEADER_LEN + len(parts) * SECTION.size
    table, body = bytearray(), list[bytes | bytearray]()
    for name, data in parts.items():
        label = name.encode()
        if not 0 < len(label) <= 32:
            raise LimitError(f"a snapshot section's name has 1 to 32 bytes: {name!r}")
        table += SECTION.pack(label, at, len(data), native.crc64(data))
        body += [data, bytes(pad8(len(data)) - len(data))]
        at += pad8(len(data))
    header = HEADER.pack(
        SNAPSHOT_MAGIC,
        SNAPSHOT_VERSION,
        HEADER_LEN,
        entry_count,
        position.chunk_index,
        position.chunk_offset,
        snapshot_id,
        position.ordinal,
        created_ms,
        ENTRY_LEN,
        len(parts),
        at,
    )
    header += bytes(HEADER_CRC_AT - len(header))
    crc = native.crc64(table, native.crc64(header))
    return [header + crc.to_bytes(8, "little"), table, *body]


class SnapshotHead(NamedTuple):
    """What a snapshot's header says."""

    snapshot_id: int
    position: LogPosition
    created_ms: int
    entry_count: int
    section_count: int


def decode_snapshot(data: bytes, *, path: str = "") -> Snapshot:
    """Checks everything before it gives anything."""
    head = _head(data, path)
    sections = {name: data[at:end] for name, at, end in _sections(data, head.section_count, path)}
    index = _index(sections, head.entry_count, path)
    return Snapshot(head.snapshot_id, head.position, head.created_ms, index, sections)


def check_snapshot(data: bytes, *, path: str = "") -> SnapshotHead:
    """Its header, when every checksum is right: the bytes are those that were written. Nothing is unpacked."""
    head = _head(data, path)
    for _ in _sections(data, head.section_count, path):
        pass
    return head


def _head(data: bytes, path: str) -> SnapshotHead:
    def corrupt(what: str, offset: int) -> CorruptError:
        return CorruptError(f"snapshot: {what}", path=path, offset=offset)

    if len(data) < HEADER_LEN:
        raise corrupt(f"{len(data)} bytes are too few for a header", len(data))
    fields = HEADER.unpack_from(data)
    magic, version, header_len, entry_count, chunk_index, chunk_offset, snapshot_id, ordinal, created_ms = fields[:9]
    entry_len, section_count, file_len = fields[9:]
    if magic != SNAPSHOT_MAGIC:
        raise corrupt(f"not a snapshot (magic {magic:#018x})", 0)
    if version > SNAPSHOT_VERSION:
        raise UnsupportedError(f"snapshot version {version}, this reader knows {SNAPSHOT_VERSION}", path=path)
    table_end = HEADER_LEN + section_count * SECTION.size
    if version < SNAPSHOT_VERSION or header_len != HEADER_LEN or entry_len != ENTRY_LEN:
        raise corrupt("header fields that never existed", 8)
    if section_count > SECTION_COUNT_MAX or table_end > len(data) or file_len != len(data):
        raise corrupt(f"it says {file_len} bytes in {section_count} sections, the file has {len(data)}", 80)
    crc = native.crc64(data[HEADER_LEN:table_end], native.crc64(data[:HEADER_CRC_AT]))
    if crc != int.from_bytes(data[HEADER_CRC_AT:HEADER_LEN], "little"):
        raise corrupt("header checksum", HEADER_CRC_AT)
    if any(data[HEADER.size : HEADER_CRC_AT]):
        raise UnsupportedError("snapshot with reserved header bytes set", path=path)
    position = LogPosition(chunk_index, chunk_offset, ordinal)
    return SnapshotHead(snapshot_id, position, created_ms, entry_count, section_count)


def _sections(data: bytes, count: int, path: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each, checked."""
    seen: set[str] = set()
    expected = HEADER_LEN + count * SECTION.size
    for i in range(count):
        name_bytes, offset, length, crc = SECTION.unpack_from(data, HEADER_LEN + i * SECTION.size)
        try:
            name = name_bytes.rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise CorruptError("snapshot: a section's name is not UTF-8", path=path) from None
        if offset != expected or offset + length > len(data) or name in seen:
            raise CorruptError(f"snapshot: section {name!r} is out of line", path=path, offset=offset)
        expected = offset + pad8(length)
        if native.crc64(memoryview(data)[offset : offset + length]) != crc or any(data[offset + length : expected]):
            raise CorruptError(f"snapshot: section {name!r} is damaged", path=path, offset=offset)
        seen.add(name)
        yield name, offset, offset + length
    if expected != len(data):
        raise CorruptError("snapshot: bytes after the last section", path=path, offset=expected)


def _index(sections: dict[str, bytes], entry_count: int, path: str) -> ManifestIndex:
    """Takes the index's own sections out of `sections`; what is left is the engine's."""
    index = ManifestIndex()
    unpack = msgspec.msgpack.decode
    try:
        entries, strings = sections.pop("entries"), sections.pop("strings")
        uploads = unpack(sections.pop("pending_uploads"), type=list[tuple[int, str, int]])
        deletes = unpack(sections.pop("pending_deletes"), type=list[tuple[int, str]])
        objects = unpack(sections.pop("log_objects"), type=list[tuple[str, str]])
        index.snapshot = unpack(sections.pop("last_marker"), type=tuple[int, int, int] | None)
    except (KeyError, msgspec.DecodeError) as e:
        raise CorruptError(f"snapshot: a section is missing or unreadable ({e})", path=path) from None
    if len(entries) != entry_count * ENTRY_LEN:
        raise CorruptError(f"snapshot: {len(entries)} bytes do not hold {entry_count} entries", path=path)
    index.pending_uploads = {(segment_id, key): reason for segment_id, key, reason in uploads}
    index.pending_deletes = set(deletes)
    index.log_objects = dict(objects)
    for row in ENTRY.iter_unpack(entries):
        index.entries[row[0]] = _unpack_entry(row, strings, path)
    return index


def _unpack_entry(row: tuple[Any, ...], strings: bytes, path: str) -> ManifestEntry:
    segment_id, at, key_len, etag_len, state, reserved = row[0], row[10], row[16], row[17], row[18], row[23]
    if state >= len(_STATES) or max(row[19:22]) > Progress.FAILED or row[22] > _RESIDENCY_MAX or any(reserved):
        raise UnsupportedError(f"snapshot entry of segment {segment_id} with unknown states", path=path)
    if at + key_len + etag_len > len(strings):
        raise CorruptError(f"snapshot: entry of segment {segment_id} points outside the strings", path=path)
    cut = at + key_len
    try:
        key, etag = strings[at:cut].decode(), strings[cut : cut + etag_len].decode()
    except UnicodeDecodeError:
        raise CorruptError(f"snapshot: entry of segment {segment_id} has a key that is not UTF-8", path=path) from None
    fields: tuple[Any, ...] = (*_STATES[state], *_in_order_of_fields(row), key, etag)
    return ManifestEntry(*fields)


def list_snapshots(directory: Path) -> list[int]:
    """Ids of the snapshots in the folder, oldest first."""
    names = os.listdir(directory)  # noqa: PTH208
    return sorted(int(match[1]) for name in names if (match := SNAPSHOT_NAME.fullmatch(name)))


class SnapshotAt(NamedTuple):
    """A local snapshot and the place in the log it stands for."""

    snapshot_id: int
    position: LogPosition
    created_ms: int


def local_snapshots(directory: Path) -> list[SnapshotAt]:
    """Snapshots in the folder by their headers, oldest first; what is not one is passed over."""
    found = []
    for snapshot_id in list_snapshots(directory):
        try:
            with open(directory / snapshot_name(snapshot_id), "rb") as f:
                head = f.read(HEADER.size)
        except FileNotFoundError:
            continue  # retention was here
        if len(head) == HEADER.size:
            magic, _, _, _, chunk_index, chunk_offset, number, ordinal, created_ms, *_ = HEADER.unpack(head)
            if magic == SNAPSHOT_MAGIC and number == snapshot_id:
                found.append(SnapshotAt(snapshot_id, LogPosition(chunk_index, chunk_offset, ordinal), created_ms))
    return found


def store_snapshot(env: Env, directory: Path, data: bytes | Sequence[bytes | bytearray], snapshot_id: int) -> Path:
    path = directory / snapshot_name(snapshot_id)
    env.replace_file(path, data, point="manifest.snapshot")
    return path


def load_snapshot(directory: Path, snapshot_id: int) -> Snapshot:
    path = directory / snapshot_name(snapshot_id)
    if not path.is_file():
        raise CorruptError("snapshot: not a file", path=str(path))
    snapshot = decode_snapshot(path.read_bytes(), path=str(path))
    if snapshot.snapshot_id != snapshot_id:
        raise CorruptError(f"snapshot: its header says {snapshot.snapshot_id}", path=str(path), offset=48)
    return snapshot


def usable_snapshots(directory: Path, *, level: int = logging.DEBUG) -> Iterator[Snapshot]:
    """Those that are whole, newest first; what is passed over is logged at that level. One that is damaged or from the
    future costs a longer replay, as long as the chunks before it are still here."""
    for snapshot_id in reversed(list_snapshots(directory)):
        try:
            yield load_snapshot(directory, snapshot_id)
        except (CorruptError, UnsupportedError, FileNotFoundError) as e:
            log.log(level, "snapshot passed over", extra={"snapshot_id": snapshot_id, "error": str(e)})


def newest_snapshot(directory: Path) -> Snapshot | None:
    """Where a start begins; one that is passed over is worth a warning there."""
    return next(usable_snapshots(directory, level=logging.WARNING), None)
