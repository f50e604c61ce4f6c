"""What a deliverer and the writer tell each other: small JSON objects of the remote, beside the blobs.

    inbox/{tenant}.json               the door: what a deliverer must know of the tenant; the writer's
    inbox/{tenant}/.knock/{job_id}    empty: a commit of this name is there, or comes in a moment; the deliverer's
    inbox/{tenant}/{job_id}.commit    what is to be published; the deliverer's, put once
    inbox/{tenant}/{job_id}.done      it is, durably; the writer's
    inbox/{tenant}/{job_id}.refused   it is not, and why; the writer's

Invariants
- Decoding is strict: an unknown field, a number that is out of range or a name that no file has is CorruptError; a
  newer format is UnsupportedError. Nothing is asked of the remote before a commit adds up by itself.
- A commit names objects of its own job alone, or of the series that it is one of.

Owner: values and pure functions. A crash leaves nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.remote.keys import (
    INBOX_NUMBER_MIN,
    InboxBlobKey,
    InboxCommitKey,
    InboxPackKey,
    parse_key,
)

FORMAT: Final = 1
FILES_MAX: Final = 100_000
COMMIT_BYTES_MAX: Final = 64 << 20
DEPTH_MAX: Final = 64
NAME_BYTES_MAX: Final = 255


class RefusedError(Aof2Error):
    """The writer took nothing of the job: the message says why. Mend that, and commit again."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Crc64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
T = TypeVar("T")


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is in the objects."""


class Door(_Part, frozen=True, kw_only=True):
    """How a tenant takes what is delivered. `framing` and what follows it: of streams."""

    format: int = FORMAT
    volume_uuid: str
    tenant: str
    kind: str
    chunk_bytes: Count
    block_bytes: Count
    framing: str = ""
    segment_bytes: Count = 0
    record_max_bytes: Count = 0


class StagedObject(_Part, frozen=True, kw_only=True):
    """An object of the remote that holds blobs."""

    key: str
    size: Count
    crc64: Crc64


class StagedBlob(_Part, frozen=True, kw_only=True):
    """One blob: where it is, the number that its footer says, and the hash of its content."""

    object: Count
    offset: Count
    length: Count
    number: int
    sha256: Hash


class DeliveredFile(_Part, frozen=True, kw_only=True):
    """A file, by its path below the directory; `blobs` are its chunks, in their order."""

    path: str
    size: Count
    sha256: Hash
    blobs: tuple[StagedBlob, ...] = ()


class DeliveredSegment(_Part, frozen=True, kw_only=True):
    """Records of a stream: a payload file and an index of it, with offsets from 0 on."""

    payload: StagedBlob
    index: StagedBlob
    records: Count


class Commit(_Part, frozen=True, kw_only=True):
    """A whole job. `to` is a directory of the tenant; "" is its top."""

    format: int = FORMAT
    volume_uuid: str
    tenant: str
    job_id: str
    what: Literal["files", "records"]
    mode: Literal["append", "overwrite"]
    to: str
    objects: tuple[StagedObject, ...] = ()
    files: tuple[DeliveredFile, ...] = ()
    segments: tuple[DeliveredSegment, ...] = ()


class Done(_Part, frozen=True, kw_only=True):
    """The job is in the tenant, and the remote's log says so up to record `ordinal` of stream `stream_id`."""

    format: int = FORMAT
    job_id: str
    time_ms: Count
    files: Count = 0
    bytes: Count = 0
    records: Count = 0
    first_offset: Count = 0
    next_offset: Count = 0
    stream_id: Count = 0
    ordinal: Count = 0


class Refused(_Part, frozen=True, kw_only=True):
    """Nothing of the job is there."""

    format: int = FORMAT
    job_id: str
    time_ms: Count
    reason: str


class _Version(msgspec.Struct):
    format: int


def encode(part: _Part) -> bytes:
    return msgspec.json.format(msgspec.json.encode(part), indent=1) + b"\n"


def decode(data: bytes, kind: type[T], *, key: str = "") -> T:
    """CorruptError, UnsupportedError."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT:
            raise UnsupportedError(f"format {version} of the inbox, this program knows {FORMAT}", path=key)
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise CorruptError(f"not what the inbox holds under such a name ({e})", path=key) from None


# -- what a commit must be by itself ---------------------------------------------------------------------------------


def split_path(path: str) -> tuple[bytes, ...]:
    """The names of a path below a directory; ValueError for what is none."""
    parts = tuple(path.encode("utf-8", "surrogateescape").split(b"/")) if path else ()
    if len(parts) > DEPTH_MAX:
        raise ValueError(f"{path[:100]!r} is more than {DEPTH_MAX} directories deep")
    for part in parts:
        if part in (b"", b".", b"..") or b"\0" in part or len(part) > NAME_BYTES_MAX:
            raise ValueError(f"{path[:300]!r} has a name that no file can have")
    return parts


def problem_of(commit: Commit, *, key: str) -> str:
    """Why a commit cannot be published whatever it names; "" where it may."""
    if parse_key(key) != InboxCommitKey(commit.tenant, commit.job_id):
        return f"it says of itself that it is job {commit.job_id} of tenant {commit.tenant}"
    try:
        below = split_path(commit.to)
    except ValueError as e:
        return str(e)
    if commit.what == "records":
        if commit.files or not below:
            return "records go into a stream: a directory below the tenant's top, and no files with them"
        return _blob_problem(commit, [blob for one in commit.segments for blob in (one.payload, one.index)])
    if commit.segments:
        return "files have no segments"
    if commit.mode == "overwrite" and not below:
        return "a whole tenant is not overwritten; name a directory in it"
    return _files_problem(commit) or _blob_problem(commit, [blob for one in commit.files for blob in one.blobs])


def _files_problem(commit: Commit) -> str:
    if len(commit.files) > FILES_MAX:
        return f"{len(commit.files)} files; a job has at most {FILES_MAX}"
    files: set[tuple[bytes, ...]] = set()
    folders: set[tuple[bytes, ...]] = set()
    for one in commit.files:
        try:
            parts = split_path(one.path)
        except ValueError as e:
            return str(e)
        if not parts:
            return "a file without a name"
        if parts in files:
            return f"{one.path!r} is there twice"
        files.add(parts)
        folders |= {parts[:depth] for depth in range(1, len(parts))}
    for parts in files & folders:
        return f"{b'/'.join(parts).decode(errors='replace')!r} is a file and a directory"
    return ""


def _is_of(tenant: str, job_id: str, commit: Commit) -> bool:
    """Of the job, or, of one of a series (`query-7`), staged before its number in that was known (`query`)."""
    return tenant == commit.tenant and (job_id == commit.job_id or commit.job_id.startswith(f"{job_id}-"))


def _blob_problem(commit: Commit, blobs: list[StagedBlob]) -> str:
    for staged in commit.objects:
        named = parse_key(staged.key)
        if not isinstance(named, InboxBlobKey | InboxPackKey) or not _is_of(named.tenant, named.job_id, commit):
            return f"{staged.key[:300]!r} is no blob of this job"
    if len({one.key for one in commit.objects}) != len(commit.objects):
        return "an object is listed twice"
    for blob in blobs:
        if blob.object >= len(commit.objects):
            return f"a blob is said to be in object {blob.object}, of {len(commit.objects)}"
        if blob.number < INBOX_NUMBER_MIN or blob.number >= 1 << 64:
            return f"blob {blob.number} has a number that is not a deliverer's"
        if blob.offset + blob.length > commit.objects[blob.object].size:
            return f"blob {blob.number} ends behind its object"
    return ""
