"""`aof2 status` and `aof2 why`: what a volume or a file is like, and how it came to be. Read-only, daemon or not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.follow.mark import own_dir_of
from aof2.engine.inspect.paths import NoSuchPathError, resolve
from aof2.engine.inspect.receipt import Receipt, find_receipt
from aof2.engine.inspect.rows import MANIFEST_DIR, OpenRows, is_live, open_rows
from aof2.engine.inspect.status import (
    ChunkStatus,
    ObjectStatus,
    TenantStatus,
    TreeStatus,
    VolumeStatus,
    object_status,
    tree_status,
    volume_status,
)
from aof2.engine.inspect.why import Step, history
from aof2.engine.manifest.reader import Chunk
from aof2.engine.remote.keys import is_pack
from aof2.engine.settings import Settings
from aof2.engine.units import format_size
from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount, placed, served
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import complain
from aof2.fs.cli.progress import counted
from aof2.fs.cli.records import iso_time, style
from aof2.fs.cli.top import damaged_logs, jobs_line, replication_line, summary
from aof2.fs.control.client import NO_DAEMON
from aof2.fs.control.protocol import ProtocolError

Facts = VolumeStatus | TreeStatus | ObjectStatus
KINDS: dict[str, type[Facts]] = {"volume": VolumeStatus, "tree": TreeStatus, "object": ObjectStatus}
TENANT_COLUMNS = ("tenant", "kind", "objects", "bytes", "hot", "warm", "remote", "dirty", "needs repair")
CHUNK_COLUMNS = ("chunk", "index", "bytes", "hot", "warm", "sha256", "key")
WHY_COLUMNS = ("time (UTC)", "event", "from", "to", "bytes", "chunk", "generation", "reason", "key")


@click.command(epilog="Example: aof2 status /aof2/default/report.parquet --json")
@click.argument("path", metavar="[PATH]", required=False)
@volume_options("One JSON object.")
def status(path: str | None, as_json: bool, conf: str | None) -> None:
    """What the volume, a directory or a file is like now.

    PATH is in the mount, or TENANT/…. The volume: tenants with bytes per tier, cache use and limit, dirty bytes, jobs.
    A file: size, generation, state, bytes per tier, chunks with ids, hashes and remote keys, and whether the remote
    alone restores it, blobs and log (durable), with the receipt: the position of the log at which it became so.
    `replication`: how far the remote has the log, and why it stands.
    """
    settings = load_conf(conf)
    try:
        facts, daemon = _ask(settings, path)
    except NO_DAEMON:
        with open_rows(settings.volume.state_dir) as rows:
            _warn(rows)
            facts, daemon = _facts(settings, rows, path), {}
    receipt = _receipt(settings, path) if isinstance(facts, ObjectStatus) and facts.durable else None
    if as_json:
        more = {"receipt": receipt} if isinstance(facts, ObjectStatus) else {}
        output.print_json({**msgspec.structs.asdict(facts), **more, **daemon})
        return
    for name, value in daemon.items():
        if name != "mount":
            output.print_facts([(name, _yes(value))])
    if isinstance(facts, VolumeStatus):
        _print_volume(facts, daemon)
    elif isinstance(facts, TreeStatus):
        _print_tree(facts)
    else:
        _print_object(facts, receipt)


def _receipt(settings: Settings, path: str | None) -> Receipt | None:
    """Where in the log the file became durable. Of a file that moved meanwhile, or a log that is away: none."""
    settings = placed(settings)
    manifest_dir = settings.volume.state_dir / MANIFEST_DIR
    with contextlib.suppress(NoSuchPathError), open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        file = resolve(view, settings.volume.mountpoint, in_mount(settings, [path])[0]) if path else None
        if file is not None and file.is_file:
            return find_receipt(view, manifest_dir, file, partial(_earlier_chunks, settings, file.tenant_id, _untold))
    return None


def _untold(_done: int, _total: int) -> None:
    """For whom progress is of no interest."""


def _ask(settings: Settings, path: str | None) -> tuple[Facts, dict[str, Any]]:
    """The same facts from the daemon, and what only it knows. NotMountedError when there is none."""
    settings = served(settings)
    answer = ask(settings, "status", path=in_mount(settings, [path])[0] if path else None)
    for name, kind in KINDS.items():
        if name in answer:
            return msgspec.convert(answer.pop(name), kind), answer
    raise ProtocolError("the daemon answers what this command does not know; remount")


def _facts(settings: Settings, rows: OpenRows, path: str | None) -> Facts:
    with rows.view() as view:
        place = resolve(view, settings.volume.mountpoint, in_mount(settings, [path])[0]) if path else None
        if place is None:
            live = is_live(settings.volume.state_dir)
            return volume_status(view, settings, live=live, now_ms=time.time_ns() // 1_000_000, rebuilt=rows.rebuilt)
        return object_status(view, settings, place) if place.is_file else tree_status(view, settings, place)


def _warn(rows: OpenRows) -> None:
    for stream_id, why in rows.damaged.items():
        complain(f"note: stream {stream_id} is shown as far as its log can be read: {why}")


def _print_volume(v: VolumeStatus, daemon: dict[str, Any]) -> None:
    age = "none yet" if v.snapshot_age_s is None else f"{v.snapshot_age_s:.0f} s old"
    output.print_facts(
        [
            ("volume", v.state_dir),
            ("remote", v.remote),
            ("daemon", "running" if v.live else "not running"),
            ("hot", f"{format_size(v.hot_bytes)} of {format_size(v.hot_limit_bytes)}"),
            ("warm", f"{format_size(v.warm_bytes)} of {format_size(v.warm_limit_bytes)}"),
            ("dirty", format_size(v.dirty_bytes)),
            ("jobs", jobs_line(v)),
            ("log", f"{format_size(v.log_bytes)}, oldest snapshot {age}"),
            ("replication", replication_line(v.replication)),
            ("needs repair", str(v.needs_repair)),
            *_packs(v),
            *damaged_logs(v),
            *(summary(daemon["mount"]) if "mount" in daemon else ()),
        ]
    )
    output.print_found(v.tenants, TENANT_COLUMNS, _tenant_cells)


def _packs(v: VolumeStatus) -> list[tuple[str, str]]:
    """What small files that travelled together take in the remote, and how much of that is in use."""
    taken, used = sum(one.pack_bytes for one in v.tenants), sum(one.packed_bytes for one in v.tenants)
    count = sum(one.packs for one in v.tenants)
    if not taken:
        return []
    share = f"{100 * used // taken} % in use, amplification {v.pack_amplification:.2f}"
    return [("packs", f"{count} of {format_size(taken)}, {share}")]


def _tenant_cells(one: TenantStatus) -> tuple[str, ...]:
    sizes = (one.bytes, one.hot_bytes, one.warm_bytes, one.remote_bytes, one.dirty_bytes)
    return (one.tenant, one.kind, str(one.objects), *map(format_size, sizes), str(one.needs_repair))


def _print_tree(one: TreeStatus) -> None:
    output.print_facts(
        [
            ("path", one.path),
            ("files", str(one.objects)),
            ("bytes", format_size(one.bytes)),
            ("durable", _yes(one.durable)),
            ("dirty", f"{one.dirty_objects} file(s), {format_size(one.dirty_bytes)}"),
            ("hot", format_size(one.hot_bytes)),
            ("warm", format_size(one.warm_bytes)),
            ("remote", format_size(one.remote_bytes)),
        ]
    )


def _print_object(one: ObjectStatus, receipt: Receipt | None) -> None:
    output.print_facts(
        [
            ("path", one.path),
            ("size", str(one.size)),
            ("generation", str(one.generation)),
            ("state", one.state),
            ("sealed", _yes(one.sealed)),
            ("dirty", _yes(one.dirty)),
            ("durable", _yes(one.durable)),
            *([("receipt", _place(receipt))] if receipt is not None else ()),
            ("sha256", one.sha256 or "-"),
            ("hot", format_size(one.hot_bytes)),
            ("warm", format_size(one.warm_bytes)),
            ("remote", format_size(one.remote_bytes)),
        ]
    )
    if one.chunks:
        output.print_found(one.chunks, CHUNK_COLUMNS, _chunk_cells, folding={"sha256": 16, "key": 24})


def _place(r: Receipt) -> str:
    since = "" if r.exact else ", at the latest"
    return f"stream {r.stream_id}, record {r.ordinal} (chunk {r.chunk_index}, byte {r.chunk_offset}){since}"


def _chunk_cells(c: ChunkStatus) -> tuple[str, ...]:
    sizes = (c.chunk_id, c.index, c.bytes, c.hot_bytes, c.warm_bytes)
    place = f"{c.key} from {c.offset}, {c.stored_bytes} bytes" if is_pack(c.key) else c.key or "-"
    return (*map(str, sizes), c.sha256, place)


@click.command(epilog="Example: aof2 why /aof2/default/report.parquet")
@click.argument("path", metavar="PATH")
@click.option("--local", is_flag=True, help="Only what the log on this disk says; ask the remote nothing.")
@volume_options("One JSON object.")
def why(path: str, local: bool, as_json: bool, conf: str | None) -> None:
    """The tier history of a file, from the manifest log: when it moved, from where, how many bytes, under which key.

    From the log on this disk, and where that does not go back to the file's beginning, from the copies in the remote.
    What was not looked at is said.
    """
    settings = placed(load_conf(conf))
    inside = in_mount(settings, [path])[0]
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        _warn(rows)
        file = resolve(view, settings.volume.mountpoint, inside)
        if file is None or not file.is_file:
            raise NoSuchPathError(f"{path}: not a file; name one")
        with counted("log chunks of the remote") as tell:
            earlier = None if local else partial(_earlier_chunks, settings, file.tenant_id, tell)
            own = own_dir_of(settings.volume.state_dir, file.tenant_id)
            own_dir = own if own.is_dir() else None
            found = history(view, settings.volume.state_dir / MANIFEST_DIR, file, earlier, own_dir)
    if as_json:
        output.print_json(found)
        return
    columns = WHY_COLUMNS if own_dir is None else (*WHY_COLUMNS, "machine")
    output.print_found(found.steps, columns, _why_cells, folding={"key": 24}, style=lambda s: style(s.event))
    for damage in found.damage:
        complain(f"note: {damage}")
    if found.earlier_records:
        complain(f"note: {found.path}: the first {found.earlier_records} record(s) of the log were not looked at")


def _earlier_chunks(
    settings: Settings, stream_id: int, tell: Callable[[int, int], None], before: int | None
) -> Iterator[Chunk]:
    """Older chunks of the log, out of the remote, as far as it has them and answers."""
    from aof2.engine.remote.open import open_remote
    from aof2.engine.replicate.listing import RemoteLog

    directory = settings.remote.directory
    if directory is not None and not directory.is_dir():  # opening it would make it
        complain(f"note: the remote is away: {directory}: no such directory; is its disk mounted?")
        return
    try:
        with contextlib.closing(open_remote(Env(), settings.remote)) as store:
            log = RemoteLog(store, stream_id)
            wanted = sorted((i for i in log.inventory.chunk_indexes() if before is None or i < before), reverse=True)
            for done, index in enumerate(wanted):
                tell(done, len(wanted))
                yield log.chunk(index)[1]
    except Aof2Error as e:
        complain(f"note: the log in the remote was read no further: {e}")


def _why_cells(s: Step) -> tuple[str, ...]:
    return (
        iso_time(s.timestamp_ms),
        s.event,
        s.source or "-",
        s.target or "-",
        "-" if s.bytes is None else str(s.bytes),
        str(s.chunk_id),
        str(s.generation),
        s.reason or "-",
        s.key or "-",
        *([s.machine] if s.machine else ()),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
