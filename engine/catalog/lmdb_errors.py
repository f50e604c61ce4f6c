"""What LMDB raises, as the engine's errors: a disk that is full or fails is not damage and not a bug.

    no room, I/O error, no permission …   OSError with that errno: the caller is told, with advice (`fs/cli/errors.py`)
    map full, too many readers            LimitError
    anything else                         CorruptError: the rows are thrown away and rebuilt from the logs

Owner: stateless.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from aof2.engine.errors import CorruptError, LimitError

MAP_FULL: Final = "the catalog's map is full; open the volume with a larger one"
# py-lmdb has a class for ENOSPC and ENOMEM alone; the other errnos are in the message, in the C library's words.
_ERRNOS: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)


def translated(e: lmdb.Error, path: Path) -> Exception:
    """The error that says it."""
    if isinstance(e, lmdb.MapFullError):
        return LimitError(MAP_FULL)
    if isinstance(e, lmdb.ReadersFullError):
        return LimitError(f"{path}: too many processes read this catalog at a time; stop some")
    if isinstance(e, lmdb.DiskError):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    for code in _ERRNOS:
        if os.strerror(code) in str(e):
            return OSError(code, os.strerror(code), str(path))
    return CorruptError(f"catalog failed ({e})", path=str(path))


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """LMDB's errors inside the block leave it as ours."""
    try:
        yield
    except lmdb.Error as e:
        raise translated(e, path) from e
