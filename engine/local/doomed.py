"""Backing files whose last name is gone: deleted once the log that says so is durable, many at a time.

Power loss takes the newest commits with it. Were the bytes gone before, a name would come back with nothing behind it.

Invariants
- A file is deleted after a sync of the log that began when the commit that removed its last name was in.
- Its bytes count until it is deleted. The evictor, when it needs room, asks for that first (`delete_all`).
- If the log cannot be synced nothing is deleted: what the next start finds in the log decides.

Owner: the trio thread; syncing and deleting on others. A crash leaves files that no row speaks of: orphans.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2.engine import objects
from aof2.engine.aio import result_of
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.local.hot import HotCache
from aof2.engine.locks import Rank, task_lock

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("doomed.unlinked",)
DELETE_AFTER_S: Final = 0.1  # a burst shares one sync


def full_size(path: Path) -> int:
    """What a file without holes was charged."""
    with contextlib.suppress(FileNotFoundError):
        return objects.on_disk(path.stat().st_size)
    return 0


class _Doomed(NamedTuple):
    path: Path
    tenant: str
    charged: int | Callable[[Path], int]


class DoomedFiles:
    """What is to be deleted."""

    def __init__(self, writer: CatalogWriter, hot: HotCache, give_back: Callable[[str, int], None]) -> None:
        self._writer = writer
        self._hot = hot
        self._give_back = give_back
        self._waiting: list[_Doomed] = []
        self._lock = task_lock(Rank.DOOMED)
        self._woken = trio.Event()

    def add(self, path: Path, tenant: str, charged: int | Callable[[Path], int] = full_size) -> None:
        """The commit that removed its last name is in. `charged`: what is given back, or how to measure it."""
        self._waiting.append(_Doomed(path, tenant, charged))
        self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await self._woken.wait()
            await trio.sleep(DELETE_AFTER_S)
            self._woken = trio.Event()
            await self.delete_all()

    async def delete_all(self) -> None:
        """Returns when everything added before is deleted, or cannot be."""
        if not self._waiting and not self._lock.locked():
            return
        async with self._lock:
            with trio.CancelScope(shield=True):
                await self._delete()

    async def _delete(self) -> None:
        doomed, self._waiting = self._waiting, []
        if not doomed:
            return
        try:
            await result_of(self._writer.flushed())
        except (ReadOnlyError, FatalIOError):
            return  # the volume says so itself
        for tenant, freed in (await trio.to_thread.run_sync(self._unlink, doomed)).items():
            self._give_back(tenant, freed)

    def _unlink(self, doomed: list[_Doomed]) -> dict[str, int]:
        freed: dict[str, int] = {}
        for path, tenant, charged in doomed:
            try:
                size = charged if isinstance(charged, int) else charged(path)
                self._hot.unlink(path)
            except OSError as e:  # it still counts; the next start finds it
                log.warning("a removed file is still on the disk", extra={"path": str(path), "error": str(e)})
                continue
            self._hot.env.failpoint("doomed.unlinked")
            freed[tenant] = freed.get(tenant, 0) + size
        return freed
