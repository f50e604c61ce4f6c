"""A volume opened for writing without a daemon, as far as repair needs it: catalog, logs, and the claim.

Invariants
- The volume's lock is held by the caller. Row changes go through the log, like a daemon's.
- Nothing in the remote is put or deleted but as the volume's owner (`Fence`).

Owner: the calling thread. A crash leaves what any crash does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.recovery import open_catalog
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError
from aof2.engine.follow.mark import load_mark
from aof2.engine.inspect.rows import CATALOG_DIR, MANIFEST_DIR
from aof2.engine.local.hot import HotCache
from aof2.engine.opening import log_settings
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.stale import take_checked_claim
from aof2.engine.settings import Settings


class OpenVolume:
    """Each part is opened when the first fix needs it."""

    def __init__(self, env: Env, settings: Settings, remote: RemoteStore | None) -> None:
        self.env = env
        self.settings = settings
        self.remote = remote
        self.state_dir = settings.volume.state_dir
        self.block_bytes = settings.engine.block_bytes
        self.hot = HotCache(env, self.state_dir / "hot_cache")

        self._opened: tuple[Catalog, CatalogWriter] | None = None

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def open(self) -> tuple[Catalog, CatalogWriter]:
        if self._opened is None:
            if load_mark(self.state_dir) is not None:
                raise ReadOnlyError(f"{self.state_dir} follows the volume: repair it where its writer is")
            folders = (self.state_dir / CATALOG_DIR, self.state_dir / MANIFEST_DIR)
            opened = open_catalog(self.env, *folders, log_settings(self.settings))
            target = CatalogTarget(self.env, opened.catalog, opened.streams, None)
            self._opened = opened.catalog, CatalogWriter(target).start()
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            catalog, writer = self._opened
            writer.close()
            catalog.close()

    @property
    def catalog(self) -> Catalog:
        return self.open()[0]

    @property
    def writer(self) -> CatalogWriter:
        return self.open()[1]

    @cached_property
    def fence(self) -> Fence:
        """The right to write to the remote; StaleError where another machine writes the volume, or is ahead of us."""
        return take_checked_claim(self.env, self.reached, self.catalog, self.state_dir)

    @property
    def reached(self) -> RemoteStore:
        """The remote, or ReadOnlyError."""
        if self.remote is None:
            raise ReadOnlyError("the remote is not reachable")
        return self.remote

    def commit(self, stream_id: int, work: Callable[[Batch], object]) -> None:
        self.writer.call(stream_id, work, sync=True)
