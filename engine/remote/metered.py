"""A RemoteStore that counts and times what goes through it, for `/metrics`.

Owner: any thread; the instruments guard themselves. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from aof2.engine.env import Env
from aof2.engine.observe.metrics import RemoteOp, Result, StorageMetrics
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.resilience import RemoteStats
from aof2.engine.remote.source import FileTarget, Source, Writer
from aof2.engine.remote.store import BlobInfo, RemoteStore

T = TypeVar("T")


class MeteredStore:
    """The inner store, measured."""

    def __init__(self, env: Env, inner: RemoteStore, metrics: StorageMetrics) -> None:
        self._env = env
        self._inner = inner
        self._metrics = metrics

    def _measured(self, op: RemoteOp, call: Callable[[], T]) -> T:
        started_s = self._env.monotonic_s()
        try:
            result = call()
        except BaseException:
            self._metrics.remote_requests_total[op, Result.ERROR].inc()
            raise
        self._metrics.remote_requests_total[op, Result.OK].inc()
        self._metrics.remote_request_seconds[op].observe(self._env.monotonic_s() - started_s)
        return result

    def put_blob(
        self,
        key: str,
        source: Source,
        size: int,
        *,
        crc64: int | None = None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        etag = self._measured(
            RemoteOp.PUT,
            lambda: self._inner.put_blob(
                key,
                source,
                size,
                crc64=crc64,
                sha256=sha256,
                metadata=metadata,
                if_absent=if_absent,
                timeout_s=timeout_s,
            ),
        )
        self._metrics.remote_bytes_written_total.inc(size)
        return etag

    def put_if_absent(
        self, key: str, data: bytes, metadata: Mapping[str, str] | None = None, *, timeout_s: float | None = None
    ) -> str:
        etag = self._measured(RemoteOp.PUT, lambda: self._inner.put_if_absent(key, data, metadata, timeout_s=timeout_s))
        self._metrics.remote_bytes_written_total.inc(len(data))
        return etag

    def replace_if_match(self, key: str, data: bytes, etag: str | None, *, timeout_s: float | None = None) -> str:
        return self._measured(RemoteOp.PUT, lambda: self._inner.replace_if_match(key, data, etag, timeout_s=timeout_s))

    def get_blob(
        self,
        key: str,
        writer: Writer,
        *,
        crc64: int | None = None,
        sha256: bytes | None = None,
        timeout_s: float | None = None,
    ) -> BlobInfo:
        return self._measured(
            RemoteOp.GET,
            lambda: self._inner.get_blob(key, writer, crc64=crc64, sha256=sha256, timeout_s=timeout_s),
        )

    def get_range(self, key: str, offset: int, length: int, *, timeout_s: float | None = None) -> bytes:
        return self._measured(RemoteOp.GET, lambda: self._inner.get_range(key, offset, length, timeout_s=timeout_s))

    def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], *, timeout_s: float | None = None
    ) -> Sequence[bytes]:
        return self._measured(RemoteOp.GET, lambda: self._inner.get_ranges(key, ranges, timeout_s=timeout_s))

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        started_s = self._env.monotonic_s()
        data = await self._inner.glance(key, offset, length)
        if data is not None:
            self._metrics.remote_requests_total[RemoteOp.GET, Result.OK].inc()
            self._metrics.remote_request_seconds[RemoteOp.GET].observe(self._env.monotonic_s() - started_s)
        return data

    def receive_range(
        self, key: str, offset: int, length: int, target: FileTarget, *, timeout_s: float | None = None
    ) -> None:
        self._measured(
            RemoteOp.GET, lambda: self._inner.receive_range(key, offset, length, target, timeout_s=timeout_s)
        )

    def head_blob(self, key: str, *, timeout_s: float | None = None) -> BlobInfo | None:
        return self._measured(RemoteOp.HEAD, lambda: self._inner.head_blob(key, timeout_s=timeout_s))

    def list(
        self, prefix: str = "", *, start_after: str | None = None, timeout_s: float | None = None
    ) -> Iterator[BlobInfo]:
        # Pages are asked for as the caller goes on: the first is what can be timed.
        return self._measured(
            RemoteOp.LIST, lambda: self._inner.list(prefix, start_after=start_after, timeout_s=timeout_s)
        )

    def delete(self, keys: Iterable[str], *, timeout_s: float | None = None) -> None:
        self._measured(RemoteOp.DELETE, lambda: self._inner.delete(keys, timeout_s=timeout_s))

    def compose(
        self, key: str, sources: Sequence[str], *, if_absent: bool = False, timeout_s: float | None = None
    ) -> str:
        return self._measured(
            RemoteOp.PUT,
            lambda: self._inner.compose(key, sources, if_absent=if_absent, timeout_s=timeout_s),
        )

    def abort_stale_uploads(self, older_than_s: float, *, timeout_s: float | None = None) -> int:
        return self._inner.abort_stale_uploads(older_than_s, timeout_s=timeout_s)

    def stats(self) -> RemoteStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class GuardedStore(MeteredStore):
    """A metered store that deletes only as the volume's owner: a stale writer must not remove what another needs."""

    def __init__(
        self, env: Env, inner: RemoteStore, metrics: StorageMetrics, fence: Callable[[], Fence | None]
    ) -> None:
        super().__init__(env, inner, metrics)
        self._fence = fence

    def delete(self, keys: Iterable[str], *, timeout_s: float | None = None) -> None:
        fence = self._fence()
        if fence is None:
            raise RemoteUnavailableError("the volume is not claimed yet: nothing is deleted", retryable=False)
        self._measured(RemoteOp.DELETE, lambda: fence.delete(keys))

    def abort_stale_uploads(self, older_than_s: float, *, timeout_s: float | None = None) -> int:
        fence = self._fence()
        if fence is None:
            raise RemoteUnavailableError("the volume is not claimed yet: nothing is cleared away", retryable=False)
        fence.check()
        return super().abort_stale_uploads(older_than_s, timeout_s=timeout_s)
