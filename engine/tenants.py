"""The tenants of a volume: their rows, and what a start makes for those of the settings that are new.

Invariants
- A tenant has a row in the volume's stream before it has a stream of its own, and that before its root directory.
- Masks and chunk lists mean nothing under other sizes: a volume keeps those it was made with (`check_geometry`).

Owner: the thread that opens the volume; afterwards read by all. A crash leaves some tenants made: the next start makes
the others.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aof2.engine import namespace, objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.recovery import open_stream
from aof2.engine.catalog.rows import InodeRow, TenantRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import LimitError
from aof2.engine.kinds import registry
from aof2.engine.opening import VOLUME_STREAM, log_settings
from aof2.engine.settings import Settings

log = logging.getLogger(__name__)


class Tenants:
    """By stream, as they were at the last `load`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.rows: dict[int, TenantRow] = {}

    def load(self) -> None:
        with self._catalog.view() as view:
            self.rows = dict(view.scan(VOLUME_STREAM, t.TENANTS))

    def names(self) -> dict[int, str]:
        return {tenant_id: row.name for tenant_id, row in self.rows.items()}

    def named(self, name: str) -> TenantRow:
        for row in self.rows.values():
            if row.name == name:
                return row
        raise objects.ObjectGoneError(f"there is no tenant {name!r}; tenants are made in mount.conf")

    def by_kind(self) -> dict[int, dict[int, str]]:
        """The names of the tenants of each kind, by stream."""
        found: dict[int, dict[int, str]] = {}
        for stream_id, row in self.rows.items():
            found.setdefault(row.kind, {})[stream_id] = row.name
        return found

    def ensure(self, env: Env, settings: Settings, target: CatalogTarget, writer: CatalogWriter) -> None:
        """A row, a stream and a root directory for every tenant of the settings. Blocks; before the tasks start."""
        if VOLUME_STREAM not in target.streams:
            return  # damaged: no tenant can be made
        writer.call(VOLUME_STREAM, partial(check_geometry, settings=settings))
        known = {row.name for row in self.rows.values()}
        for name, wanted in settings.tenants.items():
            if name not in known:
                number = registry.of_settings(wanted).number
                writer.call(VOLUME_STREAM, partial(_make_tenant, name=name, kind=number), sync=True)
        self.load()
        owner = owner_of(settings.volume.state_dir)
        manifest_dir = settings.volume.state_dir / "manifest"
        for tenant_id in self.rows:
            if tenant_id in target.streams:
                self._adopt_root(writer, tenant_id, owner)
            elif tenant_id not in target.read_only_streams:
                stream = open_stream(env, self._catalog, manifest_dir, log_settings(settings), tenant_id)
                target.add_stream(stream)
                writer.call(tenant_id, partial(namespace.make_root, uid=owner.uid, gid=owner.gid), sync=True)

    def _adopt_root(self, writer: CatalogWriter, tenant_id: int, owner: Owner) -> None:
        ino = namespace.root_ino(tenant_id)
        row = self._catalog.get(tenant_id, t.INODES, ino)
        if row is not None and adopts(row, owner):
            give = partial(namespace.set_attributes, ino=ino, uid=owner.uid, gid=owner.gid)
            writer.call(tenant_id, give, sync=True)
            log.info("a tenant's directory is the owner's now", extra={"tenant_id": tenant_id, "uid": owner.uid})


class Owner(NamedTuple):
    """Whose volume it is: the owner of its state_dir, also where root made it for him."""

    uid: int
    gid: int


def owner_of(state_dir: Path) -> Owner:
    info = state_dir.stat()
    return Owner(info.st_uid, info.st_gid)


def adopts(row: InodeRow, owner: Owner) -> bool:
    """Whether a tenant's root directory goes to the volume's owner: he could write nothing otherwise.

    A volume of root's is left as root arranged it. In a user's volume what belongs to root was made or restored by root
    on his behalf; and where he mounts himself, no other user can come in, so no other owner makes sense.
    """
    if owner.uid == 0 or row.uid == owner.uid:
        return False
    return row.uid == 0 or os.geteuid() == owner.uid


def check_geometry(b: Batch, *, settings: Settings) -> None:
    for name, value in (("block_bytes", settings.engine.block_bytes), ("chunk_bytes", settings.engine.chunk_bytes)):
        made_with = b.get(t.COUNTERS, name)
        if made_with is None:
            b.put(t.COUNTERS, name, value)
        elif made_with != value:
            raise LimitError(f"the volume was made with {name} = {made_with}; it cannot be opened with {value}")


def _make_tenant(b: Batch, *, name: str, kind: int) -> int:
    tenant_id = b.next_id("tenant_id")
    b.put(t.TENANTS, tenant_id, TenantRow(tenant_id, name, kind, b.now_ms))
    return tenant_id
