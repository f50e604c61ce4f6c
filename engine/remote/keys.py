"""Names of remote objects, built and parsed in one place. What the seeds fix stays as they spell it.

    checkpoints/{tenant}/{checkpoint_id}/chunk-{chunk_id}-{generation}-{hash}.blob
    checkpoints/{tenant}/{checkpoint_id}/delta-{chunk_id}-{delta_id}-{generation}-{hash}.blob
    checkpoints/{tenant}/{checkpoint_id}/pack-{first_chunk_id}-{hash}.blob
    snapshots/{tenant}/{snapshot_id}/meta-{hash}.json
    manifest/{stream_id}/{chunk_index}.mlog · bundle-{first}-{last}.mlogs · snapshot_{id}.bin
    audit/{tenant_id}/{first_logseq}.asl
    followers/{follower_id}.json
    inbox/{tenant}.json · inbox/{tenant}/{job_id}.commit · {job_id}.done · {job_id}.refused · .knock/{job_id}
    inbox/{tenant}/{job_id}/{attempt}/chunk-{number}-{generation}-{hash}.blob · pack-{first_number}-{hash}.blob
    volume.json

`hash` is a SHA-256 in lowercase hex, numbers are u64 in decimal without leading zeros, so one object has one name.
A pack's hash is that of its members' names (`blob/pack.py`), the others' that of the raw chunk. What was delivered
(`engine/inbox`) stays under its key; its numbers are the deliverer's, from INBOX_NUMBER_MIN on, which no chunk of a
catalog reaches. A job's id and an attempt are `[A-Za-z0-9_-]{1,64}`, so that nothing in a folder of the inbox has two
meanings.

Invariants
- Every key built here parses back to the same fields, and a key that parses is built again as it was.
- `check_key` refuses whatever could leave a directory remote's root or collide with its own files.

Owner: pure functions. A crash leaves nothing.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

VOLUME_KEY: Final = "volume.json"
FOLLOWERS_PREFIX: Final = "followers/"
RESERVED_PREFIX: Final = ".aof2-"
"""No part of a key starts so: a directory remote's own files do."""
KEY_BYTES_MAX: Final = 900
"""S3 allows 1,024 with the URL's prefix."""
_U64_MAX: Final = (1 << 64) - 1
_TENANT: Final = re.compile(r"[a-z0-9_-]{1,64}")
_FOLLOWER: Final = re.compile(r"[0-9a-f]{16}")
INBOX_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a delivered job, and of an attempt at one."""
INBOX_NUMBER_MIN: Final = 1 << 63
BLOB_PREFIXES: Final = ("checkpoints/", "inbox/")
"""Below them, and a tenant's name, is what rows may locate."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


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


class FollowerKey(NamedTuple):
    follower_id: str  # 16 hex digits


class InboxBlobKey(NamedTuple):
    tenant: str
    job_id: str
    attempt: str
    chunk_id: int
    generation: int
    sha256: bytes


class InboxPackKey(NamedTuple):
    tenant: str
    job_id: str
    attempt: str
    chunk_id: int  # of its first member
    name_hash: bytes


class InboxCommitKey(NamedTuple):
    tenant: str
    job_id: str


class InboxDoneKey(NamedTuple):
    tenant: str
    job_id: str


class InboxRefusedKey(NamedTuple):
    tenant: str
    job_id: str


class InboxKnockKey(NamedTuple):
    tenant: str
    job_id: str


class InboxDoorKey(NamedTuple):
    tenant: str


class VolumeKey(NamedTuple):
    pass


WholeBlobKey = ChunkBlobKey | DeltaBlobKey | InboxBlobKey
"""Of an object that is one blob, with the hash of its content in its name."""
AnyPackKey = PackKey | InboxPackKey
RemoteKey = (
    ChunkBlobKey
    | DeltaBlobKey
    | PackKey
    | SnapshotMetaKey
    | ManifestChunkKey
    | ManifestBundleKey
    | ManifestSnapshotKey
    | AuditRangeKey
    | FollowerKey
    | InboxBlobKey
    | InboxPackKey
    | InboxCommitKey
    | InboxDoneKey
    | InboxRefusedKey
    | InboxKnockKey
    | InboxDoorKey
    | VolumeKey
)

