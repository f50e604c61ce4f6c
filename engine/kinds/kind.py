"""The protocol of tenant kinds: names, bytes, life. `Kind` refuses what a kind does not bring, as a read-only one does.

One object serves all tenants of its kind in a mount. An inode number carries its tenant (`stream_of`), so the mount
finds the kind of an inode without a look-up (`mounted.py`).

Invariants
- Reading names (`row`, `find`, `entries`) never waits. A kind that acknowledges changes before its catalog has them
  says so by `is_folded`; the mount calls `fold` first where it is False, so a caller cannot see an old tree. What
  changes rows meets them folded in any case (`catalog/writer.py`).
- Refusals are OSErrors with the errno POSIX asks for. Who may do what is the kernel's to check.
- What a reader is shown may differ from what is stored: only `FileHandle` knows where bytes come from.

Owner: the trio thread. A kind's own module says what a crash leaves.
"""

# ruff: noqa: B027 (what a kind need not bring does nothing)
from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Protocol

import trio

from aof2.engine import namespace
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error

if TYPE_CHECKING:
    from aof2.engine.catalog.batch import Batch
    from aof2.engine.catalog.rows import DeliveryRow
    from aof2.engine.inbox.check import CheckedJob
    from aof2.engine.kinds.kernel import AppendState, Short, Touched

NAME_MAX: Final = 255


class Asked(IntEnum):
    """What is about to be asked or done: not all of it shows what is not folded yet."""

    LOOK_UP = 1
    ATTRIBUTES = 2
    LIST = 3
    UNLINK = 4
    HANDLE = 5  # an open file, by its number
    ANY = 6


class Answers(IntFlag):
    """What the channel may answer of a tenant by itself, from the catalog's rows. Spoken to it: never renumber."""

    NOTHING = 0
    LOOK_UP = 1
    ATTRIBUTES = 2
    LIST = 4
    LINKS = 8  # targets of symlinks
    XATTRS = 16  # `user.aof2.*` apart
    INTENTS = 32  # the rows are not all: the tenant has an intent log
    CHANGES = 64  # and make: what is plainly allowed is recorded there
    OPENS = 128  # files that are here whole, to be read
    READING = LOOK_UP | ATTRIBUTES | LIST | LINKS | XATTRS


class Caller(NamedTuple):
    uid: int
    gid: int
    pid: int = 0  # of the thread that asks; 0: not known


class Told(NamedTuple):
    """What of an inode its row does not say: the backing file of one that is being changed."""

    backing: os.stat_result | None = None
    changing: bool = False  # an open handle may write to it


