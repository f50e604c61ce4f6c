"""Names of remote objects, built and parsed in one place. What the seeds fix stays as they spell it.

    checkpoints/{tenant}/{checkpoint_id}/chunk-{chunk_id}-{generation}-{hash}.blob
    checkpoints/{tenant}/{checkpoint_id}/delta-{chunk_id}-{delta_id}-{generation}-{hash}.blob
    checkpoints/{tenant}/{checkpoint_id}/pack-{first_chunk_id}-{hash}.blob
    snapshots/{tenant}/{snapshot_id}/meta-{hash}.json
    manifest/{stream_id}/{chunk_index}.mlog · bundle-{first}-{last}.mlogs · snapshot_{id}.bin
    audit/{tenant_id}/{first_logseq}.asl
    volume.json

`hash` is a SHA-256 in lowercase hex, numbers are u64 in decimal without leading zeros, so one object has one name.
A pack's hash is that of its members' names (`blob/pack.py`), the others' that of the raw chunk.

Invariants
- Every key built here parses back to the same fields, and a key that parses is built again as it was.
- `check_key` refuses whatever could leave a directory remote's root or collide with its own files.

Owner: pure functions. A crash leaves nothing.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

VOLUME_KEY: Final = "volume.json"
RESERVED_PREFIX: Final = ".aof2-"
"""No part of a key starts so: a directory remote's own files do."""
KEY_BYTES_MAX: Final = 900
"""S3 allows 1,024 with the URL's prefix."""
_U64_MAX: Final = (1 << 64) - 1
_TENANT: Final = re.compile(r"[a-z0-9_-]{1,64}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_PLACE: Final = r"(?P<tenant>[a-z0-9_-]{1,64})"
_HASH: Final = r"(?P<hash>[0-9a-f]{64})"


def _u64(name: str) -> str:
    return rf"(?P<{name}>0|[1-9][0-9]{{0,19}})"


class ChunkBlobKey(NamedTuple):
    tenant: str
    checkpoint_id: int
    chunk_id: int
    generation: int
    sha256: bytes


class DeltaBlobKey(NamedTuple):
    tenant: str
    checkpoint_id: int
    chunk_id: int
    delta_id: int
    generation: int
    sha256: bytes


class PackKey(NamedTuple):
    tenant: str
    checkpoint_id: int
    chunk_id: int  # of its first member
    name_hash: bytes


class SnapshotMetaKey(NamedTuple):
    tenant: str
    snapshot_id: int
    sha256: bytes


class ManifestChunkKey(NamedTuple):
    stream_id: int
    chunk_index: int


class ManifestBundleKey(NamedTuple):
    stream_id: int
    first: int
    last: int


class ManifestSnapshotKey(NamedTuple):
    stream_id: int
    snapshot_id: int


class AuditRangeKey(NamedTuple):
    tenant_id: int
    first_logseq: int


class VolumeKey(NamedTuple):
    pass


RemoteKey = (
    ChunkBlobKey
    | DeltaBlobKey
    | PackKey
    | SnapshotMetaKey
    | ManifestChunkKey
    | ManifestBundleKey
    | ManifestSnapshotKey
    | AuditRangeKey
    | VolumeKey
)

_PATTERNS: Final = (
    (
        ChunkBlobKey,
        rf"checkpoints/{_PLACE}/{_u64('checkpoint_id')}/chunk-{_u64('chunk_id')}-{_u64('generation')}-{_HASH}\.blob",
    ),
    (
        DeltaBlobKey,
        rf"checkpoints/{_PLACE}/{_u64('checkpoint_id')}/"
        rf"delta-{_u64('chunk_id')}-{_u64('delta_id')}-{_u64('generation')}-{_HASH}\.blob",
    ),
    (PackKey, rf"checkpoints/{_PLACE}/{_u64('checkpoint_id')}/pack-{_u64('chunk_id')}-{_HASH}\.blob"),
    (SnapshotMetaKey, rf"snapshots/{_PLACE}/{_u64('snapshot_id')}/meta-{_HASH}\.json"),
    (ManifestChunkKey, rf"manifest/{_u64('stream_id')}/{_u64('chunk_index')}\.mlog"),
    (ManifestBundleKey, rf"manifest/{_u64('stream_id')}/bundle-{_u64('first')}-{_u64('last')}\.mlogs"),
    (ManifestSnapshotKey, rf"manifest/{_u64('stream_id')}/snapshot_{_u64('snapshot_id')}\.bin"),
    (AuditRangeKey, rf"audit/{_u64('tenant_id')}/{_u64('first_logseq')}\.asl"),
)
_COMPILED: Final = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def chunk_blob_key(tenant: str, checkpoint_id: int, chunk_id: int, generation: int, sha256: bytes) -> str:
    return f"{checkpoint_prefix(tenant, checkpoint_id)}chunk-{_n(chunk_id)}-{_n(generation)}-{_hex(sha256)}.blob"


def content_of(name: bytes) -> bytes:
    """The hash, in hex, in what ends with a blob's key; of anything else, bytes that are no hash."""
    return name.removesuffix(b".blob")[-64:]


def delta_blob_key(
    tenant: str, checkpoint_id: int, chunk_id: int, delta_id: int, generation: int, sha256: bytes
) -> str:
    name = f"delta-{_n(chunk_id)}-{_n(delta_id)}-{_n(generation)}-{_hex(sha256)}.blob"
    return f"{checkpoint_prefix(tenant, checkpoint_id)}{name}"


def pack_key(tenant: str, checkpoint_id: int, first_chunk_id: int, name_hash: bytes) -> str:
    return f"{checkpoint_prefix(tenant, checkpoint_id)}pack-{_n(first_chunk_id)}-{_hex(name_hash)}.blob"


def is_pack(key: str) -> bool:
    """Whether blobs share the object under this key."""
    return key.rpartition("/")[2].startswith("pack-")


def snapshot_meta_key(tenant: str, snapshot_id: int, sha256: bytes) -> str:
    return f"snapshots/{_t(tenant)}/{_n(snapshot_id)}/meta-{_hex(sha256)}.json"


def manifest_snapshot_key(stream_id: int, snapshot_id: int) -> str:
    return f"manifest/{_n(stream_id)}/snapshot_{_n(snapshot_id)}.bin"


def audit_range_key(tenant_id: int, first_logseq: int) -> str:
    return f"audit/{_n(tenant_id)}/{_n(first_logseq)}.asl"


def checkpoint_prefix(tenant: str, checkpoint_id: int) -> str:
    """Everything one checkpoint uploaded."""
    return f"checkpoints/{_t(tenant)}/{_n(checkpoint_id)}/"


def parse_key(key: str) -> RemoteKey | None:
    """What the object is, or None for a name that is not ours."""
    if key == VOLUME_KEY:
        return VolumeKey()
    for kind, pattern in _COMPILED:
        match = pattern.fullmatch(key)
        if match is None:
            continue
        fields = match.groupdict()
        values: list[str | int | bytes] = []
        for name, text in fields.items():
            if name == "tenant":
                values.append(text)
            elif name == "hash":
                values.append(bytes.fromhex(text))
            elif int(text) > _U64_MAX:
                return None
            else:
                values.append(int(text))
        return kind(*values)  # type: ignore[arg-type]
    return None


def check_key(key: str) -> str:
    """`key`, or ValueError for one that no remote of ours holds."""
    problem = ""
    if not key:
        problem = "it is empty"
    elif _CONTROL.search(key):
        problem = "it has control characters"
    elif "\\" in key:
        problem = "it has a backslash, which some servers take for a slash"
    elif len(key.encode()) > KEY_BYTES_MAX:
        problem = f"it is longer than {KEY_BYTES_MAX} bytes"
    elif any(part in ("", ".", "..") for part in key.split("/")):
        problem = "it has an empty or dotted part"
    elif any(part.startswith(RESERVED_PREFIX) for part in key.split("/")):
        problem = f"parts starting with {RESERVED_PREFIX} are reserved"
    if problem:
        raise ValueError(f"not a remote key: {key[:100]!r}: {problem}")
    return key


def check_prefix(prefix: str) -> str:
    """A prefix for listing: the start of some key, or nothing."""
    if prefix:
        check_key(prefix.rstrip("/") if prefix.endswith("/") else prefix)
        if prefix.endswith("//"):
            raise ValueError(f"not a remote prefix: {prefix[:100]!r}")
    return prefix


def _n(value: int) -> int:
    if not 0 <= value <= _U64_MAX:
        raise ValueError(f"{value} is not a u64")
    return value


def _t(tenant: str) -> str:
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"tenant {tenant!r}: allowed are 1 to 64 of a-z 0-9 _ -")
    return tenant


def _hex(sha256: bytes) -> str:
    if len(sha256) != 32:
        raise ValueError(f"a SHA-256 has 32 bytes, not {len(sha256)}")
    return sha256.hex()
