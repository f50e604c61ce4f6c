"""Who keeps the order of eviction: the policies of hot_cache and of warm, their files, and what no file knew of.

    read at the start ── uses ──► saved every SAVE_EVERY_S when something changed ── saved at the stop, as closed

What the catalog says is here and the file does not (the daemon was killed, the file is damaged, or there is none) is
found once, in the background, by a walk over the residency rows, and counts as older than what is used in this run,
newer than what the file knows. After a clean stop there is nothing to find, and no walk.

Invariants
- The order is no truth: what it lists and is not here is passed over and forgotten; what is here and not listed is
  found by the walk, at the latest by an eviction that has nothing else left.

Owner: the trio thread (of `warm`: the thread that holds `warm_lock`); files are read and written on worker threads. A
crash loses the last SAVE_EVERY_S of the order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import stream_of
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError
from aof2.engine.locks import Rank, ThreadLock, task_lock, thread_lock
from aof2.engine.recency import EvictionPolicy, InUse, saved
from aof2.engine.recency.noted import Noted
from aof2.engine.recency.policy import Image

log = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 60.0
# Of a very long order, saving stays a small share of all work.
SAVE_SHARE: Final = 100
PAGE_ROWS: Final = 256
BETWEEN_PAGES_S: Final = 0.01
# An eviction with nothing left to take has the walk made again, in case the order missed something after all.
WALK_AGAIN_S: Final = 600.0
UNIT_BYTES: Final = 4096  # a page of the disk


def units_of(size_bytes: int) -> int:
    """Bytes on the disk in units of the hot policy."""
    return -(-size_bytes // UNIT_BYTES)


class _File(NamedTuple):
    path: Path
    policy: EvictionPolicy
    lock: ThreadLock


class Recent:
    """Both orders. `hot` is by inode, in pages of the disk; `warm` by `warm_key`, in bytes."""

    def __init__(
        self,
        env: Env,
        catalog: Catalog,
        state_dir: Path,
        tenants: Callable[[], dict[int, str]],
        *,
        hot_bytes: int,
        warm_bytes: int,
        block_bytes: int,
        low_water: float = 0.9,
        writes: bool = True,
    ) -> None:
        self._env = env
        self._catalog = catalog
        self._tenants = tenants
        self._block_bytes = block_bytes
        self._writes = writes
        self.hot = Noted(
            InUse(units_of(hot_bytes), clock_s=env.monotonic_s),
            env.now_ms,
            limit_units=units_of(hot_bytes),
            low_water=low_water,
        )
        self.warm: EvictionPolicy = InUse(warm_bytes, clock_s=env.monotonic_s)
        folder = state_dir / "recency"
        self.warm_lock = thread_lock()
        self._files = (
            _File(folder / "hot.lru", self.hot, contextlib.nullcontext()),
            _File(folder / "warm.lru", self.warm, self.warm_lock),
        )
        self._saved_changes = [0, 0]
        self.complete = False  # the order lists everything that is here
        self._walker: Iterator[int] | None = None
        self._walking = task_lock(Rank.WALK)
        self._walk_again_s = float("-inf")

    # -- start and stop ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Reads what was saved. Blocks; before anything is used."""
        for path, policy, _ in self._files:
            found = saved.read(path)
            if found is None:
                continue
            policy.load(found.image)
            if policy is self.hot:
                self.complete = found.closed
            if found.closed and self._writes:
                self._reopen(path)
        self._saved_changes = [file.policy.changes for file in self._files]

    def _reopen(self, path: Path) -> None:
        try:
            saved.take_back_closed(self._env, path)
        except (OSError, FatalIOError) as e:
            # After a crash what came since is found when an eviction has nothing else left (WALK_AGAIN_S).
            log.info("the order of eviction counts as closed", extra={"path": str(path), "error": str(e)})

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Finds what the file did not know, then saves now and then."""
        task_status.started()
        if not self.complete:
            await self._find_all()
        pause_s = SAVE_EVERY_S
        while True:
            await trio.sleep(pause_s)
            began_s = trio.current_time()
            await self.save()
            pause_s = max(SAVE_EVERY_S, SAVE_SHARE * (trio.current_time() - began_s))

    async def save(self, *, closed: bool = False) -> None:
        """Writes what changed since it was last written; `closed`: nothing changes any more."""
        if not self._writes:
            return
        for i, (path, policy, lock) in enumerate(self._files):
            if not closed and policy.changes == self._saved_changes[i]:
                continue
            with lock:
                changes, image = policy.changes, policy.imager()
            try:
                await trio.to_thread.run_sync(partial(self._write, path, image, closed=closed and self.complete))
            except (OSError, FatalIOError) as e:  # costs hits, not data
                log.info("the order of eviction was not saved", extra={"path": str(path), "error": str(e)})
                return
            self._saved_changes[i] = changes

    def _write(self, path: Path, image: Callable[[], Image], *, closed: bool) -> None:
        saved.write(self._env, path, image(), closed=closed)

    # -- what is here --------------------------------------------------------------------------------------------

    async def _find_all(self) -> None:
        found = len(self.hot)
        while await self.find_more():
            await trio.sleep(BETWEEN_PAGES_S)
        if found := len(self.hot) - found:
            log.info("files found that the order of eviction did not list", extra={"files": found})

    async def find_more(self) -> bool:
        """Lists a few more of what is here and was not listed; False: there is nothing more."""
        async with self._walking:
            if self._walker is None:
                if self.complete and trio.current_time() < self._walk_again_s:
                    return False
                self._walker = self._pages()
            for found in self._walker:
                await trio.lowlevel.checkpoint()
                if found:
                    return True
            self._walker = None
            self.complete = True
            self._walk_again_s = trio.current_time() + WALK_AGAIN_S
            return False

    def _pages(self) -> Iterator[int]:
        """Walks what the catalog says is here, a page a step, and lists it; how many were new."""
        for stream_id in sorted(self._tenants()):
            new, after = self._page(stream_id, None)
            while after is not None:
                yield new
                new, after = self._page(stream_id, after)

    def _page(self, stream_id: int, after: bytes | None) -> tuple[int, bytes | None]:
        """Lists what a page of residency rows speaks of; how many were new, and where it ended (None: no page)."""
        new = 0
        last: bytes | None = None
        with self._catalog.view() as view:
            for n, (chunk_id, row) in enumerate(view.scan(stream_id, t.RESIDENCY, after=after), 1):
                last = t.RESIDENCY.pack_key(chunk_id)
                chunk = view.get(stream_id, t.CHUNKS, chunk_id) if row.mask else None
                if chunk is not None and chunk.ino not in self.hot:
                    self.hot.policy.admit_old(chunk.ino, units_of(self.local_bytes(view, chunk.ino)))
                    new += 1
                if n >= PAGE_ROWS:
                    break
        return new, last

    def local_bytes(self, view: View, ino: int) -> int:
        """What an inode takes in hot_cache, all its generations together, as the catalog has it."""
        stream_id = stream_of(ino)
        total = 0
        for _, row in view.scan(stream_id, t.OBJECTS, prefix=ino.to_bytes(8, "big")):
            for chunk_id in row.data_chunks:
                here = view.get(stream_id, t.RESIDENCY, chunk_id)
                chunk = view.get(stream_id, t.CHUNKS, chunk_id) if here is not None and here.mask else None
                if here is not None and chunk is not None:
                    total += objects.chunk_disk_bytes(here.mask, chunk, self._block_bytes)
        return total
