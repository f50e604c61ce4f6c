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
from collections.abc import Iterable, Mapping
from typing import Final

import trio

from aof2.engine import namespace
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import Asked, Caller, FileHandle, Kind
from aof2.engine.kinds.opens import Opens
from aof2.fs.control import views
from aof2.fs.control.mounted import Mounted

ROOT: Final = 1
DOT: Final = 2
STATUS: Final = 3
METRICS: Final = 4
MANIFEST: Final = 5
FIRST_LOG: Final = 1 << 20  # + tenant id
DOT_NAME: Final = b".aof2"


class DotHandle:
    """A content as it was made, in an unlinked file: a log may be larger than memory likes."""

    keeps_pages = False
    direct_io = True

    def __init__(self, opens: Opens, number: int, ino: int, fd: int) -> None:
        self._opens = opens
        self._number = number
        self._fd = fd
        self.ino = ino

    async def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    async def write(self, offset: int, data: bytes) -> int:
        raise os_error(errno.EBADF)

    async def sync(self) -> None:
        """Nothing is stored."""

    async def close(self) -> None:
        self._opens.pop(self._number)
        os.close(self._fd)

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        raise os_error(errno.EBADF)

    async def seek(self, offset: int, whence: int) -> int:
        return os.lseek(self._fd, offset, whence)

    async def copy_from(self, source: FileHandle, offset_in: int, offset_out: int, length: int) -> int:
        raise os_error(errno.EBADF)


class DotKind(Kind):
    """The root of one mount, and `.aof2/`."""

    def __init__(self, mounted: Mounted, opens: Opens, tenants: Mapping[int, Kind]) -> None:
        options = mounted.options
        self._mounted = mounted
        self._volume = mounted.volume
        self._opens = opens
        self._tenants = tenants  # by stream
        self._uid = os.getuid() if options.uid is None else options.uid
        self._gid = os.getgid() if options.gid is None else options.gid
        self._now_ns = mounted.volume.env.now_ns()

    # -- names -------------------------------------------------------------------------------------------------

    def row(self, ino: int) -> InodeRow:
        if ino == ROOT:
            return self._row(ROOT, stat.S_IFDIR | 0o755, nlink=3 + len(self._volume.tenant_names()))
        if ino in (DOT, MANIFEST):
            return self._row(ino, stat.S_IFDIR | 0o500, nlink=3 if ino == DOT else 2)
        if ino in (STATUS, METRICS) or ino - FIRST_LOG in self._volume.tenant_names():
            return self._row(ino, stat.S_IFREG | 0o400)
        raise os_error(errno.ENOENT)

    def _row(self, ino: int, mode: int, *, nlink: int = 1) -> InodeRow:
        now = self._now_ns
        return InodeRow(
            ino, mode, self._uid, self._gid, nlink=nlink, mtime_ns=now, ctime_ns=now, atime_ns=now, parent=ROOT
        )

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        return next((row for found, row in self._all(parent) if found == name), None)

    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        return [(name, row) for name, row in sorted(self._all(ino)) if after is None or name > after][:count]

    def _all(self, ino: int) -> list[tuple[bytes, InodeRow]]:
        tenants = self._volume.tenant_names()
        if ino == ROOT:
            return [(DOT_NAME, self.row(DOT)), *self._roots()]
        if ino == DOT:
            names = ((b"status.json", STATUS), (b"metrics", METRICS), (b"manifest", MANIFEST))
            return [(name, self.row(found)) for name, found in names]
        if ino == MANIFEST:
            return [(name.encode() + b".jsonl", self.row(FIRST_LOG + stream_id)) for stream_id, name in tenants.items()]
        raise os_error(errno.ENOTDIR)

    def _roots(self) -> list[tuple[bytes, InodeRow]]:
        """The tenants' own directories, as their kinds show them; on a follower, as far as their logs are here."""
        names = self._volume.tenant_names()
        here = [(s, kind) for s, kind in self._tenants.items() if not kind.follows or self._is_here(s, kind)]
        return [(names[s].encode(), kind.row(namespace.root_ino(s))) for s, kind in here]

    @staticmethod
    def _is_here(stream_id: int, kind: Kind) -> bool:
        return kind.named(namespace.root_ino(stream_id)) is not None

    @property
    def follows(self) -> bool:
        return any(kind.follows for kind in self._tenants.values())

    async def at_end(self, ino: int) -> bool:
        """A tenant's directory that is not here may be on its way."""
        asked = False
        for stream_id, kind in self._tenants.items() if ino == ROOT else ():
            if kind.follows and not self._is_here(stream_id, kind):
                asked |= await kind.at_end(namespace.root_ino(stream_id))
        return asked

    def is_folded(self, ino: int, asked: Asked) -> bool:
        """The root shows attributes of the tenants' directories."""
        return ino != ROOT or all(kind.is_folded(0, Asked.ANY) for kind in self._tenants.values())

    async def fold(self) -> None:
        for kind in self._tenants.values():
            await kind.fold()

    def parent(self, row: InodeRow) -> int:
        if row.ino in (STATUS, METRICS, MANIFEST):
            return DOT
        return MANIFEST if row.ino >= FIRST_LOG else ROOT

    def space(self, ino: int) -> tuple[int, int]:
        """The volume's: as the kinds say that count room."""
        return max((kind.space(ino) for kind in self._tenants.values()), default=(0, 0))

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replace: bool, exchange: bool
    ) -> None:
        raise os_error(errno.EPERM if parent == new_parent else errno.EXDEV)

    # -- bytes -------------------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise os_error(errno.EROFS)
        fd = await trio.to_thread.run_sync(self._make, ino)
        number = self._opens.new_number()
        self._opens.put(number, DotHandle(self._opens, number, ino, fd))
        return number

    def _make(self, ino: int) -> int:
        """A descriptor of the content as it is now."""
        tenant = self._volume.tenant_names().get(ino - FIRST_LOG)
        content: Iterable[bytes]
        if ino == STATUS:
            content = [views.status_json(self._mounted)]
        elif ino == METRICS:
            content = [self._volume.metrics.render()]  # what `/metrics` serves
        elif tenant is not None:
            content = views.manifest_jsonl(self._mounted, tenant)
        else:
            raise os_error(errno.ENOENT)
        with tempfile.TemporaryFile() as f:
            f.writelines(content)
            f.flush()
            return os.dup(f.fileno())
