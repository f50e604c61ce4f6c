"""Multipart uploads: parts in parallel, each with its crc64, the whole with its own, aborted when anything fails.

Invariants
- At most `window` parts are in memory. The source is read once a pass, in order, by the caller's thread.
- The parts' crc64s must combine to the crc64 announced before the upload is completed: bytes that changed under way are
  CorruptError, and no object.
- `completed` asks the object itself when the answer to the completion got lost.

Owner: the calling thread. A crash leaves an unfinished upload on the server, no object; abort_stale_uploads ends it.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.remote.resilience import Deadline
from aof2.engine.remote.s3_calls import S3Calls
from aof2.engine.remote.source import Buffer, Source, pieces
from aof2.native import crc64 as crc64_of_bytes
from aof2.native import crc64_combine

PART_BYTES: Final = 8 << 20
PARTS_MAX: Final = 10_000
COPY_PART_BYTES_MIN: Final = 5 << 20
COPY_PART_BYTES_MAX: Final = 5 << 30
ABORT_TIMEOUT_S: Final = 10.0

Part = dict[str, Any]


def as_header(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def part_bytes_for(size: int) -> int:
    """8 MiB, more when there would be over 10,000 parts."""
    return max(PART_BYTES, -(-size // PARTS_MAX))


class MultipartUpload:
    """One upload to `key`, its name in the bucket. Use as `with upload.started(metadata): …`."""

    def __init__(self, calls: S3Calls, active: set[str], key: str, deadline: Deadline) -> None:
        self._calls = calls
        self._active = active
        self._key = key
        self._deadline = deadline
        self._id = ""
        self._flying: deque[Future[Part]] = deque()

    @contextmanager
    def started(self, metadata: Mapping[str, str]) -> Iterator[MultipartUpload]:
        create = partial(
            self._calls.sdk,
            "create_multipart_upload",
            Key=self._key,
            Metadata=dict(metadata),
            ChecksumAlgorithm="CRC64NVME",
            ChecksumType="FULL_OBJECT",
        )
        answer = self._calls.write(f"start of the upload of {self._key}", create, self._deadline)
        self._id = answer["UploadId"]
        self._active.add(self._id)
        try:
            yield self
        except BaseException:
            self._abort()
            raise
        finally:
            self._active.discard(self._id)

    def send(self, source: Source, size: int, crc64: int, *, window: int) -> list[Part]:
        """Uploads the parts; what `complete` needs."""
        parts: list[Part] = []
        combined = 0
        for number, piece in enumerate(pieces(source, size, part_bytes_for(size)), 1):
            if len(self._flying) >= window:
                parts.append(self._landed())
            crc = crc64_of_bytes(piece)
            combined = crc64_combine(combined, crc, len(piece))
            self._flying.append(self._start_part(number, piece, crc))
        while self._flying:
            parts.append(self._landed())
        if combined != crc64:
            raise CorruptError(f"the source of {self._key} has changed: crc64 {combined:016x}, not {crc64:016x}")
        return parts

    def _start_part(self, number: int, piece: Buffer, crc: int) -> Future[Part]:
        body = bytes(piece) if isinstance(piece, memoryview) else piece

        def attempt() -> Part:
            answer = self._sdk("upload_part", PartNumber=number, Body=body, ChecksumCRC64NVME=as_header(crc))
            self._calls.weather.sent(len(body))
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC64NVME": as_header(crc)}

        return self._start(f"part {number} of {self._key}", attempt)

    def _start(self, what: str, attempt: Callable[[], Part]) -> Future[Part]:
        return self._calls.start(what, attempt, self._deadline, writes=True, under_way=True)

    def _sdk(self, operation: str, **params: Any) -> Any:
        return self._calls.sdk(operation, Key=self._key, UploadId=self._id, **params)

    def copy(self, sources: list[tuple[str, str]]) -> list[Part]:
        """Parts copied on the server from (key, etag)."""
        for number, (key, etag) in enumerate(sources, 1):
            self._flying.append(self._start(f"copy of {key}", partial(self._copied, number, key, etag)))
        return [self._landed() for _ in range(len(self._flying))]

    def _copied(self, number: int, key: str, etag: str) -> Part:
        source = {"Bucket": self._calls.bucket, "Key": key}
        answer = self._sdk("upload_part_copy", PartNumber=number, CopySource=source, CopySourceIfMatch=etag)
        told = answer["CopyPartResult"]
        return {"PartNumber": number} | {name: told[name] for name in ("ETag", "ChecksumCRC64NVME") if name in told}

    def complete(self, parts: list[Part], crc64: int | None, *, if_absent: bool) -> str:
        """Makes the object; its etag."""
        conditions: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        if crc64 is not None:
            conditions |= {"ChecksumCRC64NVME": as_header(crc64), "ChecksumType": "FULL_OBJECT"}
        end = partial(self._sdk, "complete_multipart_upload", MultipartUpload={"Parts": parts}, **conditions)
        answer = self._calls.write(f"end of the upload of {self._key}", end, self._deadline, under_way=True)
        return str(answer["ETag"])

    def _landed(self) -> Part:
        return self._calls.wait(self._flying.popleft(), f"upload of {self._key}", self._deadline)

    def _abort(self) -> None:
        """In the background: the caller has its error, and an outage would make it wait for nothing."""
        for future in self._flying:
            future.cancel()
        wait(self._flying, timeout=max(0.0, min(1.0, self._deadline.left_s())))
        abort = partial(self._sdk, "abort_multipart_upload")
        deadline = Deadline(self._calls.env, ABORT_TIMEOUT_S)
        try:
            self._calls.start(f"abort of the upload of {self._key}", abort, deadline, writes=True)
        except Aof2Error:
            return  # closed: abort_stale_uploads ends it
