"""Requests of one S3 store: each runs in a pool thread under the store's weather, and its caller waits no longer than
its deadline, whatever the socket does. Small ones that keep to it by themselves run on the caller's thread.

Reads have threads of their own, so that a foreground read never queues behind the parts of an upload.

Invariants: pool threads run single requests and never wait for other pool threads, so the pools cannot lock up. A
request that outlives its caller ends by the socket's timeouts and reports to the breaker alone. A request that is
refused has the credentials read again from their chain; where they changed, it is sent again with the new ones.

Owner: the store; any thread may call. A crash leaves nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from aof2.engine.env import Env
from aof2.engine.remote.errors import RemoteAuthError, RemoteMissingError, RemoteUnavailableError
from aof2.engine.remote.resilience import Deadline, Resilience, closed
from aof2.engine.remote.s3_client import (
    SDK_ERRORS,
    Sdk,
    connect_timeout_s,
    make_client,
    read_timeout_s,
    renewed,
    translate,
)
from aof2.engine.remote.s3_put import QuickPut
from aof2.engine.remote.s3_url import UrlSigner
from aof2.engine.remote.s3_wire import Wire
from aof2.engine.settings.remote import RemoteSettings, parse_url

log = logging.getLogger(__name__)

T = TypeVar("T")

BUCKET_TRUSTED_S = 60.0
RENEW_EVERY_S = 1.0


class S3Calls:
    """The client, its threads and its weather."""

    def __init__(
        self, env: Env, settings: RemoteSettings, bucket: str, *, sleep_s: Callable[[float], object] | None
    ) -> None:
        writers = max(2, settings.parallel // 2)
        self.env = env
        self.bucket = bucket
        self._settings = settings
        self._connections = settings.parallel + writers
        self._renewing = threading.Lock()
        self._renewed_s = float("-inf")
        self._sdk = sdk = make_client(settings, connections=self._connections)
        self.weather = Resilience(
            env,
            f"s3://{bucket}",
            retries=settings.retries,
            timeout_s=settings.timeout_s,
            sleep_s=sleep_s,
            prefix=parse_url(settings.url).prefix,
        )
        self._signer = UrlSigner(env, sdk, bucket)
        self.wire = Wire(
            self._signer,
            ca_bundle=sdk.ca_bundle,
            connect_timeout_s=connect_timeout_s(settings),
            read_timeout_s=read_timeout_s(settings),
            idle_max=settings.parallel,
            bounded=lambda connect, deadline: self.wait(
                self._readers.submit(connect), f"connect to {bucket}", deadline
            ),
        )
        self.quick = QuickPut(self._signer, self.wire)
        self._readers = ThreadPoolExecutor(settings.parallel, thread_name_prefix="aof2-remote-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="aof2-remote-write")
        self._bucket_seen_s: float | None = None

    def sdk(self, operation: str, **params: Any) -> Any:
        """One request of the SDK about the bucket, with the newest keys."""
        return getattr(self._sdk.client, operation)(Bucket=self.bucket, **params)

    def read(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        return self.wait(self.start(what, attempt, deadline), what, deadline)

    def write(self, what: str, attempt: Callable[[], T], deadline: Deadline, *, under_way: bool = False) -> T:
        return self.wait(self.start(what, attempt, deadline, writes=True, under_way=under_way), what, deadline)

    def here(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        """On the caller's own thread: for an attempt that keeps to the deadline by itself."""
        return self.weather.run(what, lambda: self._translated(what, attempt), deadline)

    def apart(self, what: str, call: Callable[[], T], deadline: Deadline) -> T:
        """One call of an attempt that runs `here`, on a pool thread: the SDK knows no deadline."""
        try:
            future = self._writers.submit(call)
        except RuntimeError:
            raise closed(what) from None
        return self.wait(future, what, deadline)

    def start(
        self, what: str, attempt: Callable[[], T], deadline: Deadline, *, writes: bool = False, under_way: bool = False
    ) -> Future[T]:
        def run() -> T:
            return self.weather.run(what, lambda: self._translated(what, attempt), deadline, under_way=under_way)

        try:
            return (self._writers if writes else self._readers).submit(run)
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
        used = self._sdk
        try:
            result = attempt()
        except SDK_ERRORS as e:
            error = translate(e, what)
            if not isinstance(error, RemoteAuthError) or not self._renewed(used):
                raise error from None
            try:
                result = attempt()
            except SDK_ERRORS as again:
                raise translate(again, what) from None
        self._bucket_seen_s = self.env.monotonic_s()
        return result

    def _renewed(self, used: Sdk) -> bool:
        """Whether there are other keys than those of the request that was refused; reads the chain at most once a
        while. The client before stays with the requests that have it."""
        with self._renewing:
            now_s = self.env.monotonic_s()
            if self._sdk is used and now_s - self._renewed_s >= RENEW_EVERY_S:
                self._renewed_s = now_s
                fresh = renewed(self._settings, used, connections=self._connections)
                if fresh is not None:
                    self._sdk = fresh
                    self._signer.renew(fresh)
                    self.wire.trust_again()
                    self.quick.trust_again()
                    log.info("remote: other credentials are used now", extra={"bucket": self.bucket})
            return self._sdk is not used

    def check_bucket(self, deadline: Deadline) -> None:
        """HEAD says 404 for a missing key and for a missing bucket: RemoteUnavailableError when it is the bucket."""
        seen_s = self._bucket_seen_s
        if seen_s is not None and self.env.monotonic_s() - seen_s < BUCKET_TRUSTED_S:
            return
        what = f"bucket {self.bucket}"
        try:
            self.read(what, partial(self.sdk, "head_bucket"), deadline)
        except RemoteMissingError:
            raise RemoteUnavailableError(f"{what}: it does not exist", retryable=False) from None

    def close(self) -> None:
        self.weather.close()
        self.wire.close()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._sdk.client.close()
