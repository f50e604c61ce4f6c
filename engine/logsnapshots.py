"""Snapshots of the volume's logs, taken when they are due and at the end: they keep the next replay short.

Invariants
- One at a time: one that is due and the one at the end would take the same number.

Owner: one task of the volume (`run`); they are written on worker threads. A crash leaves what `catalog/snapshots.py`
says.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

import trio

from aof2.engine.catalog import snapshots
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.locks import Rank, task_lock
from aof2.engine.replicate.stream import worth_a_snapshot

log = logging.getLogger(__name__)


class LogSnapshots:
    """`on_taken` hears of each stream's; its upload, and what may go after it, is not done here."""

    def __init__(
        self,
        env: Env,
        catalog: Catalog,
        writer: CatalogWriter,
        manifest_dir: Path,
        on_taken: Callable[[int], Awaitable[None]],
    ) -> None:
        self._env = env
        self._catalog = catalog
        self._writer = writer
        self._manifest_dir = manifest_dir
        self._on_taken = on_taken
        self._due: dict[int, None] = {}
        self._wake = trio.Event()
        self._taking = task_lock(Rank.SNAPSHOT)

    def due(self, stream_id: int) -> None:
        self._due[stream_id] = None
        self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            due, self._due = self._due, {}
            for stream_id in due:
                try:
                    await self.take(stream_id)
                except (ReadOnlyError, FatalIOError):
                    continue  # the volume says so itself
                except OSError as e:  # comes again with the next bytes of log, or at the stop
                    log.warning("no snapshot was taken", extra={"stream_id": stream_id, "error": str(e)})

    async def take(self, stream_id: int) -> None:
        directory = self._manifest_dir / str(stream_id)
        take = partial(snapshots.take, self._env, self._catalog, self._writer, directory, stream_id)
        async with self._taking:
            taken = await trio.to_thread.run_sync(take)
        if taken is not None:
            await self._on_taken(stream_id)

    async def take_all(self, streams: Collection[int]) -> None:
        """One of every stream that has something new since its last."""
        for stream_id in streams:
            if await trio.to_thread.run_sync(worth_a_snapshot, self._manifest_dir / str(stream_id)):
                await self.take(stream_id)