class AttributeChange(NamedTuple):
    """What chmod, chown, truncate and utimes ask for; None: not that. All None: a write took privileges away."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Truncated(NamedTuple):
    """What a stream lost, and where what is left of it begins."""

    segments: int
    bytes: int
    first_offset: int


class StagedFile(NamedTuple):
    """Records beside a stream: payloads, and an index of them (`segment/index.py`)."""

    payload_path: Path
    index_path: Path


class StagedJob(NamedTuple):
    """Records that are to come into a stream together, instead of what is there or behind it."""

    job_id: bytes
    files: tuple[StagedFile, ...]
    overwrite: bool = False


class Delivered(NamedTuple):
    """What came of a job that was staged on this machine. Written to disk: never reorder."""

    first_offset: int
    next_offset: int
    records: int
    time_ms: int


class Unsealed(NamedTuple):
    """Files that were written and are not sealed."""

    files: int = 0
    bytes: int = 0


class Way(NamedTuple):
    """How files of a mount can be served: "" in a `why` where they can."""

    passthrough: bool = False
    passthrough_why: str = ""
    brake: bool = False
    brake_why: str = ""


class FileHandle(Protocol):
    """One open of a file."""

    @property
    def ino(self) -> int: ...

    @property
    def keeps_pages(self) -> bool:
        """Whether the kernel may keep what it remembers of the file's bytes at this open."""

    @property
    def direct_io(self) -> bool:
        """Whether the kernel is to cache nothing of it."""

    async def read(self, offset: int, size: int) -> bytes | None:
        """None: the channel can answer this read by itself now."""

    async def write(self, offset: int, data: bytes) -> int: ...

    async def sync(self) -> None:
        """Bytes and records of the file are on the disk when this returns."""

    async def close(self) -> None: ...

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        """fallocate(2)."""

    async def seek(self, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE."""

    async def copy_from(self, source: FileHandle, offset_in: int, offset_out: int, length: int) -> int:
        """copy_file_range(2); how much."""


def refuse(code: int = errno.EPERM) -> NoReturn:
    raise os_error(code)


class Kind(ABC):
    """What the tenants of one kind are to a mount."""

    # -- names: reading ----------------------------------------------------------------------------------------

    @abstractmethod
    def row(self, ino: int) -> InodeRow:
        """An inode that the kernel may know, also one without a name. ENOENT."""

    @abstractmethod
    def find(self, parent: int, name: bytes) -> InodeRow | None:
        """What has this name; None: nothing."""

    @abstractmethod
    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        """At most `count` names of a directory behind `after`, in order; that one need not exist any more."""

    @abstractmethod
    def parent(self, row: InodeRow) -> int:
        """The directory that an inode is in; one of them."""

    def named(self, ino: int) -> InodeRow | None:
        """The inode, if it still has a name: how the kernel finds by a file handle what it forgot."""
        try:
            return self.row(ino)
        except OSError:
            return None

    def told(self, row: InodeRow) -> Told:
        """What the kernel is to be told of an inode beside its row."""
        return Told()

    def readlink(self, ino: int) -> bytes:
        return self.row(ino).target

    def get_xattr(self, ino: int, name: bytes, caller: Caller | None = None) -> bytes | None:
        return None

    def list_xattrs(self, ino: int) -> Sequence[bytes]:
        return []

    def space(self, ino: int) -> tuple[int, int]:
        """Bytes in all and free, as df shows them."""
        return 0, 0

    def answers(self, stream_id: int) -> Answers:
        """What rows say of a tenant, and its intents where there are any: as `find`, `row` and `told` would."""
        return Answers.NOTHING

    # -- names: of another machine -----------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether another machine makes the names: one that is not there may be on its way."""
        return False

    async def at_end(self, ino: int) -> bool:
        """Asks for what there is by now, where another machine makes it; whether it could be asked."""
        return False

    # -- names: acknowledged, not folded -----------------------------------------------------------------------

    def is_folded(self, ino: int, asked: Asked) -> bool:
        """Whether the rows show everything that was acknowledged, as far as it matters for this."""
        return True

    async def fold(self) -> None:
        """Returns when the rows show everything that was acknowledged before."""

    # -- names: changing ---------------------------------------------------------------------------------------

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> InodeRow:
        """mknod(2), regular files included."""
        refuse()

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> InodeRow:
        refuse()

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> InodeRow:
        refuse()

    async def link(self, ino: int, parent: int, name: bytes) -> InodeRow:
        refuse()

    async def unlink(self, parent: int, name: bytes) -> None:
        refuse()

    async def rmdir(self, parent: int, name: bytes) -> None:
        refuse()

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replace: bool, exchange: bool
    ) -> None:
        """Within one tenant."""
        refuse()

    async def set_attributes(self, ino: int, change: AttributeChange, caller: Caller) -> InodeRow:
        refuse()

    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> None:
        refuse()

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        refuse()

    async def forget(self, ino: int) -> None:
        """The kernel knows nothing of this inode any more."""

    # -- bytes -------------------------------------------------------------------------------------------------

    def opening(self, ino: int) -> AbstractContextManager[object]:
        """An open was asked for. What loses its last name within this stays until it was looked at."""
        return contextlib.nullcontext()

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        """A handle in the mount's `Opens`."""
        refuse()

    async def create(self, parent: int, name: bytes, flags: int, mode: int, caller: Caller) -> tuple[InodeRow, int]:
        """A new, empty file, open."""
        refuse()

    async def create_unnamed(self, parent: int, flags: int, mode: int, caller: Caller) -> tuple[InodeRow, int]:
        """O_TMPFILE."""
        refuse()

    async def sync_names(self, ino: int) -> None:
        """fsyncdir: what was done to names of the inode's tenant is on the disk when this returns."""

    async def sync_file(self, ino: int) -> None:
        """A file that the channel opened by itself is on the disk, and its records, when this returns."""
        refuse(errno.EBADF)

    async def take_opened(self, fh: int) -> None:
        """A handle that the channel gave by itself is one of ours from here on, if it told of such a one."""

    async def sync_all(self) -> None:
        """syncfs."""

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The kind's background; started when it can serve."""
        task_status.started()

    async def end(self) -> None:
        """The mount is gone: what was acknowledged is folded, what is closed is sealed as far as that is quick."""

    def way(self) -> Way | None:
        """How its files are served; None where the kernel has no part in it."""
        return None

    def stop_ahead(self) -> None:
        """The channel changes nothing by itself, until a change that came here went well."""

    def refuse_writes(self) -> int:
        """The volume is another machine's: who has a file open for writing gets an error; how many files."""
        return 0

    # -- what verbs ask for ------------------------------------------------------------------------------------

    takes_files = True
    """Whether a file may be made in its directories."""

    def is_stream(self, ino: int) -> bool:
        """Whether it is a directory that records are appended to: `seal` takes it, and the next."""
        return False

    async def truncate_stream(self, ino: int, before: int | None) -> Truncated:
        """Whole sealed segments before this offset go; None: what is not sealed goes."""
        refuse(errno.EOPNOTSUPP)

    async def deliver(self, ino: int, job: StagedJob) -> Delivered:
        """All records of a job are in a stream, once, however often it is asked for."""
        refuse(errno.EOPNOTSUPP)

    async def take_in(self, tenant_id: int, job: CheckedJob) -> DeliveryRow:
        """Publishes a job that came by the inbox, all of it or nothing, once; what it brought, now or before.
        RefusedError: why it cannot be."""
        refuse(errno.EOPNOTSUPP)

    def delivered(self, ino: int, job_id: bytes) -> Delivered | None:
        """What a job brought to a stream, if it did."""
        refuse(errno.EOPNOTSUPP)

    def is_open(self, ino: int) -> bool:
        return False

    def is_unsealed(self, ino: int) -> bool:
        """Whether it is open, or was written and is not sealed."""
        return False

    def is_kept_unsealed(self, ino: int) -> bool:
        """Whether a process that has it open keeps it from being sealed."""
        return False

    def open_inos(self) -> set[int]:
        return set()

    def open_count(self) -> int:
        return 0

    def writing(self) -> set[int]:
        """Inodes of files that are open for writing."""
        return set()

    def unsealed(self) -> Unsealed:
        return Unsealed()

    def unsealed_inos(self) -> set[int]:
        """Directories that hold what is in no file yet, until it is sealed: `seal` takes them."""
        return set()

    async def seal(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        """Seals what is closed and dirty now, of these or all; how many files. `begin`: their upload begins with it."""
        return 0

    def undelete(self, b: Batch, ino: int, parent: int, name: bytes) -> InodeRow:
        """Gives what was deleted a name again, with what belongs to it. On the catalog thread, in a batch."""
        return namespace.undelete(b, ino, parent, name)

    def undeleted(self, row: InodeRow) -> None:
        """That is committed."""

    def holding(self, ino: int) -> AbstractAsyncContextManager[None]:
        """One at a time for what changes a file's state."""
        return contextlib.nullcontext()

    async def drop_kernel_pages(self, ino: int) -> None:
        """The kernel gives up what it remembers of the file's bytes, by the next open at the latest."""

    # -- what the channel tells --------------------------------------------------------------------------------

    def refused(self, ino: int) -> None:
        """The kernel would not pass this file through after all: the channel serves it as a ranged one."""

    def used(self, inos: Sequence[int]) -> None:
        """These were opened without asking."""

    def changes_waiting(self) -> None:
        """The channel acknowledged something by itself."""

    def room_short(self, short: Short) -> None:
        """A tenant's passthrough writers come to the end of their room."""

    def touched(self, touched: Touched) -> None:
        """A passthrough write is held: it would go into blocks that are claimed."""

    def appended(self, state: AppendState) -> None:
        """The channel appended records to a stream: the first ones since it was given the segment, or since
        `Kernel.append_state`; or half of the room that it was given last is used. There is something to commit."""

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        """The part of a line that a handle of `_append` wrote last, which the channel kept: it is the kind's now. A
        WRITE or RELEASE of the handle follows; neither does where the mount went away under its writers."""
