"""One tenant's intent log while it is mounted: the channel and the daemon append, the catalog thread folds.

The catalog thread takes what was appended into the rows before it makes any other change of the stream
(`catalog/writer.py`, `Unfolded`): no caller's change can meet an old tree.

Invariants
- A record is in the file (the page cache: it survives both processes) before its caller is answered.
- Records are folded in the order they stand, each once: how far the rows are is in the commit that folds (`fold.py`).
- What a commit that failed had folded is folded again by the next.

Owner: `append` on the trio thread, `steps` on the catalog thread; `SharedPage` is what they and the channel share. A
crash leaves the file, which recovery folds (`recover.py`).
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.intents import fold
from aof2.engine.intents.format import Intent, parse
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from aof2.native.sharedpage import SharedPage

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

FOLDER: Final = "intents"
HELD_BYTES: Final = 1 << 20  # on the disk ahead of the end: a full disk keeps no close from being recorded
PUNCH_BYTES: Final = 16 << 20  # of what is folded, before it is given back to the disk
_END: Final = attrgetter("end")


class Folded(NamedTuple):
    """Intents that are in the rows, with the inode of each as it was then; None: nothing was done."""

    log: IntentLog
    intents: Sequence[Intent]
    rows: Sequence[InodeRow | None]


def log_name(stream_id: int, number: int) -> str:
    return f"{stream_id}-{number}.log"


class IntentLog:
    """An `Unfolded` of its stream."""

    def __init__(
        self,
        volume: Volume,
        stream_id: int,
        slot: int,
        page: SharedPage,
        *,
        stays: fold.Stays,
        on_folded: Callable[[Folded], None],
    ) -> None:
        self.stream_id = stream_id
        self.slot = slot
        self.fd = -1
        self.number = 0
        self.held_to = 0
        self.adopted_to = 0  # the trio thread knows of what is folded so far
        self._punched_to = 0
        self._volume = volume
        self._page = page
        self._stays = stays  # both on the catalog thread: inside the batch,
        self._on_folded = on_folded  # and after the commit
        self._read_to = 0
        self._pending: list[Intent] = []  # read, and not known to be committed

    @property
    def path(self) -> Path:
        return self._volume.state_dir / FOLDER / log_name(self.stream_id, self.number)

    @property
    def end(self) -> int:
        return self._page.end(self.slot)

    async def open(self) -> None:
        """The next number's, from the start; the catalog knows that it is this one's turn."""
        volume = self._volume
        with volume.catalog.view() as view:
            position = view.get(self.stream_id, t.COUNTERS, fold.POSITION) or 0
        self.number = (position >> fold.POSITION_SHIFT) + 1
        await result_of(volume.writer.submit(self.stream_id, partial(fold.begin, number=self.number)))
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.fd = volume.env.essential(lambda: os.open(self.path, flags, 0o600))
        self.hold_ahead()
        volume.writer.take_first(self.stream_id, self)

    def close(self, *, keep: bool) -> None:
        self._volume.writer.take_first(self.stream_id, None)
        os.close(self.fd)
        self.fd = -1
        if not keep:
            self.path.unlink(missing_ok=True)

    def append(self, record: bytes) -> int:
        """Where it ends. OSError: it is not in the log."""
        return self._page.append(self.slot, self.fd, record)

    def hold_ahead(self) -> None:
        """The next bytes are on the disk. Without them an append may fail, and the change goes the usual way."""
        if self.held_to - self.end < HELD_BYTES // 2:
            end = self.end
            with contextlib.suppress(OSError):
                self._volume.env.files.allocate_ahead(self.fd, end, HELD_BYTES)
                self.held_to = end + HELD_BYTES

    async def give_back(self) -> None:
        """What is folded, and durable in the manifest log, takes no room here."""
        if self.adopted_to - self._punched_to < PUNCH_BYTES:
            return
        stop = self.adopted_to // PUNCH_BYTES * PUNCH_BYTES
        await result_of(self._volume.writer.flushed())
        with contextlib.suppress(OSError):
            fallocate(self.fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, self._punched_to, stop - self._punched_to)
        self._punched_to = stop

    # -- the catalog thread ------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Callable[[Batch], object]]:
        """What was appended by now, a batch each."""
        if self._page.end(self.slot) != self._read_to:
            self._read()
        for _ in list(fold.groups(self._pending)):  # commits between them shorten it
            yield self._fold_some

    def _read(self) -> None:
        end = self._page.take(self.slot)
        self._pending += parse(os.pread(self.fd, end - self._read_to, self._read_to), self._read_to)
        self._read_to = end

    def _fold_some(self, b: Batch) -> None:
        position = b.get(t.COUNTERS, fold.POSITION) or 0
        first = bisect_right(self._pending, fold.offset_in(position, self.number) or 0, key=_END)
        some = next(fold.groups(self._pending[first : first + fold.STEP]), [])
        chunk_bytes = self._volume.settings.engine.chunk_bytes
        rows = fold.fold(b, some, number=self.number, chunk_bytes=chunk_bytes, stays=self._stays)
        b.after_commit.append(partial(self._folded, some, rows))

    def _folded(self, intents: Sequence[Intent], rows: Sequence[InodeRow | None]) -> None:
        if intents:
            del self._pending[: bisect_right(self._pending, intents[-1].end, key=_END)]
            self._on_folded(Folded(self, intents, rows))
