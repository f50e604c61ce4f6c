"""Cold scans: large sequential reads that fill neither cache.

A scan streams verified bytes of an object to a sink: blocks that are here are read here, the others come from the
remote under the tenant's RemoteReadLimiter, and nothing of it is kept. Garbage collection asks `holds` before it
deletes a blob: a scan keeps every blob of its object alive from its start to its end.

Invariants
- The sink gets bytes in order, each block verified, or the scan fails.
- Neither residency nor the PageCache changes; no reservation is taken.

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
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.observe.metrics import FetchTier, ReadMode, StorageMetrics
from aof2.engine.remote.limiter import RemoteReadLimiter
from aof2.engine.tiering.fetch import BlobFetcher
from aof2.engine.tiering.flights import REQUEST_BYTES, NotAvailableError
from aof2.engine.tiering.hydrate import Hydrator

SPAN_BYTES_DEFAULT: Final = REQUEST_BYTES

Sink = Callable[[bytes], Awaitable[None]]


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
        timeout_s: float,
        metrics: StorageMetrics | None = None,
    ) -> None:
        self._hydrator = hydrator
        self._fetcher = fetcher
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._metrics = metrics or StorageMetrics()
        self._held: Counter[str] = Counter()

    def holds(self, key: str) -> bool:
        """Whether a scan still reads this blob."""
        return self._held[key] > 0

    async def read_page_trickle(
        self, handle: ObjectHandle, offset: int, length: int, sink: Sink, options: ColdScanOptions | None = None
    ) -> int:
        """Streams [offset, offset + length) to the sink; how many bytes that were."""
        held = self._hold(handle)
        try:
            return await self._scan(
                handle, offset, min(offset + length, handle.size), sink, options or ColdScanOptions()
            )
        finally:
            self._held.subtract(held)

    def _hold(self, handle: ObjectHandle) -> list[str]:
        with self._hydrator.catalog.view() as view:
            blobs = [view.get(handle.key[0], t.BLOBS, chunk.sha256) for chunk in handle.chunks]
        held = [blob.key for blob in blobs if blob is not None]
        self._held.update(held)
        return held

    async def _scan(self, handle: ObjectHandle, offset: int, end: int, sink: Sink, options: ColdScanOptions) -> int:
        blocks_at_once = max(1, min(options.expected_span_bytes, REQUEST_BYTES) // handle.block_bytes)
        at = offset
        while at < end:
            first = at // handle.block_bytes
            chunk, index = handle.locate(first)
            in_chunk = -(-handle.chunks[chunk].length // handle.block_bytes) - index
            last = min(first + min(blocks_at_once, in_chunk) - 1, (end - 1) // handle.block_bytes)
            stop = min(end, (last + 1) * handle.block_bytes)
            await sink(await self._span(handle, first, last, at, stop, options))
            at = stop
        return max(0, end - offset)

    async def _span(
        self, handle: ObjectHandle, first: int, last: int, start: int, stop: int, options: ColdScanOptions
    ) -> bytes:
        await self._hydrator.attach(handle)
        if not handle.not_ready(first, last):
            return await self._hydrator.read(handle, start, stop - start)
        chunk_index, index = handle.locate(first)
        chunk = handle.chunks[chunk_index]
        with self._hydrator.catalog.view() as view:
            blob = view.get(handle.key[0], t.BLOBS, chunk.sha256)
        if blob is None:
            # Not published yet: then it is here, and must prove itself.
            if all(handle.is_resident(b) for b in range(first, last + 1)):
                return await self._hydrator.read(handle, start, stop - start)
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(handle.path))
        fetch = partial(self._fetch, handle.tenant, chunk, blob, index, last - first + 1, options.priority)
        started_s = self._hydrator.hot.env.monotonic_s()
        data = b"".join(await trio.to_thread.run_sync(fetch))
        self._metrics.remote_bytes_read_total[ReadMode.COLD_SCAN].inc(len(data))
        elapsed_s = self._hydrator.hot.env.monotonic_s() - started_s
        self._metrics.page_fetch_latency_seconds[FetchTier.COLD_SCAN].observe(elapsed_s)
        base = first * handle.block_bytes
        return data[start - base : stop - base]

    def _fetch(
        self, tenant: str, chunk: ChunkRow, blob: BlobRow, index: int, count: int, priority: int
    ) -> list[bytes | memoryview]:
        size = min(count * (chunk.length // max(1, len(chunk.block_crcs) // 8)), chunk.length)
        limiter = self._limiter(tenant)
        with limiter.admit(size, priority=priority, timeout_s=self._timeout_s):
            return self._fetcher.blocks(chunk, blob, index, count)
