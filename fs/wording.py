"""Failures and sizes as a user reads them, wherever they are said: the command, the daemon's answers, its log.

Owner: stateless.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb

from aof2.engine.catalog.lmdb_errors import translated

_OS_ADVICE = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EACCES: "run as its owner",
    errno.EPERM: "run as its owner",
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within the quota",
    errno.EROFS: "it is mounted read-only",
    errno.EIO: "the disk fails: copy what can be read",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def one_line(text: str) -> str:
    """`text` with everything that could move a cursor spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def explain(error: Exception, catalog: Path = Path("catalog")) -> str:
    """What a user can cause or mend: our errors are a line themselves, the system's get advice."""
    if isinstance(error, lmdb.Error):
        error = translated(error, catalog)
    if not isinstance(error, OSError):
        return str(error)
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    what = (error.strerror or str(error) or type(error).__name__).lower()
    advice = _OS_ADVICE.get(error.errno or 0)
    return f"{where}{what}{'; ' + advice if advice else ''}"


def human_size(size_bytes: int) -> str:
    """About how much, in three digits: `1.53 GiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
