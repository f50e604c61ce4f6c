"""A RemoteStore that counts and times what goes through it, for `/metrics`.

Owner: any thread; the instruments guard themselves. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from aof2.engine.env import Env
from aof2.engine.observe.metrics import RemoteOp, Result, StorageMetrics
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.resilience import RemoteStats
from aof2.engine.remote.source import FileTarget, Source
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
        self, key: str, source: Source, size: int, *, crc64: int | None = None, sha256: bytes | None = None
    ) -> str:
        put = partial(self._inner.put_blob, key, source, size, crc64=crc64, sha256=sha256)
        etag = self._measured(RemoteOp.PUT, put)
        self._metrics.remote_bytes_written_total.inc(size)
        return etag

    def put_if_absent(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        etag = self._measured(RemoteOp.PUT, lambda: self._inner.put_if_absent(key, data, metadata))
        self._metrics.remote_bytes_written_total.inc(len(data))
        return etag

    def replace_if_match(self, key: str, data: bytes, etag: str | None) -> str:
        return self._measured(RemoteOp.PUT, lambda: self._inner.replace_if_match(key, data, etag))

    def get_blob(self, key: str, *, timeout_s: float | None = None) -> tuple[BlobInfo, bytes]:
        return self._measured(RemoteOp.GET, lambda: self._inner.get_blob(key, timeout_s=timeout_s))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._measured(RemoteOp.GET, lambda: self._inner.get_range(key, offset, length))

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        started_s = self._env.monotonic_s()
        data = await self._inner.glance(key, offset, length)
        if data is not None:
            self._metrics.remote_requests_total[RemoteOp.GET, Result.OK].inc()
            self._metrics.remote_request_seconds[RemoteOp.GET].observe(self._env.monotonic_s() - started_s)
        return data

    def receive_range(self, key: str, offset: int, length: int, target: FileTarget) -> None:
        self._measured(RemoteOp.GET, lambda: self._inner.receive_range(key, offset, length, target))

    def head_blob(self, key: str) -> BlobInfo | None:
        return self._measured(RemoteOp.HEAD, lambda: self._inner.head_blob(key))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        # Pages are asked for as the caller goes on: the first is what can be timed.
        return self._measured(RemoteOp.LIST, lambda: self._inner.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._measured(RemoteOp.DELETE, lambda: self._inner.delete(keys))

    def compose(self, key: str, sources: Sequence[str]) -> str:
        return self._measured(RemoteOp.PUT, lambda: self._inner.compose(key, sources))

    def abort_stale_uploads(self, older_than_s: float) -> int:
        return self._inner.abort_stale_uploads(older_than_s)

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

    def _owned(self) -> Fence:
        fence = self._fence()
        if fence is None:
            raise RemoteUnavailableError("the volume is not claimed yet: nothing is deleted", retryable=False)
        return fence

    def delete(self, keys: Iterable[str]) -> None:
        fence = self._owned()
        self._measured(RemoteOp.DELETE, lambda: fence.delete(keys))

    def abort_stale_uploads(self, older_than_s: float) -> int:
        self._owned().check()
        return super().abort_stale_uploads(older_than_s)
