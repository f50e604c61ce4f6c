"""One file that is open, or written and not sealed yet: its state, who has it open, what the channel was told of it.

    opened ──► CLEAN ─┬─ first writer, all of it here ──► DIRTY_WHOLE ◄── created
                 │    │                                    │       ▲
                 │    │               a chunk goes as part ▼       │ all blocks came in
                 │    └─ first writer, some elsewhere ──► DIRTY_PARTIAL
                 ▼
               GONE ◄── closed, from CLEAN; sealed, from both that are dirty; removed, from all
    (a DIRTY_WHOLE file that is sealed while processes read it is CLEAN from there on)

The lines are `TRANSITIONS`; a step that is not there raises. What a state means for `base` and `whole`:

    CLEAN          the catalog has everything; bytes come from `base`, whichever of them are here
    DIRTY_WHOLE    every block is in the backing file, and there is no `base`
    DIRTY_PARTIAL  blocks below `base_len` may be absent, and come from `base`
    GONE           the table knows it no more; there is no `base`, and no charge to change

Owner: the trio thread. A crash leaves nothing of this: the catalog's DIRTY rows and the backing files are enough.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.catalog.rows import stream_of as stream_of
from aof2.engine.files.atchannel import NOT_OPEN, AtChannel
from aof2.engine.files.ledger import Ledger
from aof2.engine.kinds.kernel import Kernel as Kernel
from aof2.engine.kinds.kernel import Mode as Mode
from aof2.engine.kinds.kernel import NodeFlags as NodeFlags
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.locks import Rank, TaskLock, task_lock
from aof2.engine.objects import ObjectGoneError


class State(enum.Enum):
    CLEAN = enum.auto()
    DIRTY_WHOLE = enum.auto()
    DIRTY_PARTIAL = enum.auto()
    GONE = enum.auto()


TRANSITIONS: Final[Mapping[State, Set[State]]] = {
    State.CLEAN: {State.DIRTY_WHOLE, State.DIRTY_PARTIAL, State.GONE},
    State.DIRTY_WHOLE: {State.DIRTY_PARTIAL, State.CLEAN, State.GONE},
    State.DIRTY_PARTIAL: {State.DIRTY_WHOLE, State.GONE},
    State.GONE: frozenset(),
}


class Stamp(NamedTuple):
    """A backing file at a moment: equal stamps, taken long enough apart, mean that no write came between."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result) -> Stamp:
        return cls(st.st_size, st.st_mtime_ns, st.st_ctime_ns)


