"""What is in the mount without being in a tenant: the root, and `.aof2/` with live facts, read-only and the owner's.

    /             the tenants, and .aof2
    /.aof2/       status.json · metrics · manifest/<tenant>.jsonl

A file's content is made when it is opened and stays what it was until it is closed.

Owner: the trio thread. Nothing here is stored.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from typing import Final

from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error

ROOT: Final = 1
DOT: Final = 2
STATUS: Final = 3
METRICS: Final = 4
MANIFEST: Final = 5
FIRST_LOG: Final = 1 << 20  # + tenant id
LAST: Final = 1 << 40
DOT_NAME: Final = b".aof2"
Content = Callable[[], Iterable[bytes]]


def is_special(ino: int) -> bool:
    return ino < LAST


class Special:
    """The special inodes of one mount."""

    def __init__(self, *, uid: int, gid: int, now_ns: int, tenants: Callable[[], dict[int, str]]) -> None:
        self._uid = uid
        self._gid = gid
        self._now_ns = now_ns
        self._tenants = tenants
        self._contents: dict[int, Content] = {}
        self._log_content: Callable[[str], Iterable[bytes]] | None = None

    def provide(self, *, status: Content, metrics: Content, manifest: Callable[[str], Iterable[bytes]]) -> None:
        """Where the contents come from."""
        self._contents = {STATUS: status, METRICS: metrics}
        self._log_content = manifest

    def row(self, ino: int) -> InodeRow | None:
        if ino == ROOT:
            return self._row(ROOT, stat.S_IFDIR | 0o755, nlink=3 + len(self._tenants()))
        if ino in (DOT, MANIFEST):
            return self._row(ino, stat.S_IFDIR | 0o500, nlink=3 if ino == DOT else 2)
        if ino in (STATUS, METRICS) or ino - FIRST_LOG in self._tenants():
            return self._row(ino, stat.S_IFREG | 0o400)
        return None

    def _row(self, ino: int, mode: int, *, nlink: int = 1) -> InodeRow:
        now = self._now_ns
        return InodeRow(
            ino, mode, self._uid, self._gid, nlink=nlink, mtime_ns=now, ctime_ns=now, atime_ns=now, parent=ROOT
        )

    def entries(self, ino: int) -> list[tuple[bytes, int]]:
        """The names in a special directory, the tenants aside."""
        if ino == ROOT:
            return [(DOT_NAME, DOT)]
        if ino == DOT:
            return [(b"status.json", STATUS), (b"metrics", METRICS), (b"manifest", MANIFEST)]
        if ino == MANIFEST:
            return [(name.encode() + b".jsonl", FIRST_LOG + tenant_id) for tenant_id, name in self._tenants().items()]
        raise os_error(errno.ENOTDIR)

    def parent(self, ino: int) -> int:
        """The directory that a special inode is in; the root's is itself."""
        if ino in (STATUS, METRICS, MANIFEST):
            return DOT
        return MANIFEST if ino >= FIRST_LOG else ROOT

    def lookup(self, parent: int, name: bytes) -> int | None:
        return dict(self.entries(parent)).get(name)

    def open(self, ino: int) -> int:
        """A descriptor of the content as it is now, in an unlinked file: a log may be larger than memory likes."""
        if ino in self._contents:
            content: Iterable[bytes] = self._contents[ino]()
        elif self._log_content is not None and ino - FIRST_LOG in self._tenants():
            content = self._log_content(self._tenants()[ino - FIRST_LOG])
        else:
            raise os_error(errno.ENOENT)
        with tempfile.TemporaryFile() as f:
            f.writelines(content)
            f.flush()
            return os.dup(f.fileno())
