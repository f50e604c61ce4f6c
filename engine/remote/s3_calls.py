"""Requests of one S3 store: each runs in a pool thread under the store's weather, and its caller waits no longer than
its deadline, whatever the socket does.

Reads have threads of their own, so that a foreground read never queues behind the parts of an upload.

Invariants: pool threads run single requests and never wait for other pool threads, so the pools cannot lock up. A
request that outlives its caller ends by the socket's timeouts and reports to nobody but the breaker.

Owner: the store; any thread may call. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aof2.engine.env import Env
from aof2.engine.remote.errors import RemoteMissingError, RemoteUnavailableError
from aof2.engine.remote.resilience import Deadline, Resilience, closed
from aof2.engine.remote.s3_client import SDK_ERRORS, connect_timeout_s, make_client, read_timeout_s, translate
from aof2.engine.remote.s3_url import UrlSigner
from aof2.engine.remote.s3_wire import Wire
from aof2.engine.remote.settings import RemoteSettings

T = TypeVar("T")

BUCKET_TRUSTED_S = 60.0


class S3Calls:
    """The client, its threads and its weather."""

    def __init__(
        self, env: Env, settings: RemoteSettings, bucket: str, *, sleep_s: Callable[[float], object] | None
    ) -> None:
        writers = max(2, settings.parallel // 2)
        self.env = env
        self.bucket = bucket
        sdk = make_client(settings, connections=settings.parallel + writers)
        self.client: Any = sdk.client
        self.weather = Resilience(
            env, f"s3://{bucket}", retries=settings.retries, timeout_s=settings.timeout_s, sleep_s=sleep_s
        )
        self.wire = Wire(
            UrlSigner(env, sdk, bucket),
            ca_bundle=sdk.ca_bundle,
            connect_timeout_s=connect_timeout_s(settings),
            read_timeout_s=read_timeout_s(settings),
            idle_max=settings.parallel,
            bounded=lambda connect, deadline: self.wait(
                self._readers.submit(connect), f"connect to {bucket}", deadline
            ),
        )
        self._readers = ThreadPoolExecutor(settings.parallel, thread_name_prefix="aof2-remote-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="aof2-remote-write")
        self._bucket_seen_s: float | None = None

    def read(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        return self.wait(self.start_read(what, attempt, deadline), what, deadline)

    def write(self, what: str, attempt: Callable[[], T], deadline: Deadline, *, under_way: bool = False) -> T:
        return self.wait(self.start_write(what, attempt, deadline, under_way=under_way), what, deadline)

    def here(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        """On the caller's own thread: for an attempt that keeps to the deadline by itself."""
        return self.weather.run(what, lambda: self._translated(what, attempt), deadline)

    def start_read(
        self, what: str, attempt: Callable[[], T], deadline: Deadline, *, under_way: bool = False
    ) -> Future[T]:
        return self._start(self._readers, what, attempt, deadline, under_way)

    def start_write(
        self, what: str, attempt: Callable[[], T], deadline: Deadline, *, under_way: bool = False
    ) -> Future[T]:
        return self._start(self._writers, what, attempt, deadline, under_way)

    def _start(
        self, pool: ThreadPoolExecutor, what: str, attempt: Callable[[], T], deadline: Deadline, under_way: bool
    ) -> Future[T]:
        def run() -> T:
            return self.weather.run(what, lambda: self._translated(what, attempt), deadline, under_way=under_way)

        try:
            return pool.submit(run)
        except RuntimeError:
            raise closed(what) from None

    def wait(self, future: Future[T], what: str, deadline: Deadline) -> T:
        try:
            return future.result(timeout=max(0.0, deadline.left_s()))
        except TimeoutError:
            future.cancel()
            raise deadline.passed(what) from None
        except CancelledError:
            raise closed(what) from None
        finally:
            # Its exception knows this frame: without this, the caller's buffers live until the next collection.
            del future

    def _translated(self, what: str, attempt: Callable[[], T]) -> T:
        try:
            result = attempt()
        except SDK_ERRORS as e:
            raise translate(e, what) from None
        self._bucket_seen_s = self.env.monotonic_s()
        return result

    def check_bucket(self, deadline: Deadline) -> None:
        """HEAD says 404 for a missing key and for a missing bucket: RemoteUnavailableError when it is the bucket."""
        seen_s = self._bucket_seen_s
        if seen_s is not None and self.env.monotonic_s() - seen_s < BUCKET_TRUSTED_S:
            return
        what = f"bucket {self.bucket}"
        try:
            self.read(what, lambda: self.client.head_bucket(Bucket=self.bucket), deadline)
        except RemoteMissingError:
            raise RemoteUnavailableError(f"{what}: it does not exist", retryable=False) from None

    def close(self) -> None:
        self.weather.close()
        self.wire.close()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()
