"""Objects in use: their rows in memory, their backing file open, which of their blocks may be read from it.

A block may be read when it is resident and trusted. It is trusted when the backing file is the one (inode, size,
mtime) that was recorded when its bytes were last known to be right, when this process wrote it, or after its crc64 was
checked.

Invariants
- `masks` is what can be read now; `added` is the part of it that the catalog does not know yet (its bytes may not be
  synced). Losing `added` in a crash means fetching again, nothing else.
- A handle with users is not evicted. A handle is forgotten only when it has no users and nothing is added.
- A writer that takes an object over goes on with its handle (`Use`): after a crash what is in its file counts as
  written, so nothing may be put there that is not known to be right, and nothing of it is recorded as the object's.
- A descriptor of a backing file lives as long as its handle is in the table or has users: one that outlived both would
  refuse every lease on the file, and so keep it from being sealed or evicted for ever.

Owner: the trio thread. Blocking file work happens on worker threads through the functions of `hot`.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Final

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.local.hot import HotCache, Identity
from aof2.engine.objects import ObjectGoneError, full_mask, mask_bytes
from aof2.engine.runs import runs_of_masks

Key = tuple[int, int, int]  # stream id, inode, generation
SHRINK_LOOKS: Final = 8


class Use(enum.Enum):
    """Whose a handle is."""

    SHARED = enum.auto()  # the table's: of all who open the object
    CLAIMED = enum.auto()  # the same, and a writer is about to take it over
    WRITTEN = enum.auto()  # the base of a dirty file, out of the table
    FORGOTTEN = enum.auto()  # out of the table: the next user starts from the catalog


TRANSITIONS: Final[Mapping[Use, Set[Use]]] = {
    Use.SHARED: {Use.CLAIMED, Use.WRITTEN, Use.FORGOTTEN},
    Use.CLAIMED: {Use.SHARED, Use.WRITTEN, Use.FORGOTTEN},
    Use.WRITTEN: frozenset(),
    Use.FORGOTTEN: frozenset(),
}


class ReadAhead:
    """Where readers of an object are."""

    __slots__ = ("frontier", "next_offset", "run_start", "window_blocks")

    def __init__(self) -> None:
        self.next_offset = 0  # where a sequential reader would go on
        self.run_start = 0  # … and where it began
        self.window_blocks = 1
        self.frontier = 0  # the first block that was not asked for yet


class Glances:
    """A few bytes here and there that were wanted of an object, not long ago."""

    __slots__ = ("blocks", "said", "since_s")

    def __init__(self, since_s: float) -> None:
        self.blocks: Counter[int] = Counter()  # how often some of a block were
        self.said: set[tuple[int, int]] = set()  # of which the log says that they were fetched
        self.since_s = since_s


class ObjectHandle:
    """One generation of one object."""

    def __init__(
        self,
        key: Key,
        tenant: str,
        path: Path,
        row: ObjectRow,
        chunks: list[ChunkRow],
        masks: list[int],
        block_bytes: int,
        use: Use = Use.SHARED,
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.path = path
        self.row = row
        self.chunks = chunks
        self.block_bytes = block_bytes
        self.blocks_per_chunk = row.chunk_bytes // block_bytes
        # What is a hole by its rows: zeros, as soon as there is a file. A chunk without a row is one all over.
        self.holes = [c.holes if c.chunk_id else full_mask(c.length, block_bytes) for c in chunks]
        self.has_holes = any(self.holes)
        self.masks = [mask | hole for mask, hole in zip(masks, self.holes, strict=True)]
        self.trusted = list(self.holes)
        self.added: dict[int, int] = {}  # chunk index → bits the catalog does not know yet
        self.added_since_s = 0.0
        self.fd = -1
        self.made_in: HotCache | None = None  # its backing file was made for it, with nothing in it yet
        self.use = use
        self.users = 0
        self.filling = 0  # how many want all of it here, and durable
        self.crowded = False  # what was last fetched of it found no room on the disk
        self.ahead = ReadAhead()
        self.glances = Glances(0.0)

    def become(self, use: Use) -> None:
        """A step of `TRANSITIONS`."""
        if use not in TRANSITIONS[self.use]:
            raise ValueError(f"the handle of object {self.key} cannot be {use.name} after {self.use.name}")
        self.use = use

    @property
    def written_to(self) -> bool:
        """Whether a writer has the file, or is about to."""
        return self.use in (Use.CLAIMED, Use.WRITTEN)

    @property
    def size(self) -> int:
        return self.row.size

    def locate(self, block: int) -> tuple[int, int]:
        """(chunk index, block in it) of a block of the object."""
        return divmod(block, self.blocks_per_chunk)

    def block_len(self, block: int) -> int:
        return min(self.block_bytes, self.size - block * self.block_bytes)

    @property
    def block_count(self) -> int:
        return -(-self.size // self.block_bytes)

    def is_ready(self, block: int) -> bool:
        chunk, bit = self.locate(block)
        return bool(self.masks[chunk] & self.trusted[chunk] & 1 << bit)

    def not_ready(self, first: int, last: int) -> list[int]:
        """Blocks of first..last (inclusive) that cannot simply be read."""
        if last - first < self.blocks_per_chunk:
            return [block for block in range(first, last + 1) if not self.is_ready(block)]
        # Of a long range, of which most may be holes, chunk by chunk.
        missing = (
            full_mask(c.length, self.block_bytes) & ~(m & ok)
            for c, (m, ok) in zip(self.chunks, self._masks(), strict=True)
        )
        runs = runs_of_masks(missing, self.blocks_per_chunk)
        return [b for at, n in runs for b in range(max(at, first), min(at + n, last + 1))]

    def ready_runs(self) -> Iterator[tuple[int, int]]:
        """(first, count) of the blocks that can simply be read, as few pairs as there can be."""
        start = stop = 0
        for first, count in runs_of_masks((mask & ok for mask, ok in self._masks()), self.blocks_per_chunk):
            if first != stop:
                if stop > start:
                    yield start, stop - start
                start = first
            stop = first + count
        if stop > start:
            yield start, stop - start

    def absent_runs(self) -> Iterator[tuple[int, int]]:
        """(first, count) of the blocks that are not here, chunk by chunk."""
        pairs = zip(self.chunks, self.masks, strict=True)
        return runs_of_masks(
            (full_mask(c.length, self.block_bytes) & ~mask for c, mask in pairs), self.blocks_per_chunk
        )

    def suspects(self) -> list[int]:
        """Blocks that are here and not trusted."""
        runs = runs_of_masks((mask & ~ok for mask, ok in self._masks()), self.blocks_per_chunk)
        return [block for first, count in runs for block in range(first, first + count)]

    def _masks(self) -> Iterator[tuple[int, int]]:
        return zip(self.masks, self.trusted, strict=True)

    def is_resident(self, block: int) -> bool:
        chunk, bit = self.locate(block)
        return bool(self.masks[chunk] >> bit & 1)

    def is_hole(self, block: int) -> bool:
        chunk, bit = self.locate(block)
        return bool(self.holes[chunk] >> bit & 1)

    def trust(self, block: int) -> None:
        chunk, bit = self.locate(block)
        self.trusted[chunk] |= 1 << bit

    def add(self, blocks: Iterable[int]) -> None:
        """This process just wrote these blocks, verified, into the file."""
        for block in blocks:
            self.take_over(block)
            chunk, bit = self.locate(block)
            self.added[chunk] = self.added.get(chunk, 0) | 1 << bit

    def take_over(self, block: int) -> None:
        """A writer wrote the block, whole: it is here, and none of the catalog's business."""
        chunk, bit = self.locate(block)
        self.masks[chunk] |= 1 << bit
        self.trusted[chunk] |= 1 << bit

    def take_over_from(self, first: int) -> None:
        """The same of every block from this one on."""
        for chunk in range(first // self.blocks_per_chunk, len(self.chunks)):
            low = max(0, first - chunk * self.blocks_per_chunk)
            count = min(self.blocks_per_chunk, self.block_count - chunk * self.blocks_per_chunk)
            bits = (1 << max(0, count)) - 1 & ~((1 << low) - 1)
            self.masks[chunk] |= bits
            self.trusted[chunk] |= bits

    def remove(self, block: int) -> None:
        chunk, bit = self.locate(block)
        keep = ~(1 << bit) | self.holes[chunk]
        self.masks[chunk] &= keep
        self.trusted[chunk] &= keep
        if chunk in self.added:
            self.added[chunk] &= keep

    def clear(self) -> None:
        """Everything local was given up."""
        self.masks = list(self.holes)
        self.trusted = list(self.holes)
        self.added = {}
        self.glances = Glances(0.0)

    def ensure_file(self, hot: HotCache) -> None:
        """The backing file, open; a new, sparse one where nothing of the object is here."""
        if self.fd >= 0:
            return
        if self.holds_data or self._is_left(hot):
            self.fd = hot.open(self.path)
        else:
            self.fd = hot.create(self.path, self.size)
            self.made_in = hot

    def _is_left(self, hot: HotCache) -> bool:
        """Whether the file of an object that is one hole is still the one that was sealed."""
        return self.has_holes and self.row.backing is not None and hot.identity_of(self.path) == self.row.backing

    def close_file(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove_hollow_file(self) -> None:
        """A backing file in which nothing ever landed goes: the catalog knows of no byte in it."""
        if self.made_in is not None and self.chunks and not self.holds_data and not self.written_to:
            self.made_in.unlink(self.path)
        self.made_in = None

    @property
    def resident_bytes(self) -> int:
        """What is here of its data."""
        rows = zip(self.masks, self.holes, self.chunks, strict=True)
        return sum(mask_bytes(m & ~hole, c.length, self.block_bytes) for m, hole, c in rows)

    @property
    def absent_bytes(self) -> int:
        """What would have to be fetched to have all of it here."""
        pairs = zip(self.masks, self.chunks, strict=True)
        absent = ((full_mask(c.length, self.block_bytes) & ~m, c.length) for m, c in pairs)
        return sum(mask_bytes(mask, length, self.block_bytes) for mask, length in absent)

    @property
    def holds_data(self) -> bool:
        """Whether any block is here that is not a hole."""
        if not self.has_holes:
            return any(self.masks)
        return any(mask & ~hole for mask, hole in zip(self.masks, self.holes, strict=True))

    @property
    def fully_resident(self) -> bool:
        pairs = zip(self.masks, self.chunks, strict=True)
        return all(m == full_mask(c.length, self.block_bytes) for m, c in pairs)

    def accept(self, identity: Identity) -> bool:
        """Whether the file is the one the catalog knows; if so everything resident may be read."""
        if self.row.backing is not None and tuple(identity) == tuple(self.row.backing):
            self.trusted = list(self.masks)
            return True
        return False


def load_handle(view: View, hot: HotCache, key: Key, tenant: str, block_bytes: int) -> ObjectHandle:
    """A handle from the rows; its file is not looked at yet."""
    stream_id, ino, generation = key
    row = view.get(stream_id, t.OBJECTS, (ino, generation))
    if row is None:
        raise ObjectGoneError(f"object {ino}.{generation} is gone")
    chunks: list[ChunkRow] = []
    masks: list[int] = []
    for index, chunk_id in enumerate(row.chunks):
        if not chunk_id:
            chunks.append(ChunkRow(0, ino, generation, index, row.length_of(index)))
            masks.append(0)
            continue
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        if chunk is None:
            raise ObjectGoneError(f"chunk {chunk_id} of object {ino}.{generation} is gone")
        chunks.append(chunk)
        masks.append((view.get(stream_id, t.RESIDENCY, chunk_id) or ResidencyRow()).mask)
    return ObjectHandle(key, tenant, hot.path(tenant, ino, generation), row, chunks, masks, block_bytes)


class HandleTable:
    """Handles by key. Unused ones are kept for a while: their masks and file are warm."""

    def __init__(self, idle_max: int = 1024) -> None:
        # Their bytes leave, or come, all at once: who wants one waits, then starts afresh.
        self.moving: dict[Key, trio.Event] = {}
        self._idle_max = idle_max
        self._table: dict[Key, ObjectHandle] = {}
        self._idle: OrderedDict[Key, ObjectHandle] = OrderedDict()  # those of them without users, longest unused first

    def peek(self, key: Key) -> ObjectHandle | None:
        """Without counting as a use."""
        return self._table.get(key)

    def put(self, handle: ObjectHandle) -> None:
        self._table[handle.key] = handle
        if not handle.users:
            self._idle[handle.key] = handle
            self._shrink()

    def use(self, handle: ObjectHandle) -> None:
        """One more user; `done` ends it."""
        handle.users += 1
        self._idle.pop(handle.key, None)

    def done(self, handle: ObjectHandle) -> None:
        """One user less. A handle that left the table meanwhile was kept open by its users alone."""
        handle.users -= 1
        if handle.users:
            return
        if handle.use in (Use.SHARED, Use.CLAIMED):
            self._idle[handle.key] = handle
            self._shrink()
        else:
            handle.close_file()

    @contextlib.contextmanager
    def using(self, handle: ObjectHandle) -> Iterator[None]:
        self.use(handle)
        try:
            yield
        finally:
            self.done(handle)

    def forget(self, key: Key) -> None:
        """The object is gone or its local bytes are: closes its file; the next user starts from the catalog."""
        handle = self._take_out(key)
        if handle is not None:
            handle.close_file()
            handle.remove_hollow_file()
            handle.become(Use.FORGOTTEN)

    def detach(self, key: Key) -> ObjectHandle | None:
        """Out of the table, its file still open: the writer goes on with it under another name."""
        handle = self._take_out(key)
        if handle is not None:
            handle.become(Use.WRITTEN)
        return handle

    def _take_out(self, key: Key) -> ObjectHandle | None:
        self._idle.pop(key, None)
        return self._table.pop(key, None)

    def close_all(self) -> None:
        for key in list(self._table):
            self.forget(key)

    def dirty(self) -> list[ObjectHandle]:
        return [h for h in self._table.values() if h.added]

    def __contains__(self, key: Key) -> bool:
        return key in self._table

    def __len__(self) -> int:
        return len(self._table)

    def _shrink(self) -> None:
        """A few at a time: what cannot go yet is not looked at again and again."""
        for _ in range(SHRINK_LOOKS):
            if len(self._idle) <= self._idle_max:
                return
            key, handle = next(iter(self._idle.items()))
            if handle.added:
                self._idle.move_to_end(key)
            else:
                self.forget(key)
