"""A volume with its jobs running, remotes that count and fail, and a clock that moves when told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobRow, JobState
from aof2.engine.env import Env
from aof2.engine.jobs.prune import Retention
from aof2.engine.jobs.rewrite import Rules
from aof2.engine.jobs.service import Jobs
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import KIB, job_over, put_object, small_settings

CHUNK = 256 * KIB
BLOCK = 16 * KIB
TENANT = 1
KEEP = Retention(generations=2, purge_after_ms=60_000, undelete_window_ms=600_000)


class Remote:
    """A RemoteStore that writes down what it is asked for, and fails or waits when told to."""

    def __init__(self, inner: Any, record: Path | None = None) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], Exception | None] = lambda op, key: None
        self.gate = threading.Event()
        self.gate.set()
        self._record = record
        self._lock = threading.Lock()

    def _ask(self, op: str, key: str) -> None:
        self.gate.wait(60)
        error = self.fail(op, key)
        if error is not None:
            raise error

    def _note(self, op: str, key: str) -> None:
        with self._lock:
            self.calls.append((op, key))
            if self._record is not None:
                with open(self._record, "a") as f:
                    f.write(f"{op} {key}\n")

    def put_blob(self, key: str, *args: Any, **kwargs: Any) -> str:
        self._ask("put", key)
        etag: str = self.inner.put_blob(key, *args, **kwargs)
        self._note("put", key)
        return etag

    def get_range(self, key: str, *args: Any, **kwargs: Any) -> bytes:
        self._ask("get", key)
        data: bytes = self.inner.get_range(key, *args, **kwargs)
        self._note("get", key)
        return data

    def receive_range(self, key: str, *args: Any, **kwargs: Any) -> None:
        self._ask("get", key)
        self.inner.receive_range(key, *args, **kwargs)
        self._note("get", key)

    def delete(self, keys: Iterable[str], **kwargs: Any) -> None:
        keys = list(keys)
        for key in keys:
            self._ask("delete", key)
        self.inner.delete(keys, **kwargs)
        for key in keys:
            self._note("delete", key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def count(self, op: str) -> int:
        return sum(1 for o, _ in self.calls if o == op)

    def keys(self, op: str) -> list[str]:
        return [key for o, key in self.calls if o == op]


class World:
    """Everything a test looks at."""

    def __init__(self, volume: Volume, jobs: Jobs, remote: Remote) -> None:
        self.v = volume
        self.jobs = jobs
        self.remote = remote

    async def put(self, name: str, data: bytes) -> tuple[int, int, int]:
        return await put_object(self.v, "default", name.encode(), data)

    def job(self, job_id: int) -> JobRow:
        row = self.jobs.runner.job(TENANT, job_id)
        assert row is not None
        return row

    async def wait(self, tenant_id: int, job_id: int) -> JobRow:
        return await job_over(self.jobs, tenant_id, job_id)

    def all_jobs(self) -> list[JobRow]:
        return self.jobs.runner.jobs(TENANT)

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for changes that the runner tells of, not for time."""
        while True:
            change = self.jobs.runner.changes.next()
            if condition():
                return
            await change.wait()

    async def until_state(self, job_id: int, state: JobState) -> JobRow:
        await self.until(lambda: self.job(job_id).state == state)
        return self.job(job_id)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the jobs of a world that was opened without."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.jobs.run)
            yield
            nursery.cancel_scope.cancel()

    def remote_blobs(self) -> list[str]:
        return sorted(info.key for info in self.v.remote.list("checkpoints/"))

    def rows(self, table: Any) -> dict[Any, Any]:
        with self.v.catalog.view() as view:
            return dict(view.scan(TENANT, table))

    def quota_is_even(self) -> bool:
        usage = self.v.quota.usage
        with self.v.catalog.view() as view:
            return usage.reserved_bytes == 0 and usage.used_bytes == (view.get(TENANT, t.COUNTERS, "hot_bytes") or 0)


@contextlib.asynccontextmanager
async def open_world(
    settings: Settings,
    *,
    env: Env | None = None,
    record: Path | None = None,
    start: bool = True,
    **options: Any,
) -> AsyncIterator[World]:
    async with open_volume(settings, env=env, parts=()) as v:
        # The fence is the replicator's, which does not run here: deletes go to the store itself.
        remote = Remote(v.bare_remote, record)
        v.publisher.remote = remote  # type: ignore[assignment]
        v.hydrator.fetcher.remote = remote  # type: ignore[assignment]
        options.setdefault("retention", KEEP)
        options.setdefault("rewriting", Rules(bytes_per_s=0))
        v.publisher.purge_after_ms = options["retention"].purge_after_ms
        options = {"metrics": v.metrics, "foreground": v.foreground, "blocked": lambda _: False, **options}
        jobs = Jobs(
            v.publisher,
            v.hydrator,
            v.evictor,
            tenants=v.tenant_names,
            compression_of=lambda tenant: v.settings.tenants[tenant].compression,
            **options,
        )
        world = World(v, jobs, remote)
        async with trio.open_nursery() as nursery:
            if start:
                await nursery.start(jobs.run)
            try:
                yield world
            finally:
                remote.gate.set()
            nursery.cancel_scope.cancel()


def run_world(
    root: Path | Settings,
    body: Callable[[World], Awaitable[None]],
    *,
    clock: MockClock | None = None,
    **options: Any,
) -> None:
    settings = root if isinstance(root, Settings) else small_settings(root)

    async def main() -> None:
        with trio.fail_after(1e9 if clock is not None else 60):
            async with open_world(settings, **options) as world:
                await body(world)

    trio.run(main, clock=clock)


class Clock:
    """Wall and trio time in one hand."""

    def __init__(self) -> None:
        self.mock = MockClock()
        self.offset_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.offset_ms + int(self.mock.current_time() * 1000)

    def env(self) -> Env:
        return Env(now_ms=self.now_ms, seed=1)

    def jump(self, seconds: float) -> None:
        self.mock.jump(seconds)
