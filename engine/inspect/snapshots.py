"""Snapshots as people look at them, from the catalog alone.

Owner: pure over a view. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import SnapshotRow
from aof2.engine.catalog.store import View
from aof2.engine.inspect.rows import tenant_names


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. `complete`: its listing is in the remote, under `key`."""

    snapshot: str
    tenant: str
    snapshot_id: int
    name: str
    taken_ms: int
    files: int
    bytes: int
    complete: bool
    key: str


def snapshot_status(row: SnapshotRow, tenant: str) -> SnapshotStatus:
    return SnapshotStatus(
        snapshot=f"{tenant}/{row.snapshot_id}",
        tenant=tenant,
        snapshot_id=row.snapshot_id,
        name=row.name,
        taken_ms=row.taken_ms,
        files=row.files,
        bytes=row.size_bytes,
        complete=bool(row.key),
        key=row.key,
    )


def every_snapshot(view: View) -> Iterator[SnapshotStatus]:
    for tenant_id, tenant in sorted(tenant_names(view).items()):
        for _, row in view.scan(tenant_id, t.SNAPSHOTS):
            yield snapshot_status(row, tenant)
