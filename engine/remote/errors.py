"""What can go wrong with a remote, told apart by what the caller does next. `reason_code` is what the log records.

Messages name the operation, the object and S3's error code or the errno; never credentials, nor text the server made up
(some servers repeat the access key in it), which is also why the SDK's own exception is not chained.

Owner: none; a crash leaves nothing.
"""

from __future__ import annotations

from aof2.engine.errors import Aof2Error, CorruptError, ReadOnlyError, TransientError
from aof2.engine.manifest.format import ReasonCode


class RemoteUnavailableError(TransientError):
    """Network, 5xx, a missing bucket or folder, a passed deadline, an open breaker. Try again later.

    `retryable` false: no retry within the same call can help (bucket missing, breaker open). `again_in_s`: before that
    no other call is let through.
    """

    def __init__(self, message: str, *, retryable: bool = True, again_in_s: float = 0.0) -> None:
        self.retryable = retryable
        self.again_in_s = again_in_s
        super().__init__(message, reason_code=ReasonCode.UNAVAILABLE)


class RemoteThrottledError(TransientError):
    """The remote, or our own limiter, asks for fewer requests. Slow down, then try again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason_code=ReasonCode.TRANSIENT)


class RemoteAuthError(TransientError):
    """Keys, rights, region or clock are wrong. Asked again later, with the keys that the chain gives then."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason_code=ReasonCode.AUTH)


class RemoteMissingError(Aof2Error):
    """The object is not there, while the bucket is. Repair from another copy; retrying does not help."""

    reason_code = int(ReasonCode.OBJECT_MISSING)


class RemoteCorruptError(CorruptError):
    """The object's bytes fail their checksum, read twice, or are fewer than they must be. Serve none of them."""


class RemoteRefusedError(Aof2Error):
    """The remote will never take this request: a name too long, an object too large. A limit or a bug: do not retry."""

    reason_code = int(ReasonCode.UNAVAILABLE)


class FencedError(ReadOnlyError):
    """Another writer owns the volume. Stop writing for good: whatever is written now could damage its work."""
