"""The way to the kernel, as far as kinds need it: the channel, or in tests something that remembers.

Invariant: what is told about a node or handle before a reply goes out has effect before that reply.

Owner: the trio thread. What the numbers mean on the wire is in `native/channel/PROTOCOL.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

PARTIAL_BYTES_MAX: Final = 60_000
"""The longest part of a line that the channel keeps for a handle. Spoken to the channel: never more."""


class KernelGoneError(Exception):
    """The mount is gone, or its channel is: no request can be answered any more."""


class NestAction(IntEnum):
    """What the channel is to do with a directory. Spoken to the channel: never renumber."""

    OPEN = 1
    SERVE = 2
    END = 3
    END_ALL = 4


class Mode(IntEnum):
    """How the opens of an inode are served. Spoken to the channel: never renumber."""

    PASSTHROUGH = 1
    RANGED = 2


class NodeFlags(IntEnum):
    """Spoken to the channel: never renumber."""

    NONE = 0
    ALL_PRESENT = 1
    """Every block is in the backing file."""
    SUID = 2
    """A write by another user comes here, where suid, sgid and capabilities are cleared."""
    STILL = 4
    """No writer changes or cuts it until `Kernel.clear` was awaited: the channel may answer from a mapping."""


class Framing(IntEnum):
    """What one record of a stream is: a line with its newline, or what one write brought. Spoken to the channel: never
    renumber."""

    LINE = 1
    RECORD = 2


class AppendState(NamedTuple):
    """How far a stream's active segment is: every byte before `end` is a whole record that was acknowledged."""

    nodeid: int
    """Of the stream's `_append`."""
    segment_id: int
    end: int
    """File offset after the last record; 0: not even the header is written."""
    next_logical: int
    record_count: int
    crc64: int
    """Of [0, end)."""
    last_ts_ms: int


@dataclass(frozen=True, slots=True)
class Written:
    """What the channel wrote by itself since it was last asked."""

    bytes_written: int = 0
    budget_left: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    """(first block, count), ascending."""
    untracked: bool = False
    """Something was written that no range tells: the node has no block size."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What a tenant's passthrough writers took, and left, of the room they were given."""

    left_bytes: int
    waiting: int
    files: tuple[tuple[int, int], ...]
    """(inode, bytes on the disk), of those that changed since the last time."""


@dataclass(frozen=True, slots=True)
class Short:
    """A tenant's passthrough writers come to the end of their room, or `waiting` of them are held there."""

    stream_id: int
    left_bytes: int
    need_bytes: int
    """Of the first that is held."""
    ino: int
    offset: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Touched:
    """A passthrough write that is held: it would go into blocks that are claimed."""

    number: int
    ino: int
    offset: int
    length: int


