"""Snapshots of the volume's logs, taken when they are due and at the end: they keep the next replay short.

Invariants
- One at a time: one that is due and the one at the end would take the same number.

Owner: one task of the volume (`run`); they are written on worker threads. A crash leaves what `catalog/snapshots.py`
says.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from aof2.engine.catalog import snapshots
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.locks import Rank, TaskLock, task_lock
from aof2.engine.replicate.stream import worth_a_snapshot

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LogSnapshots:
    """`on_taken` hears of each stream's; its upload, and what may go after it, is not done here."""

    env: Env
    catalog: Catalog
    writer: CatalogWriter
    manifest_dir: Path
    on_taken: Callable[[int], Awaitable[None]]
    _due: dict[int, None] = field(default_factory=dict)
    _wake: trio.Event = field(default_factory=trio.Event)
    _taking: TaskLock = field(default_factory=partial(task_lock, Rank.SNAPSHOT))

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
        directory = self.manifest_dir / str(stream_id)
        take = partial(snapshots.take, self.env, self.catalog, self.writer, directory, stream_id)
        async with self._taking:
            taken = await trio.to_thread.run_sync(take)
        if taken is not None:
            await self.on_taken(stream_id)

    async def take_all(self, streams: Collection[int]) -> None:
        """One of every stream that has something new since its last."""
        for stream_id in streams:
            if await trio.to_thread.run_sync(worth_a_snapshot, self.manifest_dir / str(stream_id)):
                await self.take(stream_id)
