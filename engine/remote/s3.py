"""S3Store: the remote tier on any S3, by boto3.

Below 16 MiB an object is one PUT, above a multipart upload of 8 MiB parts; either way the server is told the crc64 (and
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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
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
from aof2.engine.remote.s3_calls import S3Calls
from aof2.engine.remote.s3_client import PreconditionFailedError, UploadGoneError, translate
from aof2.engine.remote.s3_put import QUICK_BYTES_MAX
from aof2.engine.remote.s3_read import READ_WINDOW, S3Reader, spans_of, to_ms
from aof2.engine.remote.s3_upload import (
    COPY_PART_BYTES_MAX,
    COPY_PART_BYTES_MIN,
    PARTS_MAX,
    MultipartUpload,
    as_header,
)
from aof2.engine.remote.source import Buffer, ChunksSource, FileTarget, Source, checked_crc64, whole
from aof2.engine.remote.store import (
    BlobInfo,
    check_metadata,
    combined_crc64,
    default_timeout_s,
    with_checksums,
)
from aof2.engine.settings.remote import RemoteSettings, parse_url
from aof2.native import crc64 as crc64_of_bytes

MULTIPART_BYTES: Final = 16 << 20
LOOK_FIRST_BYTES: Final = 256 << 10
CONDITIONS: Final = {"IfNoneMatch": "if-none-match", "IfMatch": "if-match"}
WRITE_WINDOW: Final = 4
DELETE_BATCH: Final = 1000


class S3Store:
    """See the module's text."""

    def __init__(self, env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> None:
        url = parse_url(settings.url)
        self._env = env
        self._prefix = url.prefix
        self._bucket = url.bucket
        self._timeout_s = settings.timeout_s
        self._write_window = min(WRITE_WINDOW, max(2, settings.parallel // 2))
        self._active_uploads: set[str] = set()
        self._calls = S3Calls(env, settings, url.bucket, sleep_s=sleep_s)
        self._reader = S3Reader(
            self._calls,
            url.prefix,
            window=min(READ_WINDOW, settings.parallel),
            deadline_for=self._deadline,
        )

    @property
    def _client(self) -> Any:
        return self._calls.client

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
        # Small ones are put again sooner than they are looked for; a conditional put finds them by itself.
        if size <= LOOK_FIRST_BYTES:
            self._calls.check_bucket(deadline)  # some servers make one that is not there
        elif etag := self._already(key, size, crc, deadline, fence=if_absent):
            return etag
        try:
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

    def put_if_absent(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        name, crc = self._name(key), crc64_of_bytes(data)
        meta = with_checksums(check_metadata(metadata), crc, None)
        deadline = self._deadline(len(data))
        try:
            return self._put(name, data, crc, meta, deadline, IfNoneMatch="*")
        except PreconditionFailedError:
            return self._own_or_fenced(key, data, deadline)

    def replace_if_match(self, key: str, data: bytes, etag: str | None) -> str:
        name, crc = self._name(key), crc64_of_bytes(data)
        meta = with_checksums({}, crc, None)
        deadline = self._deadline(len(data))
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            return self._put(name, data, crc, meta, deadline, **condition)
        except (PreconditionFailedError, RemoteMissingError):
            return self._own_or_fenced(key, data, deadline)

    def _put(
        self, name: str, body: Buffer, crc: int, metadata: dict[str, str], deadline: Deadline, **conditions: str
    ) -> str:
        payload = bytes(body) if isinstance(body, memoryview) else body
        headers = {"x-amz-checksum-crc64nvme": as_header(crc)}
        headers |= {f"x-amz-meta-{key}": value for key, value in metadata.items()}
        headers |= {CONDITIONS[key]: value for key, value in conditions.items()}

        def by_sdk() -> str:
            answer = self._client.put_object(
                Bucket=self._bucket,
                Key=name,
                Body=payload,
                Metadata=metadata,
                ChecksumCRC64NVME=as_header(crc),
                **conditions,
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

    def _already(self, key: str, size: int, crc: int, deadline: Deadline, *, fence: bool) -> str | None:
        """The etag when these bytes are there. Other bytes: FencedError if that matters, else None."""
        found = self._reader.head(key, deadline)
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
            info, found = self._reader.get(key, deadline)
        except RemoteMissingError:
            raise FencedError(f"{key}: it is gone, another writer removed it") from None
        if found != data:
            raise FencedError(f"{key}: holds other bytes, put there by another writer")
        return info.etag

    # Gets

    def get_blob(self, key: str, *, timeout_s: float | None = None) -> tuple[BlobInfo, bytes]:
        self._name(key)
        return self._reader.get(key, None if timeout_s is None else Deadline(self._env, timeout_s))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._check_range(key, offset, length)
        return self._reader.read_range(key, offset, length, self._deadline(length))

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        self._name(key)
        return await self._reader.glance(key, offset, length)

    def receive_range(self, key: str, offset: int, length: int, target: FileTarget) -> None:
        self._check_range(key, offset, length)
        self._reader.receive(key, offset, length, target, self._deadline(length))

    def _check_range(self, key: str, offset: int, length: int) -> None:
        self._name(key)
        if offset < 0 or length < 0:
            raise ValueError(f"range {offset}+{length}")

    def head_blob(self, key: str) -> BlobInfo | None:
        self._name(key)
        return self._reader.head(key, self._deadline(0))

    # Listing and deleting

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[BlobInfo]:
        check_prefix(prefix)
        where: dict[str, str] = {} if start_after is None else {"StartAfter": self._prefix + start_after}
        while True:
            page = self._page(prefix, where, self._deadline(0))
            for row in page.get("Contents", ()):
                yield BlobInfo(
                    key=str(row["Key"]).removeprefix(self._prefix),
                    size=int(row["Size"]),
                    etag=str(row["ETag"]),
                    modified_ms=to_ms(row["LastModified"]),
                )
            if not page.get("IsTruncated"):
                return
            where = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, prefix: str, where: dict[str, str], deadline: Deadline) -> dict[str, Any]:
        name = self._prefix + prefix

        def attempt() -> dict[str, Any]:
            page: dict[str, Any] = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, **where)
            return page

        return self._calls.read(f"list of {name}", attempt, deadline)

    def delete(self, keys: Iterable[str]) -> None:
        names = iter([self._name(key) for key in keys])
        while batch := list_of(islice(names, DELETE_BATCH)):
            self._delete_batch(batch, self._deadline(0))

    def _delete_batch(self, names: Sequence[str], deadline: Deadline) -> None:
        what = f"delete of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        request = {"Objects": [{"Key": name} for name in names], "Quiet": True}

        def attempt() -> None:
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=request)
            for failed in answer.get("Errors", ()):
                if failed.get("Code") != "NoSuchKey":
                    raise _delete_error(failed, what)

        try:
            self._calls.write(what, attempt, deadline)
        except RemoteRefusedError:
            self._delete_singly(names, deadline)  # some servers know no DeleteObjects, or want another checksum for it

    def _delete_singly(self, names: Sequence[str], deadline: Deadline) -> None:
        def start(name: str) -> Future[None]:
            def attempt() -> None:
                self._client.delete_object(Bucket=self._bucket, Key=name)

            return self._calls.start_write(f"delete of {name}", attempt, deadline)

        for name, future in [(name, start(name)) for name in names]:
            with suppress(RemoteMissingError):
                self._calls.wait(future, f"delete of {name}", deadline)

    # Composing

    def compose(self, key: str, sources: Sequence[str]) -> str:
        name = self._name(key)
        infos = self._reader.heads([check_key(source) for source in sources], self._deadline(0))
        size = sum(info.size for info in infos)
        deadline = self._deadline(2 * size)
        crc = combined_crc64(infos)
        if not _copyable([info.size for info in infos]):
            spans = [span for info in infos for span in spans_of(info.key, 0, info.size, info.etag)]
            joined = ChunksSource(lambda: (fetched.data for fetched in self._reader.fetch_in_order(spans, deadline)))
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
        made = self._reader.head(key, deadline)
        if made is None or made.size != size or crc not in (None, made.crc64):
            raise RemoteCorruptError(f"it was composed of {size} bytes, and is not them", path=key)
        return etag

    # Upkeep

    def abort_stale_uploads(self, older_than_s: float) -> int:
        before_ms = self._env.now_ms() - int(older_than_s * 1000)
        aborted = 0
        where: dict[str, str] = {}
        while True:
            page = self._uploads_page(where, self._deadline(0))
            for row in page.get("Uploads", ()):
                name, upload_id = str(row["Key"]), str(row["UploadId"])
                old = to_ms(row["Initiated"]) <= before_ms
                if old and name.startswith(self._prefix) and upload_id not in self._active_uploads:
                    aborted += self._abort(name, upload_id, self._deadline(0))
            if not page.get("IsTruncated"):
                return aborted
            where = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _uploads_page(self, where: dict[str, str], deadline: Deadline) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            page: dict[str, Any] = self._client.list_multipart_uploads(
                Bucket=self._bucket, Prefix=self._prefix, **where
            )
            return page

        return self._calls.read("list of uploads", attempt, deadline)

    def _abort(self, name: str, upload_id: str, deadline: Deadline) -> bool:
        def attempt() -> None:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload_id)

        try:
            self._calls.write(f"abort of the upload of {name}", attempt, deadline)
        except UploadGoneError:
            return False
        return True

    def stats(self) -> RemoteStats:
        return self._calls.weather.stats()

    def close(self) -> None:
        self._calls.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _deadline(self, size: int) -> Deadline:
        return Deadline(self._env, default_timeout_s(self._timeout_s, size))


list_of = list  # the class has a method of that name


def _copyable(sizes: Sequence[int]) -> bool:
    """Whether the server can do it: every part but the last has at least 5 MiB."""
    if not sizes or len(sizes) > PARTS_MAX or not all(0 < size <= COPY_PART_BYTES_MAX for size in sizes):
        return False
    return sum(sizes) >= COPY_PART_BYTES_MIN and all(size >= COPY_PART_BYTES_MIN for size in sizes[:-1])


def _delete_error(failed: Mapping[str, Any], what: str) -> Exception:
    from botocore.exceptions import ClientError

    status = 403 if failed.get("Code") == "AccessDenied" else 500
    response = {"Error": {"Code": failed.get("Code", "")}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate(ClientError(response, "DeleteObjects"), what)
