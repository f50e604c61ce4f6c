"""S3Store: the remote tier on any S3, by boto3.

Below 16 MiB an object is one PUT, above a multipart upload of 8 MiB parts, or, to a server nearby, one PUT that is sent
as it is read; one PUT goes over a connection of our own (`s3_put.py`). Either way the server is told the crc64 (and
refuses other bytes, so a put that was answered needs no look at what it made). Whole objects are read in ranges of
8 MiB, four at once, tied together by the ETag of the first; single ranges go over `s3_wire.py`, and the SDK is asked
where that way is refused.

The transfer managers of boto3 are not used. Measured with SeaweedFS on the same two cores, which others were using too:
six objects of 64 MiB from and to a file, range over 5 runs (put) and 6 (get):

                                    put MB/s    get MB/s
    this module, 8 MiB × 4           60 – 142   551 – 892    crc64 of every byte checked
    this module, 4 MiB × 8                      506 – 836    the same
    boto3 upload/download_file       68 – 115   268 – 457
    CRT client (s3transfer.crt)      54 – 124   388 – 624

Puts are bound by the server, and within the noise of each other. A range of 64 KiB takes some 5 ms, of 1 MiB 6 ms. So
the CRT client is not faster at anything here; besides, boto3's way to it (preferred_transfer_client) ignores the
client's endpoint_url and speaks TLS only, and it has neither our deadlines nor conditional writes. Not measured: AWS
itself over a long line, where more than four requests at once may pay.

Rights it needs: GetObject, PutObject, DeleteObject, ListBucket (or a missing object looks like a denied one),
AbortMultipartUpload, ListBucketMultipartUploads.

Invariants: those of store.py. A conditional put whose answer was lost finds its own bytes and succeeds.

Owner: any thread. A crash leaves unfinished multipart uploads, no half objects.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.remote.errors import (
    FencedError,
    RemoteCorruptError,
    RemoteMissingError,
    RemoteRefusedError,
    RemoteUnavailableError,
)
from aof2.engine.remote.keys import check_key, check_prefix
from aof2.engine.remote.resilience import Deadline, RemoteStats
from aof2.engine.remote.s3_client import PreconditionFailedError, UploadGoneError, answered
from aof2.engine.remote.s3_put import QUICK_BYTES_MAX
from aof2.engine.remote.s3_read import S3Reader, spans_of, to_ms
from aof2.engine.remote.s3_upload import (
    COPY_PART_BYTES_MAX,
    COPY_PART_BYTES_MIN,
    PARTS_MAX,
    MultipartUpload,
    as_header,
)
from aof2.engine.remote.s3_wire import Stream
from aof2.engine.remote.source import Buffer, ChunksSource, Source, as_it_comes, checked_crc64, whole
from aof2.engine.remote.store import (
    BlobInfo,
    check_metadata,
    combined_crc64,
    with_checksums,
)
from aof2.engine.settings.remote import RemoteSettings
from aof2.native import crc64 as crc64_of_bytes

MULTIPART_BYTES: Final = 16 << 20
STREAM_BYTES_MAX: Final = 128 << 20  # of what is sent again as a whole when a connection breaks
STREAM_PIECE_BYTES: Final = 4 << 20
CONDITIONS: Final = {"IfNoneMatch": "if-none-match", "IfMatch": "if-match"}
WRITE_WINDOW: Final = 4
DELETE_BATCH: Final = 1000


class S3Store(S3Reader):
    """See the module's text."""

    def __init__(self, env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> None:
        super().__init__(env, settings, sleep_s=sleep_s)
        self._write_window = min(WRITE_WINDOW, max(2, settings.parallel // 2))
        self._active_uploads: set[str] = set()

    # Puts

    def put_blob(
        self, key: str, source: Source, size: int, *, crc64: int | None = None, sha256: bytes | None = None
    ) -> str:
        return self._send(key, source, size, crc64, sha256, self._deadline(size), if_absent=False)

    def _send(
        self,
        key: str,
        source: Source,
        size: int,
        crc64: int | None,
        sha256: bytes | None,
        deadline: Deadline,
        *,
        if_absent: bool,
    ) -> str:
        name = self._name(key)
        crc = checked_crc64(source, size, crc64, sha256)
        meta = with_checksums({}, crc, sha256)
        # In one piece it is put again sooner than looked for; a conditional put finds what is there by itself.
        if size < MULTIPART_BYTES:
            self._calls.check_bucket(deadline)  # some servers make one that is not there
        elif etag := self._already(key, size, crc, deadline, fence=if_absent):
            return etag
        try:
            if self._goes_in_one(size, if_absent=if_absent):
                conditions = {"IfNoneMatch": "*"} if if_absent else {}
                if (etag := self._stream(name, source, size, crc, meta, deadline, **conditions)) is not None:
                    return etag
            if size < MULTIPART_BYTES:
                body = whole(source, size)
                if (found := crc64_of_bytes(body)) != crc:
                    raise CorruptError(f"the source of {key} has changed: crc64 {found:016x}, not {crc:016x}")
                return self._put(name, body, crc, meta, deadline, **({"IfNoneMatch": "*"} if if_absent else {}))
            with MultipartUpload(self._calls, self._active_uploads, name, deadline).started(meta) as upload:
                parts = upload.send(source, size, crc, window=self._write_window)
                return upload.complete(parts, crc, if_absent=if_absent)
        except (PreconditionFailedError, UploadGoneError):
            # Taken by another, or done by ourselves and the answer got lost: the object tells.
            if etag := self._already(key, size, crc, deadline, fence=if_absent):
                return etag
            raise RemoteUnavailableError(f"upload of {key}: it, or its source, was changed by someone else") from None

    def _goes_in_one(self, size: int, *, if_absent: bool) -> bool:
        """Whether it is sent over a connection of our own. A smaller one that may be there is not looked for first:
        the SDK lets the server refuse it before its bytes are on their way."""
        if size < MULTIPART_BYTES:
            return size > QUICK_BYTES_MAX and not if_absent
        return self._calls.quick.is_near and size <= STREAM_BYTES_MAX

    def put_if_absent(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        return self._put_if(key, data, check_metadata(metadata), IfNoneMatch="*")

    def replace_if_match(self, key: str, data: bytes, etag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        return self._put_if(key, data, {}, **condition)

    def _put_if(self, key: str, data: bytes, metadata: Mapping[str, str], **condition: str) -> str:
        name, crc, deadline = self._name(key), crc64_of_bytes(data), self._deadline(len(data))
        try:
            return self._put(name, data, crc, with_checksums(metadata, crc, None), deadline, **condition)
        except (PreconditionFailedError, RemoteMissingError) as e:
            if isinstance(e, RemoteMissingError) and "IfMatch" not in condition:
                raise
            return self._own_or_fenced(key, data, deadline)

    def _put(
        self, name: str, body: Buffer, crc: int, metadata: dict[str, str], deadline: Deadline, **conditions: str
    ) -> str:
        payload = bytes(body) if isinstance(body, memoryview) else body
        headers = _headers_of(crc, metadata, conditions)

        def by_sdk() -> str:
            checksum = as_header(crc)
            answer = self._calls.sdk(
                "put_object", Key=name, Body=payload, Metadata=metadata, ChecksumCRC64NVME=checksum, **conditions
            )
            self._calls.weather.sent(len(payload))
            return str(answer["ETag"])

        def attempt() -> str:
            if (etag := self._calls.quick.put(name, bytes(payload), headers, deadline)) is not None:
                self._calls.weather.sent(len(payload))
                return etag
            return self._calls.apart(what, by_sdk, deadline)

        what = f"put of {name}"
        if len(payload) > QUICK_BYTES_MAX:
            return self._calls.write(what, by_sdk, deadline)
        return self._calls.here(what, attempt, deadline)

    def _stream(
        self,
        name: str,
        source: Source,
        size: int,
        crc: int,
        metadata: dict[str, str],
        deadline: Deadline,
        **conditions: str,
    ) -> str | None:
        """A large object over one connection, as it is read; None when it has to go another way."""
        what = f"put of {name}"

        def changed(found: int) -> CorruptError:
            return CorruptError(f"the source of {name} has changed: crc64 {found:016x}, not {crc:016x}")

        def at_once(body: bytes) -> Iterator[Buffer]:
            """What is in memory, and stays as it is."""
            if (found := crc64_of_bytes(body)) != crc:
                raise changed(found)
            yield body
            self._calls.weather.sent(len(body))

        def checked() -> Iterator[Buffer]:
            """Its last bytes only where all of it is right: without them there is no object."""
            found = 0
            held: Buffer = b""
            for piece in as_it_comes(source, size, STREAM_PIECE_BYTES):
                if held:
                    yield held
                    self._calls.weather.sent(len(held))
                held = bytes(piece) if isinstance(piece, memoryview) else piece
                found = crc64_of_bytes(held, found)
            if found != crc:
                raise changed(found)
            yield held
            self._calls.weather.sent(len(held))

        def sha256() -> str:
            digest = hashlib.sha256()
            for piece in as_it_comes(source, size, STREAM_PIECE_BYTES):
                digest.update(piece)
            return digest.hexdigest()

        made = partial(at_once, source) if isinstance(source, bytes) and len(source) == size else checked
        headers, body = _headers_of(crc, metadata, conditions), Stream(size, made)
        attempt = partial(self._calls.quick.stream, name, body, sha256, headers, deadline)
        return self._calls.here(what, attempt, deadline)

    def _already(self, key: str, size: int, crc: int, deadline: Deadline, *, fence: bool) -> str | None:
        """The etag when these bytes are there. Other bytes: FencedError if that matters, else None."""
        found = self._head(key, deadline)
        if found is None:
            return None
        if found.size == size and found.crc64 == crc:
            self._calls.weather.skipped_put()
            return found.etag
        if fence:
            raise FencedError(f"{key}: holds other bytes, put there by another writer")
        return None

    def _own_or_fenced(self, key: str, data: bytes, deadline: Deadline) -> str:
        try:
            info, found = self._get(key, deadline)
        except RemoteMissingError:
            raise FencedError(f"{key}: it is gone, another writer removed it") from None
        if found != data:
            raise FencedError(f"{key}: holds other bytes, put there by another writer")
        return info.etag

    # Listing and deleting

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        name = self._prefix + check_prefix(prefix)
        pages = self._pages(f"list of {name}", "list_objects_v2", ["ContinuationToken"], Prefix=name)
        for row in itertools.chain.from_iterable(page.get("Contents", ()) for page in pages):
            yield BlobInfo(
                key=str(row["Key"]).removeprefix(self._prefix),
                size=int(row["Size"]),
                etag=str(row["ETag"]),
                modified_ms=to_ms(row["LastModified"]),
            )

    def _pages(self, what: str, operation: str, marks: Sequence[str], **params: str) -> Iterator[Mapping[str, Any]]:
        """The pages of a listing; `marks` are what the next one starts at."""
        where: dict[str, str] = {}
        while True:
            ask = partial(self._calls.sdk, operation, **params, **where)
            page: Mapping[str, Any] = self._calls.read(what, ask, self._deadline(0))
            yield page
            if not page.get("IsTruncated"):
                return
            where = {mark: page[f"Next{mark}"] for mark in marks}

    def delete(self, keys: Iterable[str]) -> None:
        names = iter([self._name(key) for key in keys])
        while batch := list_of(itertools.islice(names, DELETE_BATCH)):
            self._delete_batch(batch, self._deadline(0))

    def _delete_batch(self, names: Sequence[str], deadline: Deadline) -> None:
        what = f"delete of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        request = {"Objects": [{"Key": name} for name in names], "Quiet": True}

        def attempt() -> None:
            answer = self._calls.sdk("delete_objects", Delete=request)
            for code in (failed.get("Code", "") for failed in answer.get("Errors", ())):
                if code != "NoSuchKey":
                    raise answered(403 if code == "AccessDenied" else 500, code, "DeleteObjects")

        try:
            self._calls.write(what, attempt, deadline)
        except RemoteRefusedError:
            self._delete_singly(names, deadline)  # some servers know no DeleteObjects, or want another checksum for it

    def _delete_singly(self, names: Sequence[str], deadline: Deadline) -> None:
        def start(name: str) -> Future[Any]:
            delete = partial(self._calls.sdk, "delete_object", Key=name)
            return self._calls.start(f"delete of {name}", delete, deadline, writes=True)

        for name, future in [(name, start(name)) for name in names]:
            with suppress(RemoteMissingError):
                self._calls.wait(future, f"delete of {name}", deadline)

    # Composing

    def compose(self, key: str, sources: Sequence[str]) -> str:
        name = self._name(key)
        found = self._heads([check_key(source) for source in sources], self._deadline(0))
        infos = [info for info in found if info is not None]
        if len(infos) < len(sources):
            raise RemoteMissingError(f"compose: {sources[found.index(None)]} is not there")
        size = sum(info.size for info in infos)
        deadline = self._deadline(2 * size)
        crc = combined_crc64(infos)
        if not _copyable([info.size for info in infos]):
            spans = [span for info in infos for span in spans_of(info.key, 0, info.size, info.etag)]
            joined = ChunksSource(lambda: (fetched.data for fetched in self._fetch_in_order(spans, deadline)))
            return self._send(key, joined, size, crc, None, deadline, if_absent=True)
        if crc is not None and (etag := self._already(key, size, crc, deadline, fence=True)):
            return etag
        meta = {} if crc is None else with_checksums({}, crc, None)
        try:
            with MultipartUpload(self._calls, self._active_uploads, name, deadline).started(meta) as upload:
                parts = upload.copy([(self._prefix + info.key, info.etag) for info in infos])
                etag = upload.complete(parts, crc, if_absent=True)
        except (PreconditionFailedError, UploadGoneError):
            if crc is not None and (etag := self._already(key, size, crc, deadline, fence=True)):
                return etag
            raise RemoteUnavailableError(f"compose of {key}: a source or the upload changed under way") from None
        made = self._head(key, deadline)
        if made is None or made.size != size or crc not in (None, made.crc64):
            raise RemoteCorruptError(f"it was composed of {size} bytes, and is not them", path=key)
        return etag

    # Upkeep

    def abort_stale_uploads(self, older_than_s: float) -> int:
        before_ms = self._env.now_ms() - int(older_than_s * 1000)
        marks = ["KeyMarker", "UploadIdMarker"]
        aborted = 0
        for page in self._pages("list of uploads", "list_multipart_uploads", marks, Prefix=self._prefix):
            for row in page.get("Uploads", ()):
                name, upload_id = str(row["Key"]), str(row["UploadId"])
                old = to_ms(row["Initiated"]) <= before_ms
                if old and name.startswith(self._prefix) and upload_id not in self._active_uploads:
                    abort = partial(self._calls.sdk, "abort_multipart_upload", Key=name, UploadId=upload_id)
                    with suppress(UploadGoneError):
                        self._calls.write(f"abort of the upload of {name}", abort, self._deadline(0))
                        aborted += 1
        return aborted

    def stats(self) -> RemoteStats:
        return self._calls.weather.stats()

    def close(self) -> None:
        self._calls.close()


def _headers_of(crc: int, metadata: Mapping[str, str], conditions: Mapping[str, str]) -> dict[str, str]:
    headers = {"x-amz-checksum-crc64nvme": as_header(crc)}
    headers |= {f"x-amz-meta-{key}": value for key, value in metadata.items()}
    return headers | {CONDITIONS[key]: value for key, value in conditions.items()}


list_of = list  # the class has a method of that name


def _copyable(sizes: Sequence[int]) -> bool:
    """Whether the server can do it: every part but the last has at least 5 MiB."""
    if not sizes or len(sizes) > PARTS_MAX or not all(0 < size <= COPY_PART_BYTES_MAX for size in sizes):
        return False
    return sum(sizes) >= COPY_PART_BYTES_MIN and all(size >= COPY_PART_BYTES_MIN for size in sizes[:-1])
