"""The background scrub: every local block read and checked once in `scrub_every`, slowly, going on where it stopped.

A pass goes round the residency rows in order, tenant by tenant. A block that fails is looked at again with fresh rows
(it may have been evicted or rewritten meanwhile); if it still fails and the remote has it, it is given up and fetched
again. A block that exists only here is reported and left: it may be half readable.

Invariants
- Never more than `bytes_per_s` on average since the pass began; one chunk is read at a time, on a worker thread.
- Where it is lies in the volume stream's counters: written once a gigabyte and at the end of a pass, never while idle.
- A volume that is restarted goes on with the pass it was in; a finished pass is not repeated before its time.

Owner: the task that runs `run`; rows through short views. A crash repeats at most a gigabyte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.fds import opened
from aof2.engine.inspect.rows import VOLUME_STREAM
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.tiering.hydrate import Hydrator
from aof2.engine.verify.blocks import check_chunk

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 32 << 20
REMEMBER_BYTES: Final = 1 << 30
PAGE_ROWS: Final = 64

# In the volume stream's counters. The place is behind the chunk named; no stream: no pass is under way.
PLACE_STREAM: Final = "scrub_stream"
PLACE_CHUNK: Final = "scrub_chunk"
DONE_MS: Final = "scrub_done_ms"


class _Place(NamedTuple):
    stream_id: int
    chunk_id: int


class _Resident(NamedTuple):
    stream_id: int
    chunk: ChunkRow
    mask: int
    row: ObjectRow


@dataclass(eq=False)
class Scrubber:
    """Re-checks local copies. `opened` is an object in use, on the trio thread."""

    env: Env
    hydrator: Hydrator
    tenants: Callable[[], dict[int, str]]
    opened: Callable[[Key], AbstractAsyncContextManager[ObjectHandle]]
    every_s: float | None
    bytes_per_s: int = BYTES_PER_S
    checked_bytes: int = 0
    damaged_blocks: int = 0
    passes: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Passes for ever, each when it is due. Without `scrub_every` it ends at once."""
        task_status.started()
        if self.every_s is None:
            return
        while True:
            place, wait_s = self._due()
            if place is None and wait_s > 0:
                await trio.sleep(wait_s)
                continue
            await self.scrub(place)

    def _due(self) -> tuple[_Place | None, float]:
        """Where to go on, or how long until the next pass starts."""
        with self.hydrator.catalog.view() as view:
            stream_id = view.get(VOLUME_STREAM, t.COUNTERS, PLACE_STREAM) or 0
            chunk_id = view.get(VOLUME_STREAM, t.COUNTERS, PLACE_CHUNK) or 0
            done_ms = view.get(VOLUME_STREAM, t.COUNTERS, DONE_MS)
            if done_ms is None:  # never: the first pass is due that long after the volume was made
                made = [row.created_ms for _, row in view.scan(VOLUME_STREAM, t.TENANTS)]
                done_ms = min(made, default=self.env.now_ms())
        every_s = self.every_s or 0.0
        # A clock that was set back must not put the next pass off for longer than the period.
        wait_s = min(every_s, every_s - (self.env.now_ms() - done_ms) / 1000)
        return (_Place(stream_id, chunk_id) if stream_id else None), wait_s

    # -- a pass ------------------------------------------------------------------------------------------------

    async def scrub(self, place: _Place | None = None) -> None:
        """One pass, from `place` on."""
        start_s, read, unsaved = trio.current_time(), 0, 0
        for stream_id in sorted(self.tenants()):
            after = 0
            if place is not None:
                if stream_id < place.stream_id:
                    continue
                after = place.chunk_id if stream_id == place.stream_id else 0
            while page := self._page(stream_id, after):
                for chunk_id, item in page:
                    after = chunk_id
                    size = await self._check(item) if item is not None else 0
                    read, unsaved = read + size, unsaved + size
                    # Not a pause but a time before which nothing more is read: a slow disk makes up for nothing.
                    await trio.sleep_until(start_s + read / self.bytes_per_s)
                if unsaved >= REMEMBER_BYTES:
                    unsaved = 0
                    await self._remember(_Place(stream_id, after))
        self.passes += 1
        await self._remember(None)

    def _page(self, stream_id: int, after: int) -> list[tuple[int, _Resident | None]]:
        """The next residency rows behind a chunk id; None for those with nothing to check."""
        out: list[tuple[int, _Resident | None]] = []
        with self.hydrator.catalog.view() as view:
            for chunk_id, here in view.scan(stream_id, t.RESIDENCY, after=t.RESIDENCY.pack_key(after)):
                out.append((chunk_id, _resident(view, stream_id, chunk_id) if here.mask else None))
                if len(out) == PAGE_ROWS:
                    break
        return out

    async def _check(self, item: _Resident) -> int:
        tenant = self.tenants().get(item.stream_id)
        if tenant is None:
            return 0
        bad, size = await trio.to_thread.run_sync(self._read, tenant, item)
        if bad:
            # It was on its way out, or it is damaged: the rows know by now.
            again = self._again(item)
            bad = (await trio.to_thread.run_sync(self._read, tenant, again))[0] & bad if again is not None else 0
        self.checked_bytes += size
        if bad:
            await self._damaged(tenant, item, bad)
        return size

    def _again(self, item: _Resident) -> _Resident | None:
        with self.hydrator.catalog.view() as view:
            return _resident(view, item.stream_id, item.chunk.chunk_id)

    def _read(self, tenant: str, item: _Resident) -> tuple[int, int]:
        """The blocks that fail, and the bytes read. On a worker thread."""
        sizes = {"chunk_bytes": item.row.chunk_bytes, "block_bytes": self.hydrator.block_bytes}
        try:
            with opened(self.hydrator.hot.path(tenant, item.row.ino, item.row.generation)) as fd:
                checked = check_chunk(fd, item.chunk, item.mask, **sizes)
        except OSError:
            return item.mask, 0
        return (item.mask if checked.hash_failed else checked.bad), checked.bytes

    async def _damaged(self, tenant: str, item: _Resident, bad: int) -> None:
        per_chunk = item.row.chunk_bytes // self.hydrator.block_bytes
        first = item.chunk.index * per_chunk
        blocks = [first + i for i in range(bad.bit_length()) if bad >> i & 1]
        self.damaged_blocks += len(blocks)
        what = {"tenant": tenant, "ino": item.row.ino, "generation": item.row.generation, "blocks": blocks}
        if not item.chunk.key:
            log.error("scrub: a local copy is damaged, and the remote does not have it", extra=what)
            return
        log.warning("scrub: a local copy is damaged and fetched again", extra=what)
        key: Key = (item.stream_id, item.row.ino, item.row.generation)
        async with self.opened(key) as handle:
            await self.hydrator.attach(handle)
            await self.hydrator.give_up(handle, blocks)
        try:
            async with self.opened(key) as handle:
                for block in blocks:
                    await self.hydrator.read(handle, block * handle.block_bytes, handle.block_len(block))
        except Aof2Error as e:  # their next reader tries again
            log.warning("scrub: not fetched yet", extra={**what, "error": str(e)})

    async def _remember(self, place: _Place | None) -> None:
        def work(b: Batch) -> None:
            b.put(t.COUNTERS, PLACE_STREAM, place.stream_id if place else 0)
            b.put(t.COUNTERS, PLACE_CHUNK, place.chunk_id if place else 0)
            if place is None:
                b.put(t.COUNTERS, DONE_MS, b.now_ms)

        await result_of(self.hydrator.writer.submit(VOLUME_STREAM, work))


def _resident(view: View, stream_id: int, chunk_id: int) -> _Resident | None:
    here = view.get(stream_id, t.RESIDENCY, chunk_id)
    chunk = view.get(stream_id, t.CHUNKS, chunk_id)
    if here is None or chunk is None or not here.mask:
        return None
    row = view.get(stream_id, t.OBJECTS, (chunk.ino, chunk.generation))
    if row is None or row.state == ObjectState.DIRTY:
        return None  # being written: no seal says yet what its bytes should be
    return _Resident(stream_id, chunk, here.mask, row)
