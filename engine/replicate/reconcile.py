"""The log against the listing: which of a stream's objects are on the remote, and whether they are the right ones.

Expected is what the rows say was uploaded (and not deleted). Compared is what is cheap and enough: a chunk or snapshot
that is still here by size and crc64 of the whole object and by its metadata; one that is not, by the etag that was
recorded when it was put. `deep` reads and parses every object.

Invariants
- `examine_stream` reads only. `repair_stream` puts what is missing and still here, under the fence; it never replaces
  an object: one that is different is reported, and stays.
- What is queued for deletion may be there or not: either is right.

Owner: blocking, any thread (repairs: the stream's upload task). A crash leaves what `stream` says of an upload.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from aof2 import native
from aof2.engine.catalog.store import Catalog
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest import retention
from aof2.engine.manifest.chunk import as_uploaded
from aof2.engine.manifest.format import chunk_name
from aof2.engine.manifest.reader import ChunkFile, chunk_headers
from aof2.engine.manifest.snapshot import check_snapshot, local_snapshots, snapshot_name
from aof2.engine.remote import keys
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.replicate.listing import RemoteLog
from aof2.engine.replicate.stream import (
    StreamUploads,
    log_state,
    sealed_chunk,
)


class Status(StrEnum):
    """What is so with one object. Scripts see these names: they stay."""

    OK = "ok"
    MISSING = "missing"  # not there, but what it held is here: a repair puts it again
    REPUT = "reput"  # was missing, and is there again
    NEEDS_REPAIR = "needs_repair"  # not there, and not here either
    DIVERGENT = "divergent"  # other bytes than ours, or damaged ones
    UNKNOWN = "unknown"  # nothing that the log speaks of


class ObjectFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the stream. `covered`: a newer snapshot is there, so a rebuild does without it."""

    key: str
    status: Status
    detail: str = ""
    size: int = 0
    covered: bool = False


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stream compared with the remote. `retention` says which promises of local retention do not hold."""

    stream_id: int
    objects: list[ObjectFinding]
    retention: list[str] = msgspec.field(default_factory=list)

    def of(self, *statuses: Status) -> list[ObjectFinding]:
        return [finding for finding in self.objects if finding.status in statuses]

    @property
    def clean(self) -> bool:
        return not self.retention and not self.of(Status.MISSING, Status.NEEDS_REPAIR, Status.DIVERGENT)


def examine_stream(
    store: RemoteStore, catalog: Catalog, directory: Path, stream_id: int, *, deep: bool = False
) -> StreamReport:
    """Compares; changes nothing. TransientError when the remote cannot be asked."""
    return _Examination(store, catalog, directory, stream_id, deep=deep).run()


def repair_stream(report: StreamReport, uploads: StreamUploads) -> StreamReport:
    """Puts what is missing on the remote and still here. The report as it is afterwards."""
    after = [_reput(finding, uploads) if finding.status is Status.MISSING else finding for finding in report.objects]
    return msgspec.structs.replace(report, objects=after)


def _reput(finding: ObjectFinding, uploads: StreamUploads) -> ObjectFinding:
    match keys.parse_key(finding.key):
        case keys.ManifestChunkKey(_, index):
            uploads.reput_chunk(index)
        case keys.ManifestSnapshotKey(_, snapshot_id):
            uploads.upload_snapshot(snapshot_id)
        case _:
            return finding
    return msgspec.structs.replace(finding, status=Status.REPUT, detail="put again from the local copy")


class _Examination:
    def __init__(self, store: RemoteStore, catalog: Catalog, directory: Path, stream_id: int, *, deep: bool) -> None:
        self.store = store
        self.directory = directory
        self.stream_id = stream_id
        self.deep = deep
        self.state = log_state(catalog, stream_id)
        self.remote = RemoteLog(store, stream_id)
        self.headers = [header for _, header in chunk_headers(directory)]
        self.snapshots = {s.snapshot_id: s.position for s in local_snapshots(directory)}

    def run(self) -> StreamReport:
        inventory = self.remote.inventory
        there = {
            i.key: i for i in (*inventory.chunks.values(), *inventory.bundles.values(), *inventory.snapshots.values())
        }
        expected = set(self.state.objects) - set(self.state.pending_deletes)
        unlogged = set(there) - set(self.state.objects) - set(self.state.pending_deletes)
        findings = [self._expected(key, there.get(key)) for key in sorted(expected)]
        findings += [self._unlogged(there[key]) for key in sorted(unlogged)]
        findings += [ObjectFinding(key=key, status=Status.UNKNOWN) for key in inventory.others]
        covered = self.snapshots[max(self.snapshots)] if self.snapshots else None
        rules = retention.violations(self.headers, covered)
        return StreamReport(stream_id=self.stream_id, objects=findings, retention=rules)

    def _finding(self, key: str, status: Status, detail: str, size: int = 0) -> ObjectFinding:
        covered = self._covered(keys.parse_key(key))
        if status is Status.NEEDS_REPAIR and covered:
            detail += "; a newer snapshot covers it: only history is lost"
        return ObjectFinding(key=key, status=status, detail=detail, size=size, covered=covered)

    def _expected(self, key: str, info: BlobInfo | None) -> ObjectFinding:
        parsed = keys.parse_key(key)
        if info is not None:
            problem = self._compare(parsed, info) or self._parse(parsed)
            return self._finding(key, Status.DIVERGENT if problem else Status.OK, problem, info.size)
        if isinstance(parsed, keys.ManifestChunkKey) and self.remote.inventory.bundle_of(parsed.chunk_index):
            return self._finding(key, Status.OK, "in a bundle")
        if local_copy(self.directory, parsed) is not None:
            kind = "chunk" if isinstance(parsed, keys.ManifestChunkKey) else "snapshot"
            return self._finding(key, Status.MISSING, f"the {kind} is here")
        return self._finding(key, Status.NEEDS_REPAIR, "neither there nor here")

    def _unlogged(self, info: BlobInfo) -> ObjectFinding:
        """An upload whose end was not logged, what another writer put, or something left over."""
        parsed = keys.parse_key(info.key)
        next_index = self.headers[-1].chunk_index + self.headers[-1].sealed if self.headers else 0
        status, detail = Status.UNKNOWN, "the log does not speak of it"
        if local_copy(self.directory, parsed) is not None:
            detail = self._compare(parsed, info)
            status = Status.DIVERGENT if detail else Status.OK
        elif isinstance(parsed, keys.ManifestChunkKey) and parsed.chunk_index >= next_index:
            status, detail = Status.DIVERGENT, f"the log here ends before chunk {next_index}"
        return self._finding(info.key, status, detail, info.size)

    def _compare(self, parsed: keys.RemoteKey | None, info: BlobInfo) -> str:
        """What is different, or nothing."""
        data = local_copy(self.directory, parsed)
        if data is not None:
            return self._compare_bytes(parsed, info, data)
        recorded = self.state.objects.get(info.key, "")
        etag = info.etag
        if not etag:
            head = self.store.head_blob(info.key)
            etag = head.etag if head is not None else ""
        if recorded and etag and recorded != etag:
            if isinstance(parsed, keys.ManifestBundleKey):
                return self._parse(parsed, always=True)  # composed again, perhaps of other parts: its content decides
            return f"its etag is {etag}, {recorded} was put"
        return ""

    def _compare_bytes(self, parsed: keys.RemoteKey | None, info: BlobInfo, data: bytes) -> str:
        if info.size != len(data):
            return f"{info.size} bytes, the local copy has {len(data)}"
        head = self.store.head_blob(info.key)
        if head is None:
            return "gone since it was listed"
        if head.crc64 is not None and head.crc64 != native.crc64(data):
            return f"crc64 {head.crc64:016x}, the local copy's is {native.crc64(data):016x}"
        if isinstance(parsed, keys.ManifestChunkKey):
            index = parsed.chunk_index
            sealed = sealed_chunk(ChunkFile(index, self.directory / chunk_name(index)))
            wanted = {
                "chunk_crc64": f"{sealed.header.chunk_crc64:016x}",
                "base_record": str(sealed.header.base_record),
                "record_count": str(sealed.record_count),
            }
            for name, value in wanted.items():
                if head.metadata.get(name, value) != value:
                    return f"its metadata says {name} {head.metadata[name]}, the local copy {value}"
        return ""

    def _parse(self, parsed: keys.RemoteKey | None, *, always: bool = False) -> str:
        if not (self.deep or always):
            return ""
        try:
            match parsed:
                case keys.ManifestChunkKey(_, index):
                    self.remote.chunk(index)
                case keys.ManifestBundleKey(_, first, last):
                    for index in range(first, last + 1):
                        self.remote.bundled_chunk((first, last), index)
                case keys.ManifestSnapshotKey(_, snapshot_id):
                    self.remote.snapshot(snapshot_id)
        except (CorruptError, UnsupportedError) as e:
            return str(e)
        return ""

    def _covered(self, parsed: keys.RemoteKey | None) -> bool:
        newest = max(self.snapshots.keys() & self.remote.inventory.snapshots.keys(), default=None)
        if newest is None:
            return False
        match parsed:
            case keys.ManifestChunkKey(_, last) | keys.ManifestBundleKey(_, _, last):
                return last < self.snapshots[newest].chunk_index
            case keys.ManifestSnapshotKey(_, snapshot_id):
                return snapshot_id < newest
        return False


def local_copy(directory: Path, parsed: keys.RemoteKey | None) -> bytes | None:
    """The bytes that belong under the key, from this folder, checked; None when they are not here or damaged."""
    try:
        match parsed:
            case keys.ManifestChunkKey(_, index):
                chunk = ChunkFile(index, directory / chunk_name(index))
                header = sealed_chunk(chunk).header
                return as_uploaded(chunk.read()[: header.committed_len]) if header.sealed else None
            case keys.ManifestSnapshotKey(_, snapshot_id):
                path = directory / snapshot_name(snapshot_id)
                data = path.read_bytes()
                check_snapshot(data, path=str(path))
                return data
    except (Aof2Error, OSError):
        return None
    return None
