"""S3Store: the remote tier on any S3, by boto3.

Below 16 MiB an object is one PUT, above a multipart upload of 8 MiB parts; either way the server is told the crc64 (and
refuses other bytes). Reads are ranges of 4 MiB, several at once, tied together by the ETag of the first.

The transfer managers of boto3 are not used; see MEASURED.

Invariants: those of store.py. A conditional put whose answer was lost finds its own bytes and succeeds.

Owner: any thread. A crash leaves unfinished multipart uploads, no half objects.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

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
from aof2.engine.remote.s3_client import PreconditionFailedError, RangeError, UploadGoneError, translate
from aof2.engine.remote.s3_upload import (
    COPY_PART_BYTES_MAX,
    COPY_PART_BYTES_MIN,
    PARTS_MAX,
    MultipartUpload,
    as_header,
    from_header,
)
from aof2.engine.remote.settings import RemoteSettings, parse_url
from aof2.engine.remote.source import Buffer, BytesWriter, ChunksSource, Source, Writer, crc64_of, whole
from aof2.engine.remote.store import (
    BlobInfo,
    check_metadata,
    combined_crc64,
    default_timeout_s,
    split_checksums,
    with_checksums,
)
from aof2.native import crc64 as crc64_of_bytes

MULTIPART_BYTES: Final = 16 << 20
RANGE_BYTES: Final = 4 << 20
READ_WINDOW: Final = 8
WRITE_WINDOW: Final = 4
DELETE_BATCH: Final = 1000


class _Fetched(NamedTuple):
    """One range, and what its answer says of the whole object."""

    data: bytes
    info: BlobInfo


class S3Store:
    """See the module's text."""

    def __init__(self, env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> None:
        url = parse_url(settings.url)
        self._env = env
        self._prefix = url.prefix
        self._bucket = url.bucket
        self._timeout_s = settings.timeout_s
        self._read_window = min(READ_WINDOW, settings.parallel)
        self._write_window = min(WRITE_WINDOW, max(2, settings.parallel // 2))
        self._active_uploads: set[str] = set()
        self._calls = S3Calls(env, settings, url.bucket, sleep_s=sleep_s)
        self._client = self._calls.client

    # Puts

    def put_blob(
        self,
        key: str,
        source: Source,
        size: int,
        *,
        crc64: int | None = None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        name, meta = self._name(key), check_metadata(metadata)
        deadline = self._deadline(timeout_s, size)
        crc = crc64_of(source, size) if crc64 is None else crc64
        if etag := self._already(key, size, crc, deadline, fence=if_absent):
            return etag
        meta = with_checksums(meta, crc, sha256)
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
            raise RemoteUnavailableError(f"upload of {key}: ended by someone else") from None

    def put_if_absent(
        self, key: str, data: bytes, metadata: Mapping[str, str] | None = None, *, timeout_s: float | None = None
    ) -> str:
        name, crc = self._name(key), crc64_of_bytes(data)
        meta = with_checksums(check_metadata(metadata), crc, None)
        deadline = self._deadline(timeout_s, len(data))
        try:
            return self._put(name, data, crc, meta, deadline, IfNoneMatch="*")
        except PreconditionFailedError:
            return self._own_or_fenced(key, data, deadline)

    def replace_if_match(self, key: str, data: bytes, etag: str | None, *, timeout_s: float | None = None) -> str:
        name, crc = self._name(key), crc64_of_bytes(data)
        meta = with_checksums({}, crc, None)
        deadline = self._deadline(timeout_s, len(data))
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            return self._put(name, data, crc, meta, deadline, **condition)
        except (PreconditionFailedError, RemoteMissingError):
            return self._own_or_fenced(key, data, deadline)

    def _put(
        self, name: str, body: Buffer, crc: int, metadata: dict[str, str], deadline: Deadline, **conditions: str
    ) -> str:
        payload = bytes(body) if isinstance(body, memoryview) else body

        def attempt() -> str:
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

        return self._calls.write(f"put of {name}", attempt, deadline)

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
        out = BytesWriter()
        try:
            info = self._get(key, out, None, None, deadline)
        except RemoteMissingError:
            raise FencedError(f"{key}: it is gone, another writer removed it") from None
        if out.getvalue() != data:
            raise FencedError(f"{key}: holds other bytes, put there by another writer")
        return info.etag

    # Gets

    def get_blob(
        self,
        key: str,
        writer: Writer,
        *,
        crc64: int | None = None,
        sha256: bytes | None = None,
        timeout_s: float | None = None,
    ) -> BlobInfo:
        self._name(key)
        return self._get(key, writer, crc64, sha256, timeout_s)

    def _get(
        self, key: str, writer: Writer, crc64: int | None, sha256: bytes | None, limit: float | Deadline | None
    ) -> BlobInfo:
        changed = False
        for _ in range(2):
            try:
                info, crc, sha = self._stream(key, writer, limit, hashing=sha256 is not None)
            except PreconditionFailedError:
                changed = True
                continue
            changed = False
            expected = info.crc64 if crc64 is None else crc64
            if expected in (None, crc) and sha256 in (None, sha):
                return info
        if changed:
            raise RemoteUnavailableError(f"get of {key}: it is replaced again and again while it is read")
        raise RemoteCorruptError("the object's bytes fail their checksum, read twice", path=key)

    def _stream(
        self, key: str, writer: Writer, limit: float | Deadline | None, *, hashing: bool
    ) -> tuple[BlobInfo, int, bytes]:
        """One reading: what it is, the crc64 and SHA-256 of what came."""
        deadline = limit if isinstance(limit, Deadline) else self._deadline(limit, 0)
        try:
            first = self._fetch(key, 0, RANGE_BYTES, None, deadline)
        except RangeError:
            info = self._head(key, deadline)
            if info is None or info.size:
                raise RemoteUnavailableError(f"get of {key}: it changes while it is read") from None
            writer(0, b"")
            return info, 0, hashlib.sha256().digest()
        info = first.info
        if limit is None:
            deadline = self._deadline(None, info.size)
        digest, crc, at = hashlib.sha256(), 0, 0
        for data in self._ranges(key, first, deadline):
            if hashing:
                digest.update(data)
            crc = crc64_of_bytes(data, crc)
            writer(at, data)
            at += len(data)
        return info, crc, digest.digest()

    def _ranges(self, key: str, first: _Fetched, deadline: Deadline) -> Iterator[bytes]:
        """The object in order, the next ranges on their way while one is used."""
        spans = iter(_spans(len(first.data), first.info.size - len(first.data)))
        flying: deque[Future[_Fetched]] = deque()

        def fill() -> None:
            for offset, length in islice(spans, self._read_window - len(flying)):
                flying.append(self._start_fetch(key, offset, length, first.info.etag, deadline))

        try:
            fill()
            yield first.data
            while flying:
                data = self._calls.wait(flying.popleft(), f"get of {key}", deadline).data
                fill()
                yield data
        finally:
            for future in flying:
                future.cancel()

    def get_range(self, key: str, offset: int, length: int, *, timeout_s: float | None = None) -> bytes:
        return self.get_ranges(key, [(offset, length)], timeout_s=timeout_s)[0]

    def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], *, timeout_s: float | None = None
    ) -> Sequence[bytes]:
        self._name(key)
        for offset, length in ranges:
            if offset < 0 or length < 0:
                raise ValueError(f"range {offset}+{length}")
        deadline = self._deadline(timeout_s, sum(length for _, length in ranges))
        todo = [span for offset, length in ranges for span in _spans(offset, length)]
        flying: deque[Future[_Fetched]] = deque()
        got: list[bytes] = []
        try:
            for offset, length in todo:
                if len(flying) >= self._read_window:
                    got.append(self._exact(key, flying, todo[len(got)], deadline))
                flying.append(self._start_fetch(key, offset, length, None, deadline))
            while flying:
                got.append(self._exact(key, flying, todo[len(got)], deadline))
        finally:
            for future in flying:
                future.cancel()
        pieces = iter(got)
        return [_join(list(islice(pieces, len(_spans(offset, length))))) for offset, length in ranges]

    def _exact(self, key: str, flying: deque[Future[_Fetched]], span: tuple[int, int], deadline: Deadline) -> bytes:
        offset, length = span
        try:
            fetched = self._calls.wait(flying.popleft(), f"get of {key}", deadline)
        except RangeError:
            raise RemoteCorruptError(f"the object ends before byte {offset}", path=key) from None
        if len(fetched.data) != length:
            size = fetched.info.size
            raise RemoteCorruptError(f"the object has {size} bytes, {length} at {offset} were expected", path=key)
        return fetched.data

    def _fetch(self, key: str, offset: int, length: int, etag: str | None, deadline: Deadline) -> _Fetched:
        return self._calls.wait(self._start_fetch(key, offset, length, etag, deadline), f"get of {key}", deadline)

    def _start_fetch(
        self, key: str, offset: int, length: int, etag: str | None, deadline: Deadline
    ) -> Future[_Fetched]:
        conditions = {"IfMatch": etag} if etag else {}
        what = f"get of {key}"

        def attempt() -> _Fetched:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + key, Range=f"bytes={offset}-{offset + length - 1}", **conditions
            )
            with closing(answer["Body"]) as body:
                size = _total_size(answer, offset, length, what)
                data = body.read()
            if len(data) != min(length, size - offset):
                raise RemoteUnavailableError(f"{what}: {len(data)} bytes came of {min(length, size - offset)}")
            self._calls.weather.received(len(data))
            return _Fetched(data, _info(key, answer, size))

        return self._calls.start_read(what, attempt, deadline, under_way=bool(etag))

    def head_blob(self, key: str, *, timeout_s: float | None = None) -> BlobInfo | None:
        self._name(key)
        return self._head(key, self._deadline(timeout_s, 0))

    def _head(self, key: str, deadline: Deadline) -> BlobInfo | None:
        def attempt() -> BlobInfo:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED")
            return _info(key, answer, int(answer["ContentLength"]))

        try:
            return self._calls.read(f"head of {key}", attempt, deadline)
        except RemoteMissingError:
            self._calls.check_bucket(deadline)
            return None

    # Listing and deleting

    def list(
        self, prefix: str = "", *, start_after: str | None = None, timeout_s: float | None = None
    ) -> Iterator[BlobInfo]:
        check_prefix(prefix)
        where: dict[str, str] = {} if start_after is None else {"StartAfter": self._prefix + start_after}
        while True:
            page = self._page(prefix, where, self._deadline(timeout_s, 0))
            for row in page.get("Contents", ()):
                yield BlobInfo(
                    key=str(row["Key"]).removeprefix(self._prefix),
                    size=int(row["Size"]),
                    etag=str(row["ETag"]),
                    modified_ms=_ms(row["LastModified"]),
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

    def delete(self, keys: Iterable[str], *, timeout_s: float | None = None) -> None:
        names = iter([self._name(key) for key in keys])
        while batch := list_of(islice(names, DELETE_BATCH)):
            self._delete_batch(batch, self._deadline(timeout_s, 0))

    def _delete_batch(self, names: Sequence[str], deadline: Deadline) -> None:
        what = f"delete of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        request = {"Objects": [{"Key": name} for name in names], "Quiet": True}

        def attempt() -> None:
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=request)
            for failed in answer.get("Errors", ()):
                if failed.get("Code") != "NoSuchKey":
                    raise _delete_error(failed, what)

        self._calls.write(what, attempt, deadline)

    # Composing

    def compose(
        self, key: str, sources: Sequence[str], *, if_absent: bool = False, timeout_s: float | None = None
    ) -> str:
        name = self._name(key)
        infos = [self._source_info(source, timeout_s) for source in sources]
        size = sum(info.size for info in infos)
        deadline = self._deadline(timeout_s, size)
        crc = combined_crc64(infos)
        if not _copyable([info.size for info in infos]):
            whole_of = ChunksSource(lambda: self._concatenated(infos))
            return self.put_blob(key, whole_of, size, crc64=crc, if_absent=if_absent, timeout_s=deadline.left_s())
        if crc is not None and (etag := self._already(key, size, crc, deadline, fence=if_absent)):
            return etag
        meta = {} if crc is None else with_checksums({}, crc, None)
        try:
            with MultipartUpload(self._calls, self._active_uploads, name, deadline).started(meta) as upload:
                parts = upload.copy([(self._prefix + info.key, info.etag) for info in infos])
                etag = upload.complete(parts, crc, if_absent=if_absent)
        except (PreconditionFailedError, UploadGoneError):
            if crc is not None and (etag := self._already(key, size, crc, deadline, fence=if_absent)):
                return etag
            raise RemoteUnavailableError(f"compose of {key}: a source or the upload changed under way") from None
        made = self._head(key, deadline)
        if made is None or made.size != size or crc not in (None, made.crc64):
            raise RemoteCorruptError(f"it was composed of {size} bytes, and is not them", path=key)
        return etag

    def _source_info(self, key: str, timeout_s: float | None) -> BlobInfo:
        info = self.head_blob(key, timeout_s=timeout_s)
        if info is None:
            raise RemoteMissingError(f"compose: {key} is not there")
        return info

    def _concatenated(self, infos: Sequence[BlobInfo]) -> Iterator[bytes]:
        for info in infos:
            for offset, length in _spans(0, info.size):
                yield self.get_range(info.key, offset, length)

    # Upkeep

    def abort_stale_uploads(self, older_than_s: float, *, timeout_s: float | None = None) -> int:
        before_ms = self._env.now_ms() - int(older_than_s * 1000)
        aborted = 0
        where: dict[str, str] = {}
        while True:
            page = self._uploads_page(where, self._deadline(timeout_s, 0))
            for row in page.get("Uploads", ()):
                name, upload_id = str(row["Key"]), str(row["UploadId"])
                old = _ms(row["Initiated"]) <= before_ms
                if old and name.startswith(self._prefix) and upload_id not in self._active_uploads:
                    aborted += self._abort(name, upload_id, self._deadline(timeout_s, 0))
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

    def _deadline(self, timeout_s: float | None, size: int) -> Deadline:
        return Deadline(self._env, default_timeout_s(self._timeout_s, size) if timeout_s is None else timeout_s)


list_of = list  # the class has a method of that name


def _spans(offset: int, length: int) -> Sequence[tuple[int, int]]:
    """The requests that fetch a range."""
    end = offset + length
    return [(at, min(RANGE_BYTES, end - at)) for at in range(offset, end, RANGE_BYTES)]


def _join(pieces: Sequence[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _copyable(sizes: Sequence[int]) -> bool:
    """Whether the server can do it: every part but the last has at least 5 MiB."""
    if not sizes or len(sizes) > PARTS_MAX or not all(0 < size <= COPY_PART_BYTES_MAX for size in sizes):
        return False
    return sum(sizes) >= COPY_PART_BYTES_MIN and all(size >= COPY_PART_BYTES_MIN for size in sizes[:-1])


def _total_size(answer: Mapping[str, Any], offset: int, length: int, what: str) -> int:
    content_range = answer.get("ContentRange")
    if content_range:
        return int(str(content_range).rpartition("/")[2])
    if offset == 0 and int(answer["ContentLength"]) <= length:
        return int(answer["ContentLength"])
    raise RemoteRefusedError(f"{what}: the server ignores Range")


def _info(key: str, answer: Mapping[str, Any], size: int) -> BlobInfo:
    metadata, crc, sha = split_checksums(answer.get("Metadata", {}))
    if answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        told = from_header(answer.get("ChecksumCRC64NVME"))
        crc = crc if told is None else told
    return BlobInfo(
        key=key,
        size=size,
        etag=str(answer["ETag"]),
        modified_ms=_ms(answer["LastModified"]),
        crc64=crc,
        sha256=sha,
        metadata=metadata,
    )


def _ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)


def _delete_error(failed: Mapping[str, Any], what: str) -> Exception:
    from botocore.exceptions import ClientError

    status = 403 if failed.get("Code") == "AccessDenied" else 500
    response = {"Error": {"Code": failed.get("Code", "")}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate(ClientError(response, "DeleteObjects"), what)