class Running:
    """The hash of a file's first chunks, as they were when they were taken out as parts."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.chunks: list[bytes] = []


class Taken:
    """Chunks of a dirty file that go, or went, as parts."""

    __slots__ = ("clearing", "running", "unwritten", "wrote_s")

    def __init__(self) -> None:
        self.clearing: set[int] = set()  # chunks on their way out: the channel is not to answer for them
        self.unwritten: set[int] = set()  # those of them that were not written to since they were read
        self.wrote_s: dict[int, float] = {}  # chunk → when a write to it was last seen, by the trio clock
        self.running: Running | None = None  # once a chunk was read


class OpenFile:
    """A file that is open, or that was written and is not sealed yet. There may be tens of thousands of the latter, so
    what only few of them use is made when it is first asked for."""

    __slots__ = (
        "_charged_bytes", "_io", "_ledger", "_path", "_room", "_state", "_taken", "base", "base_len", "channel",
        "clean_stamp", "fd", "handles", "key", "mappable", "new_name", "noted_partial", "pending_bytes", "seal_attempt",
        "tenant", "told_stamp", "unlinked", "writers",
    )  # fmt: skip

    def __init__(self, key: Key, tenant: str, path: Path | str, state: State = State.DIRTY_WHOLE) -> None:
        self.key = key
        self.tenant = tenant
        self._path = str(path)
        self._state = state
        self._ledger: Ledger | None = None  # while it is known (`known.py`)
        self._charged_bytes = 0  # of quota, while it is dirty
        self._taken: Taken | None = None
        self._io: TaskLock | None = None
        self._room: TaskLock | None = None
        self.channel: AtChannel = NOT_OPEN
        self.handles = 0
        self.writers = 0
        self.mappable = True  # a descriptor that can read and write was open since it was clean, as far as is known
        self.base: ObjectHandle | None = None  # where blocks that are not here come from
        self.base_len = 0  # up to where the base counts; beyond it everything is here
        self.noted_partial = False  # the catalog knows it as a dirty file that lacks blocks
        self.clean_stamp: Stamp | None = None  # the file as the first writer found it
        self.told_stamp: Stamp | None = None  # what the kernel was last told
        self.pending_bytes = 0  # admitted, and being written by us
        self.fd = -1
        self.seal_attempt = 0  # a write-open in between makes a seal under way void
        self.new_name = False  # the backing file's name may not be durable yet
        self.unlinked = False

    # -- its state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    def become(self, state: State, base: ObjectHandle | None = None, base_len: int = 0) -> None:
        """A step of `TRANSITIONS`, with where its absent blocks come from then."""
        if state not in TRANSITIONS[self._state]:
            raise ValueError(f"inode {self.ino} cannot be {state.name} after {self._state.name}")
        ledger = self._ledger
        self.counted_by(None)
        self._state = state
        self.base, self.base_len = base, base_len
        self.counted_by(ledger)

    @property
    def dirty(self) -> bool:
        state = self._state  # asked so often that a set of two, which hashes by name, is felt
        return state is State.DIRTY_WHOLE or state is State.DIRTY_PARTIAL

    @property
    def partial(self) -> bool:
        """Whether it is dirty and blocks of it may be absent."""
        return self._state is State.DIRTY_PARTIAL

    @property
    def whole(self) -> bool:
        """Whether it is dirty and every block is in the backing file."""
        return self._state is State.DIRTY_WHOLE

    @property
    def sealable(self) -> bool:
        """Whether no process can change it. While some read it, no lease tells whether a writable mapping outlived its
        descriptor: the channel's own refuses it. Then none can have been made, or the last close is waited for."""
        return (
            self.dirty and not self.writers and not (self.handles and (self.mappable or self.partial or self.unlinked))
        )

    # -- made when used ----------------------------------------------------------------------------------------

    @property
    def taken(self) -> Taken:
        if self._taken is None:
            self._taken = Taken()
        return self._taken

    @property
    def clearing(self) -> Set[int]:
        """Chunks on their way out."""
        return self._taken.clearing if self._taken is not None else frozenset()

    @property
    def running(self) -> Running:
        """To look at, from any thread."""
        return (self._taken.running if self._taken is not None else None) or Running()

    def closed(self) -> AtChannel:
        """No handle is left; what the channel was told of it until now."""
        channel, self.channel = self.channel, NOT_OPEN
        if self._taken is not None and not self._taken.clearing and self._taken.running is None:
            self._taken = None  # when what was written is of no use for a closed file
        return channel

    @property
    def io(self) -> TaskLock:
        """Held where blocks of a partly fetched, dirty file change or come in."""
        if self._io is None:
            self._io = task_lock(Rank.FILE_IO)
        return self._io

    @property
    def room(self) -> TaskLock:
        """Held by who asks for room for it: in turn."""
        if self._room is None:
            self._room = task_lock(Rank.FILE_ROOM)
        return self._room

    # -- what it takes -----------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return Path(self._path)

    @path.setter
    def path(self, path: Path) -> None:
        self._path = str(path)

    @property
    def path_text(self) -> str:
        """The same for what is done with every small file: to make a Path takes longer than to open it."""
        return self._path

    @property
    def charged_bytes(self) -> int:
        return self._charged_bytes

    @charged_bytes.setter
    def charged_bytes(self, size: int) -> None:
        if self._ledger is not None and self.dirty:
            self._ledger.change(self.tenant, size - self._charged_bytes)
        self._charged_bytes = size

    def counted_by(self, ledger: Ledger | None) -> None:
        """Dirty, it is one of that ledger's files from here on; None: of none."""
        if self.dirty and self._ledger is not None:
            self._ledger.remove(self.tenant, self._charged_bytes)
        self._ledger = ledger
        if self.dirty and ledger is not None:
            ledger.add(self.tenant, self._charged_bytes)

    @property
    def ino(self) -> int:
        return self.key[1]

    @property
    def source(self) -> ObjectHandle:
        """Where the bytes of a file that is clean, or only partly here, come from."""
        if self.base is None:
            raise ObjectGoneError(f"object {self.ino}.{self.key[2]} has no source")
        return self.base

    def stat(self) -> os.stat_result:
        return os.stat(self.fd) if self.fd >= 0 else os.stat(self._path)

    def open_fd(self) -> int:
        """Our own descriptor on the backing file, for ranged requests; closed before any lease is asked for."""
        if self.fd < 0:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self.fd

    @contextlib.contextmanager
    def keeping_times(self) -> Iterator[None]:
        """What happens inside is no write. (While a writer has it open, the times move anyway.)"""
        before = self.stat()
        try:
            yield
        finally:
            if not self.writers and self.stat().st_mtime_ns != before.st_mtime_ns:
                os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def open_base(self) -> None:
        """Fetched blocks of a dirty file land in its own backing file."""
        if self.dirty and self.base is not None and self.base.fd < 0:
            self.base.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def absent_mask(self, index: int, per_chunk: int, block_bytes: int) -> int:
        """The blocks of a chunk that must be fetched before they can be read."""
        base = self.base
        if base is None or index >= len(base.masks):
            return 0
        stop = min(-(-self.base_len // block_bytes), base.block_count) - index * per_chunk
        return ~(base.masks[index] & base.trusted[index]) & (1 << max(0, min(stop, per_chunk))) - 1

    def absent_blocks(self, first: int, stop: int, block_bytes: int) -> Iterator[int]:
        """Those of first … stop − 1 that must be fetched; what lacks nothing is passed over chunk by chunk."""
        if self.base is None:
            return
        per_chunk = self.base.blocks_per_chunk
        for index in range(first // per_chunk, -(-stop // per_chunk)):
            absent = self.absent_mask(index, per_chunk, block_bytes)
            while absent:
                block = index * per_chunk + (absent & -absent).bit_length() - 1
                if first <= block < stop:
                    yield block
                absent &= absent - 1

    def is_absent(self, block: int, block_bytes: int) -> bool:
        """Whether the block must be fetched before it can be read."""
        if self.base is None or block * block_bytes >= self.base_len:
            return False
        return block < self.base.block_count and not self.base.is_ready(block)


def wants_write(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