class Kernel(Protocol):
    """The way to the kernel, as far as files need it: the channel, or in tests something that remembers."""

    def node(self, nodeid: int, fd: int, *, mode: int, flags: int, block_bytes: int, block_count: int) -> None:
        """The backing file of an inode; another one when it had one. The descriptor stays the caller's."""

    def handle(self, nodeid: int, fh: int, cookie: bytes) -> None:
        """The OPEN or CREATE reply that carries `fh` is about to be sent: it becomes what the node's mode says."""

    def blocks(self, nodeid: int, first: int, count: int) -> None:
        """These blocks are in the backing file: the channel answers for them."""

    def coming(self, nodeid: int, first: int, count: int) -> None:
        """These blocks are being fetched: a read of them may wait for `blocks` a little before it is passed on."""

    async def clear(self, nodeid: int, first: int, count: int) -> None:
        """These are no longer to be relied on; returns when no READ or WRITE begun before is in progress."""

    def grant(self, nodeid: int, budget_bytes: int) -> None:
        """So much more may be written without asking."""

    async def collect(self, nodeid: int) -> Written:
        """What was written without asking since the last time."""

    def watch(self, nodeid: int, *, append: bool) -> None:
        """A passthrough node is about to be opened for writing. Only where there is a brake, as the next eight."""

    def room(self, stream_id: int, more_bytes: int) -> None:
        """A tenant's passthrough writers may take so much more, or less."""

    async def grown(self, stream_id: int, *, take: bool = False) -> Grown:
        """What they took, and left; with `take`, what is left is ours again."""

    def expect(self, nodeid: int, more_bytes: int) -> None:
        """We ourselves are about to add so much to a file that is passed through: no writer of it took that."""

    def deny(self, stream_id: int, code: int) -> None:
        """Those of the tenant that are held for want of room fail with this errno."""

    def stop_silent(self, stream_id: int) -> None:
        """What of the tenant grows and can neither be held nor asked (a mapping) is stopped: there is no room."""

    async def claim(self, nodeid: int, first: int, count: int) -> bool:
        """From here on each write into these blocks of a passthrough file is `touched` first. False, and nothing
        changed: a write of the file may be on its way."""

    def unclaim(self, nodeid: int, first: int, count: int) -> None:
        """These blocks may be written to again."""

    def pass_on(self, number: int, code: int = 0) -> None:
        """A write that touched claimed blocks goes on, or fails with this errno."""

    def drop(self, nodeid: int) -> None:
        """Its last handle is closed: the channel lets go of its backing file."""

    async def caught_up(self) -> None:
        """Returns when all that was told before has had effect: after `drop`, the channel's descriptor is closed, and a
        lease can be asked for. So are all of them when the channel is gone."""

    def caps(self, nodeid: int, on: bool) -> None:
        """Whether the inode has file capabilities: without any, the channel answers for all."""

    def killed(self, nodeid: int) -> bool:
        """Whether a write that must clear suid, sgid and capabilities (flag SUID) was forwarded; tells it once."""

    def told_opens(self, nodeid: int) -> list[tuple[int, int]]:
        """Handles of the inode, and their flags, that the channel gave by itself and told of: each once. They are ours
        from here on, and so is its node, which is passed through."""

    def told_open_of(self, fh: int) -> int:
        """The inode of such a handle that was not taken yet; 0: there is none."""

    def hand_over(self, fh: int, offset: int, data: bytes) -> int:
        """The answer of a READ that is too long for the FUSE socket. Returns the errno to answer that READ with, which
        has to be done before anything is awaited: the channel puts the bytes in its place."""

    def invalidate_attr(self, nodeid: int) -> None:
        """The kernel forgets attributes alone."""

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        """The kernel forgets attributes and cached bytes of the range (0: to the end)."""

    def invalidate_entry(self, parent: int, name: bytes, child: int = 0) -> None:
        """The kernel forgets a name, also that it is not there; with `child`, that it is gone."""

    # -- streams that the channel appends to by itself -----------------------------------------------------------

    def append_give(
        self,
        state: AppendState,
        fd: int,
        *,
        stream_ino: int,
        base_record_count: int,
        room_end: int,
        ext_id: int,
        max_size: int,
        framing: Framing,
        record_max: int,
    ) -> None:
        """The active segment is the channel's from here on, until `append_take`. `fd`: the file, for reading and
        writing, without O_APPEND; it stays the caller's. `stream_ino`, `base_record_count`, `ext_id` and `max_size` are
        the header's. Nothing is written at or behind `room_end`, of which the last 96 bytes are kept for the footer;
        what of the file lies behind `end` must be zeros, and so it stays."""

    def append_room(self, nodeid: int, room_end: int) -> None:
        """The segment may grow up to here: further than it could before."""

    async def append_take(self, nodeid: int) -> AppendState | None:
        """The segment is ours again: no write to it is on its way, the channel's descriptor is closed. All that was
        told before, `Kind.partial` among it, was heard when this returns. None: it was not the channel's."""

    async def append_state(self, nodeid: int) -> AppendState | None:
        """How far the channel is; from here on it tells of the next record (`Kind.appended`). None: the segment is not
        the channel's."""

    def append_handle(self, nodeid: int, fh: int, *, ext_id: int = 0, forwards: bool = False) -> None:
        """An open of `_append`, before its reply is sent; again when something about it changes. Its records get
        `ext_id`. With `forwards` all its writes come here, as for a line that is too long to be kept there."""

    def append_partial(self, nodeid: int, fh: int, data: bytes) -> None:
        """The part of a line that a handle wrote last, at most PARTIAL_BYTES_MAX: the channel's from here on, instead
        of what it has. b"": there is none."""

    def hear(self) -> None:
        """Takes what the channel has told so far. Called first where a WRITE or RELEASE of an `_append` is answered:
        the handle's part of a line (`Kind.partial`) was told before it."""

    # -- what can be had ---------------------------------------------------------------------------------------

    @property
    def passthrough_offered(self) -> bool:
        """Whether the mount may pass files through: known once `initialised`."""

    async def initialised(self) -> None:
        """The kernel has said what it can."""

    async def probe(self, fd: int) -> int:
        """0, or the errno with which the kernel refuses to pass this file through."""

    async def brake(self, fd: int, block_bytes: int) -> int:
        """From here on passthrough writers need room (`room`); 0, or the errno where this kernel, this filesystem (of
        the file `fd`) or our privileges do not allow to hold them."""

    # -- files that the channel creates by itself --------------------------------------------------------------

    def birth_page(self, fd: int) -> None:
        """The page that both sides see (`births.h`)."""

    def birth_dir(self, stream_id: int, slot: int, fd: int) -> None:
        """Where backing files of a tenant are made."""

    def birth_log(self, stream_id: int, fd: int) -> None:
        """A tenant's intent log, where births are recorded."""

    def birth_inos(self, stream_id: int, first: int, count: int, *, bears: bool = True) -> None:
        """Inode numbers for what comes; those left of the last ones are forgotten. A count of 0: names are changed here
        alone. Not `bears`: files are made here alone, and with a count of 0 the numbers stay."""

    async def nest(self, ino: int, action: NestAction, gid: int | None = None) -> bool:
        """Changes what the channel does in a directory; False when it has no room. OPEN returns when every name that
        was on its way is in the catalog: from then on the channel notes names itself."""

    def names(self, ino: int, packed: bytes) -> None:
        """Names of a directory: a length byte and the name, each."""