_NAMES: Final[dict[type[RemoteKey], str]] = {  # the fields in the order of the tuple
    ChunkBlobKey: "checkpoints/{tenant}/{checkpoint_id}/chunk-{chunk_id}-{generation}-{sha256}.blob",
    DeltaBlobKey: "checkpoints/{tenant}/{checkpoint_id}/delta-{chunk_id}-{delta_id}-{generation}-{sha256}.blob",
    PackKey: "checkpoints/{tenant}/{checkpoint_id}/pack-{chunk_id}-{name_hash}.blob",
    SnapshotMetaKey: "snapshots/{tenant}/{snapshot_id}/meta-{sha256}.json",
    ManifestChunkKey: "manifest/{stream_id}/{chunk_index}.mlog",
    ManifestBundleKey: "manifest/{stream_id}/bundle-{first}-{last}.mlogs",
    ManifestSnapshotKey: "manifest/{stream_id}/snapshot_{snapshot_id}.bin",
    AuditRangeKey: "audit/{tenant_id}/{first_logseq}.asl",
    FollowerKey: "followers/{follower_id}.json",
    InboxBlobKey: "inbox/{tenant}/{job_id}/{attempt}/chunk-{chunk_id}-{generation}-{sha256}.blob",
    InboxPackKey: "inbox/{tenant}/{job_id}/{attempt}/pack-{chunk_id}-{name_hash}.blob",
    InboxCommitKey: "inbox/{tenant}/{job_id}.commit",
    InboxDoneKey: "inbox/{tenant}/{job_id}.done",
    InboxRefusedKey: "inbox/{tenant}/{job_id}.refused",
    InboxKnockKey: "inbox/{tenant}/.knock/{job_id}",
    InboxDoorKey: "inbox/{tenant}.json",
    VolumeKey: VOLUME_KEY,
}
_NUMBER: Final = "(0|[1-9][0-9]{0,19})"
_HASH: Final = "([0-9a-f]{64})"
_NAME: Final = f"({INBOX_NAME.pattern})"
_TEXTS: Final = {
    "tenant": f"({_TENANT.pattern})",
    "sha256": _HASH,
    "name_hash": _HASH,
    "follower_id": f"({_FOLLOWER.pattern})",
    "job_id": _NAME,
    "attempt": _NAME,
}
_PATTERNS: Final = tuple(
    (kind, re.compile(re.sub(r"\{(\w+)\}", lambda field: _TEXTS.get(field[1], _NUMBER), name.replace(".", r"\."))))
    for kind, name in _NAMES.items()
)


def name_of(key: RemoteKey) -> str:
    """The object's name; ValueError for fields that none has."""
    return _NAMES[type(key)].format(**{field: _written(field, value) for field, value in key._asdict().items()})


def _written(field: str, value: Any) -> str | int:
    if _TEXTS.get(field) == _HASH:
        if len(value) != 32:
            raise ValueError(f"a SHA-256 has 32 bytes, not {len(value)}")
        return str(value.hex())
    if field == "tenant":
        if not _TENANT.fullmatch(value):
            raise ValueError(f"tenant {value!r}: allowed are 1 to 64 of a-z 0-9 _ -")
        return str(value)
    if field == "follower_id":
        if not _FOLLOWER.fullmatch(value):
            raise ValueError(f"follower {value!r}: 16 hex digits")
        return str(value)
    if _TEXTS.get(field) == _NAME:
        if not INBOX_NAME.fullmatch(value):
            raise ValueError(f"{field} {value!r}: allowed are 1 to 64 of A-Z a-z 0-9 _ -")
        return str(value)
    if not 0 <= value <= _U64_MAX:
        raise ValueError(f"{value} is not a u64")
    return int(value)


def chunk_blob_key(tenant: str, checkpoint_id: int, chunk_id: int, generation: int, sha256: bytes) -> str:
    return name_of(ChunkBlobKey(tenant, checkpoint_id, chunk_id, generation, sha256))


def manifest_snapshot_key(stream_id: int, snapshot_id: int) -> str:
    return name_of(ManifestSnapshotKey(stream_id, snapshot_id))


def audit_range_key(tenant_id: int, first_logseq: int) -> str:
    return name_of(AuditRangeKey(tenant_id, first_logseq))


def follower_key(follower_id: str) -> str:
    return name_of(FollowerKey(follower_id))


def content_of(name: bytes) -> bytes:
    """The hash, in hex, in what ends with a blob's key; of anything else, bytes that are no hash."""
    return name.removesuffix(b".blob")[-64:]


def pack_key(tenant: str, checkpoint_id: int, first_chunk_id: int, name_hash: bytes) -> str:
    return name_of(PackKey(tenant, checkpoint_id, first_chunk_id, name_hash))


def is_pack(key: str) -> bool:
    """Whether blobs share the object under this key."""
    return key.rpartition("/")[2].startswith("pack-")


def parse_key(key: str) -> RemoteKey | None:
    """What the object is, or None for a name that is not ours."""
    for kind, pattern in _PATTERNS:
        match = pattern.fullmatch(key)
        if match is not None:
            values = [_read(field, text) for field, text in zip(kind._fields, match.groups(), strict=True)]
            return None if any(isinstance(v, int) and v > _U64_MAX for v in values) else kind(*values)
    return None


def _read(field: str, text: str) -> Any:
    if _TEXTS.get(field) == _HASH:
        return bytes.fromhex(text)
    return text if field in _TEXTS else int(text)


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
