"""One open or unsealed file: which backing file it is, who has it open, in which mode the kernel has it.

Modes. All opens of an inode are in one mode at a time, decided at the first open and held to until the last close:
- PASSTHROUGH: the kernel reads and writes the backing file itself. Only for files that are here whole, and for writers
  of files that no descriptor can read meanwhile, whose finished chunks may go (`brake.py`).
- RANGED: reads and writes are requests. The channel answers those whose blocks it knows to be in the backing file,
  the rest comes to `Files`.

Owner: the trio thread. A crash leaves nothing of this: the catalog's DIRTY rows and the backing files are enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.catalog.rows import stream_of as stream_of
from aof2.engine.files.ledger import Ledger
from aof2.engine.kinds.kernel import Kernel as Kernel
from aof2.engine.kinds.kernel import Mode as Mode
from aof2.engine.kinds.kernel import NodeFlags as NodeFlags
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.objects import ObjectGoneError


class Stamp(NamedTuple):
    """A backing file at a moment: equal stamps, taken long enough apart, mean that nobody wrote."""

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


class OpenFile:
    """A file that is open, or that was written and is not sealed yet. There may be tens of thousands of the latter, so
    what only few of them use is made when it is first asked for (`_made_when_used`)."""

    written: set[int]  # blocks of the base that were overwritten
    wrote: dict[int, float]  # chunk → when it was last seen written, by the trio clock
    clearing: set[int]  # chunks that the channel is not to answer for: they are being taken as parts
    taking: set[int]  # those of them that nobody has written to since they were read
    running: Running
    io: trio.Lock  # held where blocks of a partly fetched, dirty file change or come in
    room: trio.Lock  # held by who asks for room for it: in turn
    closing: trio.Event  # its last handle was closed; made anew by who waits for that

    __slots__ = (
        "_charged_bytes", "_ledger", "_path", "_state", "appends", "base", "base_len", "budget", "clean_ns",
        "clean_stamp", "clearing", "closing", "doubted", "fd", "frozen", "granted_bytes", "handles", "io", "key",
        "masked", "mode", "new_name", "noted_partial", "pending_bytes", "registered", "room", "running",
        "seal_attempt", "special", "taking", "tenant", "told", "told_stamp", "unlinked", "whole", "window_bytes",
        "write_only", "writers", "written", "wrote",
    )  # fmt: skip

    def __init__(self, key: Key, tenant: str, path: Path, state: ObjectState) -> None:
        self.key = key
        self.tenant = tenant
        self._path = str(path)
        self._state = state
        self._ledger: Ledger | None = None  # while it is known (`known.py`)
        self.mode: Mode | None = None
        self.handles = 0
        self.writers = 0
        self.base: ObjectHandle | None = None  # where blocks that are not here come from
        self.base_len = 0  # up to where the base counts; beyond it everything is here
        self.whole = True  # every block is in the backing file
        self.noted_partial = False  # the catalog knows it as a dirty file that lacks blocks
        self.clean_stamp: Stamp | None = None  # the file as the first writer found it
        self.clean_ns = 0  # and when
        self.registered = False
        self.masked = False  # registered block by block: the channel can be told that one is not to be relied on
        self.told = 0  # up to which block the channel knows what is here
        self.budget = 0  # what the channel may still write without asking, as far as is known
        self.granted_bytes = 0  # all it was ever allowed
        self.pending_bytes = 0  # admitted, and being written by us
        self.window_bytes = 0  # the last grant: the next is larger
        self._charged_bytes = 0  # of quota, while it is dirty
        self.doubted = False  # a block of it turned out bad: what the kernel was given may be, until all close it
        self.fd = -1
        self.seal_attempt = 0  # a write-open in between makes a seal under way void
        self.new_name = False  # the backing file's name may not be durable yet
        self.appends = False  # a descriptor of it was opened with O_APPEND
        self.write_only = False  # no descriptor of it was ever open that could map it: parts can go from under a writer
        self.frozen = False  # writers are stopped: the disk has no room
        self.unlinked = False
        self.told_stamp: Stamp | None = None  # what the kernel was last told
        self.special = False  # suid, sgid or capabilities: a write by another user takes them away

    def __getattr__(self, name: str) -> object:
        """Only for slots that are still empty."""
        make = _made_when_used.get(name)
        if make is None:
            raise AttributeError(name)
        value = make()
        setattr(self, name, value)
        return value

    @property
    def path(self) -> Path:
        return Path(self._path)

    @path.setter
    def path(self, path: Path) -> None:
        self._path = str(path)

    @property
    def state(self) -> ObjectState:
        return self._state

    @state.setter
    def state(self, state: ObjectState) -> None:
        ledger = self._ledger
        self.counted_by(None)
        self._state = state
        self.counted_by(ledger)

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
    def dirty(self) -> bool:
        return self.state == ObjectState.DIRTY

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
        """What happens inside is nobody's write. (While somebody writes, the times move anyway.)"""
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
        if self.whole or base is None or index >= len(base.masks):
            return 0
        stop = min(-(-self.base_len // block_bytes), base.block_count) - index * per_chunk
        return ~(base.masks[index] & base.trusted[index]) & (1 << max(0, min(stop, per_chunk))) - 1

    def absent_blocks(self, first: int, stop: int, block_bytes: int) -> Iterator[int]:
        """Those of first … stop − 1 that must be fetched; what lacks nothing is passed over chunk by chunk."""
        if self.whole or self.base is None:
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
        if self.whole or self.base is None or block * block_bytes >= self.base_len:
            return False
        return block < self.base.block_count and not self.base.is_ready(block)


_made_when_used: Final[dict[str, Callable[[], object]]] = {
    "written": set, "wrote": dict, "clearing": set, "taking": set, "running": Running,
    "io": trio.Lock, "room": trio.Lock, "closing": trio.Event,
}  # fmt: skip


def wants_write(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
