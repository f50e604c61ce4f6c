"""RemoteStore: the one interface of the remote tier. S3 (s3.py) and a directory (directory.py) behave alike behind it.

Calls block, may come from any thread, and end within their deadline: the setting's timeout plus one second per MiB to
be moved. Failures are those of errors.py. Every object carries its size and crc64.

Invariants
- An object is seen whole or not at all, whatever fails; never half of it, never a mix of two puts.
- What a put stores has the crc64 it was told to have, or nothing is stored.
- A put of 16 MiB or more that are already there under that key moves none of them.
- Listing is in byte order of the keys on a directory and on AWS. SeaweedFS sorts folder by folder (`a/b` before `a-b`),
  so a caller that needs the order sorts.
- Missing objects count as deleted. A missing bucket or folder is never taken for missing objects.

Owner: shared by all threads; make it after the fork. A crash leaves whole objects, and unfinished uploads that
`abort_stale_uploads` clears away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from aof2.engine.remote.resilience import RemoteStats
from aof2.engine.remote.source import FileTarget, Source
from aof2.native import crc64_combine

CRC64_META: Final = "aof2-crc64"
SHA256_META: Final = "aof2-sha256"
"""Kept beside the caller's metadata: the checksum is known whatever the server supports."""
META_BYTES_MAX: Final = 2048
RATE_MIN_BYTES_PER_S: Final = 1 << 20
_META_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_META_VALUE: Final = re.compile(r"[ -~]*")


class BlobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a remote says of an object. From a listing, `crc64` and `metadata` are not known."""

    key: str
    size: int
    etag: str
    modified_ms: int = 0
    crc64: int | None = None
    sha256: bytes | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class RemoteStore(Protocol):
    """See the module's text."""

    def put_blob(
        self, key: str, source: Source, size: int, *, crc64: int | None = None, sha256: bytes | None = None
    ) -> str:
        """Stores the source's first `size` bytes; the etag. CorruptError when they do not have `crc64`.

        `sha256` is noted with the object (BlobInfo.sha256); without a `crc64` it is what the bytes are checked against.
        Other bytes under that key are replaced.
        """

    def put_if_absent(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        """Stores `data` unless the key is taken; the etag. Taken by equal bytes is success, by others FencedError."""

    def replace_if_match(self, key: str, data: bytes, etag: str | None) -> str:
        """Replaces the object that has `etag` (None: there must be none). The new etag, or FencedError.

        When the answer to the first try is lost, the second finds its own bytes: that is success. So two writers must
        never send equal bytes.
        """

    def get_blob(self, key: str, *, timeout_s: float | None = None) -> tuple[BlobInfo, bytes]:
        """The whole object, checked against the checksum it was stored with. `timeout_s`: a deadline of its own.

        Bytes that fail are read once more, then RemoteCorruptError.
        """

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly these bytes; RemoteCorruptError when the object ends before. They are not checked here."""

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        """A short range on the event loop, for who has no time to lose; None when that cannot be done: `get_range`."""

    def receive_range(self, key: str, offset: int, length: int, target: FileTarget) -> None:
        """These bytes into a file, piece by piece; it is the target that checks them. LandingError when it is full.

        A lost connection costs no piece that landed: it goes on from there.
        """

    def head_blob(self, key: str) -> BlobInfo | None:
        """What there is under the key, or None."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Objects whose key starts with `prefix`. The deadline is for each page."""

    def delete(self, keys: Iterable[str]) -> None:
        """The objects are gone afterwards, whether or not they were there."""

    def compose(self, key: str, sources: Sequence[str]) -> str:
        """Stores the concatenation of the sources unless the key is taken, as `put_if_absent` does; its etag."""

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Clears away uploads that crashed more than so long ago; how many."""

    def stats(self) -> RemoteStats:
        """Counters since the store was opened."""

    def close(self) -> None:
        """Ends calls under way with RemoteUnavailableError, and lets go of connections."""


def default_timeout_s(timeout_s: float, size: int) -> float:
    return timeout_s + size / RATE_MIN_BYTES_PER_S


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Names as S3 gives them back (lowercase); ValueError for what a header cannot carry."""
    out: dict[str, str] = {}
    for name, value in (metadata or {}).items():
        if not _META_NAME.fullmatch(name):
            raise ValueError(f"metadata name {name!r}: letters, digits, - and _ only")
        if not _META_VALUE.fullmatch(value) or value != value.strip():
            raise ValueError(f"metadata {name}: printable ASCII only")
        out[name.lower()] = value
    for reserved in (CRC64_META, SHA256_META):
        if reserved in out:
            raise ValueError(f"metadata {reserved} is the store's own")
    if sum(len(k) + len(v) for k, v in out.items()) > META_BYTES_MAX - 200:
        raise ValueError(f"metadata over {META_BYTES_MAX - 200} bytes")
    return out


def combined_crc64(parts: Iterable[BlobInfo]) -> int | None:
    """The crc64 of the objects one after the other, when all of theirs are known."""
    crc = 0
    for part in parts:
        if part.crc64 is None:
            return None
        crc = crc64_combine(crc, part.crc64, part.size)
    return crc


def with_checksums(metadata: Mapping[str, str], crc64: int, sha256: bytes | None) -> dict[str, str]:
    out = {**metadata, CRC64_META: f"{crc64:016x}"}
    if sha256 is not None:
        out[SHA256_META] = sha256.hex()
    return out


def split_checksums(metadata: Mapping[str, str]) -> tuple[dict[str, str], int | None, bytes | None]:
    """The caller's metadata, and the store's own checksums out of it. Damaged ones count as unknown."""
    rest = dict(metadata)
    crc_text, sha_text = rest.pop(CRC64_META, ""), rest.pop(SHA256_META, "")
    try:
        crc = int(crc_text, 16) if len(crc_text) == 16 else None
    except ValueError:
        crc = None
    try:
        sha = bytes.fromhex(sha_text) if len(sha_text) == 64 else None
    except ValueError:
        sha = None
    return rest, crc, sha
