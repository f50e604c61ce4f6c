"""Reading from S3: heads, ranges in order with the next ones under way, whole objects checked.

Invariants
- The ranges of one reading carry the ETag of its first: bytes of two objects never mix.
- A body shorter than its answer announced is an error, and retried; bytes that fail their checksum are read once more.

Owner: any thread. A crash leaves nothing.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

from aof2.engine.env import Env
from aof2.engine.remote.errors import (
    RemoteCorruptError,
    RemoteMissingError,
    RemoteRefusedError,
    RemoteUnavailableError,
)
from aof2.engine.remote.keys import check_key
from aof2.engine.remote.resilience import Deadline
from aof2.engine.remote.s3_calls import S3Calls
from aof2.engine.remote.s3_client import PreconditionFailedError, RangeError
from aof2.engine.remote.s3_wire import SCRATCH_BYTES, Head
from aof2.engine.remote.source import FileTarget
from aof2.engine.remote.store import BlobInfo, default_timeout_s, split_checksums
from aof2.engine.settings.remote import RemoteSettings, parse_url
from aof2.native import crc64 as crc64_of_bytes

RANGE_BYTES: Final = 8 << 20
READ_WINDOW: Final = 4
PIECES_AT_ONCE: Final = 4


class Span(NamedTuple):
    """One request for a range. With an etag it belongs to a reading that has begun, and to that object only."""

    key: str
    offset: int
    length: int
    etag: str | None = None


class Fetched(NamedTuple):
    """One range, and what its answer says of the whole object."""

    data: bytes
    info: BlobInfo


class S3Reader:
    """The half of the store that reads."""

    def __init__(self, env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> None:
        url = parse_url(settings.url)
        self._env = env
        self._prefix = url.prefix
        self._timeout_s = settings.timeout_s
        self._read_window = min(READ_WINDOW, settings.parallel)
        self._calls = S3Calls(env, settings, url.bucket, sleep_s=sleep_s)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _deadline(self, size: int) -> Deadline:
        return Deadline(self._env, default_timeout_s(self._timeout_s, size))

    def get_blob(self, key: str, *, timeout_s: float | None = None) -> tuple[BlobInfo, bytes]:
        self._name(key)
        return self._get(key, None if timeout_s is None else Deadline(self._env, timeout_s))

    def _get(self, key: str, limit: Deadline | None) -> tuple[BlobInfo, bytes]:
        changed = False
        for _ in range(2):
            try:
                info, data = self._whole(key, limit)
            except PreconditionFailedError:
                changed = True
                continue
            changed = False
            if info.crc64 in (None, crc64_of_bytes(data)):
                return info, data
        if changed:
            raise RemoteUnavailableError(f"get of {key}: it is replaced again and again while it is read")
        raise RemoteCorruptError("the object's bytes fail their checksum, read twice", path=key)

    def _whole(self, key: str, limit: Deadline | None) -> tuple[BlobInfo, bytes]:
        """One reading: what it is, and what came."""
        deadline = limit or self._deadline(0)
        try:
            first = self._calls.wait(self._start_fetch(Span(key, 0, RANGE_BYTES), deadline), f"get of {key}", deadline)
        except RangeError:
            info = self._head(key, deadline)
            if info is None or info.size:
                raise RemoteUnavailableError(f"get of {key}: it changes while it is read") from None
            return info, b""
        info = first.info
        if limit is None:
            deadline = self._deadline(info.size)
        start = len(first.data)
        rest = self._fetch_in_order(spans_of(key, start, info.size - start, info.etag), deadline)
        return info, b"".join([first.data, *(fetched.data for fetched in rest)])

    def _fetch_in_order(self, spans: Sequence[Span], deadline: Deadline) -> Iterator[Fetched]:
        """The spans' bytes, the next ones on their way (from this call on) while one is used."""
        todo = iter(spans)
        flying: deque[Future[Fetched]] = deque()

        def fill() -> None:
            for span in islice(todo, self._read_window - len(flying)):
                flying.append(self._start_fetch(span, deadline))

        def fetched() -> Iterator[Fetched]:
            try:
                for span in spans:
                    result = self._calls.wait(flying.popleft(), f"get of {span.key}", deadline)
                    fill()
                    yield result
            finally:
                for future in flying:
                    future.cancel()

        fill()
        return fetched()

    def receive_range(self, key: str, offset: int, length: int, target: FileTarget) -> None:
        self._check_range(key, offset, length)
        deadline = self._deadline(length)
        landed = 0  # pieces
        scratch = bytearray(SCRATCH_BYTES)

        def attempt() -> bool:
            nonlocal landed
            start = landed * target.piece_bytes
            with self._calls.wire.get(self._prefix + key, offset + start, length - start, deadline) as body:
                if body is None:
                    return False
                _check_length(Span(key, offset + start, length - start), body.head)
                while start < length:
                    # The first ones are waited for; later ones are cheaper several at a time.
                    size = min(target.piece_bytes * min(1 + landed // 2, PIECES_AT_ONCE), length - start)
                    crcs = body.land(target, landed, size, scratch)
                    target.landed(landed, crcs)
                    landed, start = landed + len(crcs), start + size
                    self._calls.weather.received(size)
            return True

        asked = bool(length) and self._calls.wire.usable
        try:
            if asked and self._calls.here(f"get of {key}", attempt, deadline):
                return
            self._receive_by_sdk(key, offset, length, target, landed, deadline)
        except RangeError:
            raise RemoteCorruptError("the object ends before the range starts", path=key) from None
        if asked:
            self._calls.wire.outdone()

    def _receive_by_sdk(
        self, key: str, offset: int, length: int, target: FileTarget, landed: int, deadline: Deadline
    ) -> None:
        start = landed * target.piece_bytes
        step = max(target.piece_bytes, RANGE_BYTES // target.piece_bytes * target.piece_bytes)
        spans = [Span(key, at, min(step, offset + length - at)) for at in range(offset + start, offset + length, step)]
        for span, fetched in zip(spans, self._fetch_in_order(spans, deadline), strict=True):
            landed = target.put_from(landed, _exact(span, fetched))

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        """None in anything but fair weather."""
        name, calls = self._name(key), self._calls
        if not length or not calls.wire.usable or not calls.weather.is_fair:
            return None
        data = await calls.wire.glance(name, offset, length)
        if data is not None:
            calls.weather.went_well(len(data))
        return data

    def _over_wire(self, span: Span, deadline: Deadline) -> bytes | None:
        """The span without a thread in between; None when the SDK should be asked."""

        def attempt() -> bytes | None:
            with self._calls.wire.get(self._prefix + span.key, span.offset, span.length, deadline) as body:
                if body is None:
                    return None
                _check_length(span, body.head)
                data = bytearray(span.length)
                body.read_into(memoryview(data))
                self._calls.weather.received(len(data))
                return bytes(data)

        return self._calls.here(f"get of {span.key}", attempt, deadline)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._check_range(key, offset, length)
        deadline = self._deadline(length)
        spans = spans_of(key, offset, length, None)
        asked = len(spans) == 1 and self._calls.wire.usable
        try:
            if asked and (data := self._over_wire(spans[0], deadline)) is not None:
                return data
            fetched = self._fetch_in_order(spans, deadline)
            found = b"".join([_exact(span, next(fetched)) for span in spans])
        except RangeError:
            raise RemoteCorruptError("the object ends before the range starts", path=key) from None
        if asked:
            self._calls.wire.outdone()
        return found

    def _check_range(self, key: str, offset: int, length: int) -> None:
        self._name(key)
        if offset < 0 or length < 0:
            raise ValueError(f"range {offset}+{length}")

    def _start_fetch(self, span: Span, deadline: Deadline) -> Future[Fetched]:
        key, offset, length, etag = span
        conditions = {"IfMatch": etag} if etag else {}
        what = f"get of {key}"

        def attempt() -> Fetched:
            where = f"bytes={offset}-{offset + length - 1}"
            answer = self._calls.sdk("get_object", Key=self._prefix + key, Range=where, **conditions)
            with closing(answer["Body"]) as body:
                size = _total_size(answer, offset, length, what)
                data = body.read()
            if len(data) != min(length, size - offset):
                raise RemoteUnavailableError(f"{what}: {len(data)} bytes came of {min(length, size - offset)}")
            self._calls.weather.received(len(data))
            return Fetched(data, info_of(key, answer, size))

        return self._calls.start(what, attempt, deadline, under_way=bool(etag))

    def head_blob(self, key: str) -> BlobInfo | None:
        self._name(key)
        return self._head(key, self._deadline(0))

    def _head(self, key: str, deadline: Deadline) -> BlobInfo | None:
        return self._heads([key], deadline)[0]

    def _heads(self, keys: Sequence[str], deadline: Deadline) -> Sequence[BlobInfo | None]:
        """All at once. None for one that is not there, while the bucket is."""
        flying = deque([self._start_head(key, deadline) for key in keys])
        infos: list[BlobInfo | None] = []
        for key in keys:
            try:
                infos.append(self._calls.wait(flying.popleft(), f"head of {key}", deadline))
            except RemoteMissingError:
                self._calls.check_bucket(deadline)
                infos.append(None)
        return infos

    def _start_head(self, key: str, deadline: Deadline) -> Future[BlobInfo]:
        def attempt() -> BlobInfo:
            answer = self._calls.sdk("head_object", Key=self._prefix + key, ChecksumMode="ENABLED")
            return info_of(key, answer, int(answer["ContentLength"]))

        return self._calls.start(f"head of {key}", attempt, deadline)


def spans_of(key: str, offset: int, length: int, etag: str | None) -> Sequence[Span]:
    """The requests that fetch a range."""
    end = offset + length
    return [Span(key, at, min(RANGE_BYTES, end - at), etag) for at in range(offset, end, RANGE_BYTES)]


def _exact(span: Span, fetched: Fetched) -> bytes:
    if len(fetched.data) != span.length:
        raise _too_short(span, fetched.info.size)
    return fetched.data


def _check_length(span: Span, head: Head) -> None:
    if head.total is not None and head.total < span.offset + span.length:
        raise _too_short(span, head.total)
    if head.total is None or head.length != span.length:
        raise RemoteRefusedError(f"get of {span.key}: the server ignores Range")


def _too_short(span: Span, size: int) -> RemoteCorruptError:
    said = f"the object has {size} bytes, {span.length} at {span.offset} were expected"
    return RemoteCorruptError(said, path=span.key)


def _total_size(answer: Mapping[str, Any], offset: int, length: int, what: str) -> int:
    content_range = answer.get("ContentRange")
    if content_range:
        size = str(content_range).rpartition("/")[2]
        if not size.isdecimal():
            raise RemoteUnavailableError(f"{what}: the server does not tell the object's size")
        return int(size)
    if offset == 0 and int(answer["ContentLength"]) <= length:
        return int(answer["ContentLength"])
    raise RemoteRefusedError(f"{what}: the server ignores Range")


def info_of(key: str, answer: Mapping[str, Any], size: int) -> BlobInfo:
    metadata, crc, sha = split_checksums(answer.get("Metadata", {}))
    if answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        told = crc_from_header(answer.get("ChecksumCRC64NVME"))
        crc = crc if told is None else told
    return BlobInfo(
        key=key,
        size=size,
        etag=str(answer["ETag"]),
        modified_ms=to_ms(answer["LastModified"]),
        crc64=crc,
        sha256=sha,
        metadata=metadata,
    )


def to_ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)


def crc_from_header(text: str | None) -> int | None:
    """What the server says, if that is a checksum at all."""
    try:
        return int.from_bytes(base64.b64decode(text, validate=True), "big") if text else None
    except ValueError:
        return None
