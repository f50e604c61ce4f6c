"""Cold scans: large sequential reads that fill neither cache.

A scan gets verified bytes of an object: blocks that are here are read here, the others come from the remote under the
tenant's RemoteReadLimiter, and nothing of it is kept. Readers of the mount come through `coldread`. Garbage collection
asks `holds` before it deletes a blob: a scan keeps every blob of its object alive from its start to its end.

Invariants
- Each block is verified, or the scan fails.
- Neither residency nor the PageCache changes; no reservation is taken.
- Scans that wait for their limiter hold threads of their own, nobody else's.

Owner: the trio thread; downloads on worker threads. A crash leaves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

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
from aof2.engine.tiering.flights import NotAvailableError
from aof2.engine.tiering.hydrate import Hydrator

THREADS_MAX: Final = 64
ADMIT_MAX_S: Final = 3600.0  # in a queue for bandwidth: the reader sees a slow read, not an error

Block = bytes | memoryview


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

    # -- blocks --------------------------------------------------------------------------------------------------

    async def local(self, handle: ObjectHandle, block: int) -> bytes | None:
        """One block from hot_cache or the PageCache; None: it is in neither."""
        here = await self.hydrator.read_resident(handle, block * handle.block_bytes, handle.block_len(block))
        return here or self.hydrator.pages.peek(PageKey(handle.key[1], handle.key[2], block))

    async def fetch(self, handle: ObjectHandle, first: int, count: int) -> list[Block]:
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
        fetch = partial(self._fetch, handle.tenant, chunk, blob, index, count, handle.block_bytes)
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
        self, tenant: str, chunk: ChunkRow, blob: BlobRow, index: int, count: int, block_bytes: int
    ) -> list[Block]:
        size = min((index + count) * block_bytes, chunk.length) - index * block_bytes
        with self._limiter(tenant).admit(size, timeout_s=ADMIT_MAX_S):
            return self._fetcher.blocks(chunk, blob, index, count)


def left_in_chunk(handle: ObjectHandle, block: int) -> int:
    """How many blocks its chunk has from there on."""
    chunk, index = handle.locate(block)
    return -(-handle.chunks[chunk].length // handle.block_bytes) - index
