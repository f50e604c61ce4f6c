"""`changes` in the daemon: pages of the change feed from where a named cursor stands, and moving the cursor.

Owner: the trio thread; a task a request. A crash leaves cursors where they were acknowledged last: what was shown since
is shown again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import changes as feed
from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.errors import LimitError, ReadOnlyError
from aof2.engine.volume import Volume
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args, ControlError
from aof2.fs.control.work import tenants_named

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
WAIT_S_MAX: Final = 20.0
PAGE_RECORDS: Final = 200
SEEN_AGAIN: Final = 8  # a cursor in use is noted so many times in the time it would take to expire


class Changes(Args, kw_only=True):
    """`after`: show from there on, by tenant, instead of from where the cursor stands. `wait_s`: for the first."""

    cursor: str
    tenant: str | None = None
    after: dict[str, int] = msgspec.field(default_factory=dict)
    wait_s: float = 0.0


class Acknowledge(Args, kw_only=True):
    """Everything up to these sequences, by tenant, is processed."""

    cursor: str
    sequences: dict[str, int]


class Cursors(Args, kw_only=True):
    """`forget`: that cursor is dropped first."""

    forget: str = ""
    tenant: str | None = None


async def changes(mounted: Mounted, args: Changes, _: Tell) -> dict[str, Any]:
    """`rows`, and up to where they go, by tenant; where the cursor was `registered` there was nothing before."""
    _check(args.cursor)
    volume = mounted.volume
    tenants = tenants_named(volume, args.tenant)
    registered, refused = [], []
    for tenant_id, name in tenants.items():
        try:
            if await _ensure(volume, tenant_id, args.cursor):
                registered.append(name)
        except (ReadOnlyError, LimitError):
            if args.tenant is not None:
                raise
            refused.append(tenant_id)  # a damaged tenant is not in the way of the others
    tenants = {tenant_id: name for tenant_id, name in tenants.items() if tenant_id not in refused}
    with trio.move_on_after(min(args.wait_s, WAIT_S_MAX)):
        while True:
            change = volume.feed_changed.next()
            page = _page(volume, tenants, args, registered)
            if page["rows"] or not args.wait_s:
                return page
            await change.wait()
    return _page(volume, tenants, args, registered)


def _check(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ControlError(f"{name!r}: a cursor's name is 1 to 64 letters, digits, and _ . -", 2)


async def _ensure(volume: Volume, tenant_id: int, name: str) -> bool:
    """Registers the cursor, or notes that it is in use; whether it is new."""
    row = volume.catalog.get(tenant_id, t.CURSORS, name)
    idle_ms = int(volume.settings.retention.cursor_idle_s * 1000)
    if row is not None and volume.env.now_ms() - row.seen_ms < idle_ms // SEEN_AGAIN:
        return False
    await result_of(volume.writer.submit(tenant_id, partial(feed.register, name=name)))
    return row is None


def _page(volume: Volume, tenants: Mapping[int, str], args: Changes, registered: list[str]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    upto: dict[str, int] = {}
    more = False
    with volume.catalog.view() as view:
        for tenant_id, tenant in tenants.items():
            after = args.after.get(tenant)
            records = feed.page(view, tenant_id, args.cursor, limit=PAGE_RECORDS, after=after)
            more |= len(records) == PAGE_RECORDS
            for record in records:
                upto[tenant] = record.sequence
                head = {"tenant": tenant, "sequence": record.sequence, "timestamp_ms": record.timestamp_ms}
                for op in record.ops:
                    detail = {"op": type(op).__name__, **_detail(view, tenant_id, op)}
                    rows.append({**head, **detail, "watermarks": record.watermarks})
    return {"rows": rows, "upto": upto, "more": more, "registered": registered}


def _detail(view: View, tenant_id: int, op: o.ManifestOp) -> dict[str, Any]:
    if not isinstance(op, o.UpsertChunk):
        return {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(op).items()}
    c = op.chunk
    return {
        "path": _path(view, tenant_id, c.ino),
        "ino": c.ino,
        "generation": c.generation,
        "chunk_id": c.chunk_id,
        "index": c.index,
        "length": c.length,
        "sha256": c.sha256.hex(),
        "key": c.key,
        "superseded": c.superseded,
    }


def _path(view: View, tenant_id: int, ino: int) -> str:
    """As it is now; "" for what has no name any more."""
    try:
        return namespace.path_of(view, tenant_id, ino).decode(errors="backslashreplace")
    except OSError:
        return ""


async def acknowledge(mounted: Mounted, args: Acknowledge, _: Tell) -> dict[str, int]:
    """Where the cursor stands now, by tenant."""
    _check(args.cursor)
    volume = mounted.volume
    stands = {}
    for tenant, sequence in args.sequences.items():
        [tenant_id] = tenants_named(volume, tenant)
        await result_of(volume.writer.submit(tenant_id, partial(feed.acknowledge, name=args.cursor, sequence=sequence)))
        row = volume.catalog.get(tenant_id, t.CURSORS, args.cursor)
        stands[tenant] = row.acknowledged if row is not None else 0
    return stands


async def cursors(mounted: Mounted, args: Cursors, _: Tell) -> list[dict[str, Any]]:
    volume = mounted.volume
    tenants = tenants_named(volume, args.tenant)
    if args.forget:
        await _forget(volume, tenants, args.forget)
    with volume.catalog.view() as view:
        return [
            {
                "cursor": name,
                "tenant": tenant,
                "acknowledged": row.acknowledged,
                "newest": view.get(tenant_id, t.COUNTERS, "change_sequence") or 0,
                "registered_ms": row.registered_ms,
                "seen_ms": row.seen_ms,
            }
            for tenant_id, tenant in tenants.items()
            for name, row in view.scan(tenant_id, t.CURSORS)
        ]


async def _forget(volume: Volume, tenants: Mapping[int, str], name: str) -> None:
    with volume.catalog.view() as view:
        known = [tenant_id for tenant_id in tenants if view.get(tenant_id, t.CURSORS, name) is not None]
    if not known:
        raise ControlError(f"{name}: there is no such cursor")
    for tenant_id in known:
        await result_of(volume.writer.submit(tenant_id, partial(feed.unregister, name=name)))
