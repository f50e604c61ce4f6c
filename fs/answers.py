"""From what an operation meets to what the kernel is told: an errno, and a log line where that is EIO.

In pyfuse3 an exception that is not a FUSEError ends the main loop and with it the mount, so nothing else may leave an
operation.

Owner: stateless.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import pyfuse3
import trio

from aof2.engine.catalog.lmdb_errors import translated
from aof2.engine.errors import CorruptError, FatalIOError, LimitError, ReadOnlyError, TransientError
from aof2.engine.objects import ObjectGoneError
from aof2.engine.quota import QuotaExceededError
from aof2.engine.residency import NotDurableError
from aof2.engine.tiering.flights import NotAvailableError
from aof2.fs.channel_wire import ChannelError

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


# What changes the volume. An open to write is refused where it is known to be one (`Files.open`).
CHANGES: Final = frozenset(
    (
        *("create", "link", "mkdir", "mknod", "removexattr", "rename", "rmdir", "setattr"),
        *("setxattr", "symlink", "unlink", "write"),
    )
)


def errno_of(e: BaseException) -> int:
    """The errno for an error; 0 for one that is not expected."""
    match e:
        case pyfuse3.FUSEError():
            return int(e.errno)
        case OSError():
            return e.errno or errno.EIO
        case ObjectGoneError():
            return errno.ESTALE
        case ReadOnlyError() | FatalIOError():
            return errno.EROFS
        case QuotaExceededError() | LimitError():
            return errno.ENOSPC
        case TransientError() | CorruptError() | NotDurableError():
            return errno.EIO
        case trio.TooSlowError():
            return errno.ETIMEDOUT
        case ChannelError():
            return errno.ENOTCONN  # the channel that would take the answer is gone
        case lmdb.Error():
            return errno_of(translated(e, Path("catalog")))
    return 0


def answered(operation: F) -> F:
    """The operation, with everything it can raise turned into an answer."""
    changes = operation.__name__ in CHANGES
    begins = changes and operation.__name__ != "write"  # who has a file open may go on until the log is off

    @functools.wraps(operation)
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self.volume.foreground.asked()
            if (changes and self.volume.fenced) or (begins and self.volume.paused):
                raise pyfuse3.FUSEError(errno.EROFS)
            return await operation(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as e:  # noqa: BLE001 (the mount must live)
            if isinstance(e, NotAvailableError) and self.volume.following is not None:
                raise pyfuse3.FUSEError(errno.ESTALE) from None  # the writer let go of what was open here
            raise pyfuse3.FUSEError(code_of(operation.__name__, e)) from None

    return wrapped  # type: ignore[return-value]


def code_of(name: str, e: Exception) -> int:
    code = errno_of(e)
    if not code:
        log.exception("operation failed unexpectedly", extra={"operation": name})
        return errno.EIO
    if code == errno.EIO:
        log.warning("operation failed", extra={"operation": name, "error": str(e)})
    return code
