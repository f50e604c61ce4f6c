"""Cold scans: large sequential reads that fill neither cache.

A scan gets verified bytes of an object: blocks that are here are read here, the others come from the remote under the
tenant's RemoteReadLimiter, and nothing of it is kept. `read_page_trickle` streams to a sink; readers of the mount use
`fetch` through `coldread`. Garbage collection asks `holds` before it deletes a blob: a scan keeps every blob of its
object alive from its start to its end.

Invariants
- The sink gets bytes in order, each block verified, or the scan fails.
- Neither residency nor the PageCache changes; no reservation is taken.
- Scans that wait for their limiter hold threads of their own: no other read or job queues for those.

Owner: the trio thread; downloads on worker threads. A crash leaves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.errors import CorruptError
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.local.warm import WarmStore
from aof2.engine.observe.metrics import FetchTier, ReadMode, StorageMetrics
from aof2.engine.pagecache import PageKey
from aof2.engine.remote.limiter import RemoteReadLimiter
from aof2.engine.tiering.fetch import BlobFetcher
from aof2.engine.tiering.flights import REQUEST_BYTES, NotAvailableError
from aof2.engine.tiering.hydrate import Hydrator

SPAN_BYTES_DEFAULT: Final = REQUEST_BYTES
THREADS_MAX: Final = 64
ADMIT_MAX_S: Final = 3600.0  # in a queue for bandwidth: the reader sees a slow read, not an error

Sink = Callable[[bytes], Awaitable[None]]
Block = bytes | memoryview


class ColdScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Hints of the caller: higher priority is served first; `expected_span_bytes` sizes the requests."""

    priority: int = 0
    expected_span_bytes: int = SPAN_BYTES_DEFAULT


class ColdScanner:
    """Runs scans and knows which blobs they hold."""

    def __init__(
        self,
        hydrator: Hydrator,
        fetcher: BlobFetcher,
        limiter: Callable[[str], RemoteReadLimiter],
        *,
        warm: WarmStore | None = None,
        metrics: StorageMetrics | None = None,
    ) -> None:
        self.hydrator = hydrator
        self._fetcher = fetcher
        self._limiter = limiter
        self._warm = warm
        self._metrics = metrics or StorageMetrics()
        self._held: Counter[str] = Counter()
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    # -- holding -------------------------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        """Whether a scan still reads this blob."""
        return self._held[key] > 0

    def hold(self, handle: ObjectHandle) -> list[str]:
        """The object's blobs stay until they are let go of; which."""
        with self.hydrator.catalog.view() as view:
            blobs = [view.get(handle.key[0], t.BLOBS, chunk.sha256) for chunk in handle.chunks]
        held = [blob.key for blob in blobs if blob is not None]
        self._held.update(held)
        return held

    def let_go(self, held: list[str]) -> None:
        self._held.subtract(held)
        for key in held:
            if self._held[key] <= 0:
                del self._held[key]

    # -- a whole scan --------------------------------------------------------------------------------------------

    async def read_page_trickle(
        self, handle: ObjectHandle, offset: int, length: int, sink: Sink, options: ColdScanOptions | None = None
    ) -> int:
        """Streams [offset, offset + length) to the sink; how many bytes that were."""
        held = self.hold(handle)
        try:
            return await self._scan(
                handle, offset, min(offset + length, handle.size), sink, options or ColdScanOptions()
            )
        finally:
            self.let_go(held)

    async def _scan(self, handle: ObjectHandle, offset: int, end: int, sink: Sink, options: ColdScanOptions) -> int:
        blocks_at_once = max(1, min(options.expected_span_bytes, REQUEST_BYTES) // handle.block_bytes)
        at = offset
        while at < end:
            first = at // handle.block_bytes
            last = min(first + min(blocks_at_once, left_in_chunk(handle, first)), -(-end // handle.block_bytes)) - 1
            stop = min(end, (last + 1) * handle.block_bytes)
            await sink(await self._span(handle, first, last, at, stop, options.priority))
            at = stop
        return max(0, end - offset)

    async def _span(self, handle: ObjectHandle, first: int, last: int, start: int, stop: int, priority: int) -> bytes:
        here = await self.hydrator.read_resident(handle, start, stop - start)
        if here is not None:
            return here
        data = b"".join(await self.fetch(handle, first, last + 1 - first, priority=priority))
        base = first * handle.block_bytes
        return data[start - base : stop - base]

    # -- blocks --------------------------------------------------------------------------------------------------

    async def local(self, handle: ObjectHandle, block: int) -> bytes | None:
        """One block from hot_cache or the PageCache; None: it is in neither."""
        here = await self.hydrator.read_resident(handle, block * handle.block_bytes, handle.block_len(block))
        return here or self.hydrator.pages.peek(PageKey(handle.key[1], handle.key[2], block))

    async def fetch(self, handle: ObjectHandle, first: int, count: int, *, priority: int = 0) -> list[Block]:
        """Blocks of one chunk, verified: from its warm copy, else from the remote as the limiter allows."""
        chunk_index, index = handle.locate(first)
        chunk = handle.chunks[chunk_index]
        warm = await self._from_warm(handle, chunk, index, count)
        if warm is not None:
            return warm
        with self.hydrator.catalog.view() as view:
            blob = view.get(handle.key[0], t.BLOBS, chunk.sha256)
        if blob is None:
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(handle.path))
        fetch = partial(self._fetch, handle.tenant, chunk, blob, index, count, handle.block_bytes, priority)
        started_s = self.hydrator.hot.env.monotonic_s()
        blocks = await trio.to_thread.run_sync(fetch, limiter=self._threads, abandon_on_cancel=True)
        self._metrics.remote_bytes_read_total[ReadMode.COLD_SCAN].inc(sum(map(len, blocks)))
        elapsed_s = self.hydrator.hot.env.monotonic_s() - started_s
        self._metrics.page_fetch_latency_seconds[FetchTier.COLD_SCAN].observe(elapsed_s)
        return blocks

    async def _from_warm(self, handle: ObjectHandle, chunk: ChunkRow, index: int, count: int) -> list[Block] | None:
        slot = (handle.key[0], chunk.chunk_id)
        if self._warm is None or not self._warm.has(slot):
            return None
        try:
            read = partial(self._warm.blocks, handle.tenant, chunk, slot, index, count)
            return list(await trio.to_thread.run_sync(read))
        except (CorruptError, FileNotFoundError):
            return None  # given up by who reads as usual; the remote has it, too

    def _fetch(
        self, tenant: str, chunk: ChunkRow, blob: BlobRow, index: int, count: int, block_bytes: int, priority: int
    ) -> list[Block]:
        size = min((index + count) * block_bytes, chunk.length) - index * block_bytes
        with self._limiter(tenant).admit(size, priority=priority, timeout_s=ADMIT_MAX_S):
            return self._fetcher.blocks(chunk, blob, index, count)


def left_in_chunk(handle: ObjectHandle, block: int) -> int:
    """How many blocks its chunk has from there on."""
    chunk, index = handle.locate(block)
    return -(-handle.chunks[chunk].length // handle.block_bytes) - index
