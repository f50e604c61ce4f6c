"""`aof2 top`: what a mounted volume is doing, once a second. Asks the daemon, which counts no more often than that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aof2.engine.inspect.status import VolumeStatus
from aof2.engine.replicate.position import StreamReplication
from aof2.engine.settings import Settings
from aof2.fs.cli import output
from aof2.fs.cli.client import ask
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.records import iso_time
from aof2.fs.control.facts import MountStatus
from aof2.fs.wording import human_size

if TYPE_CHECKING:
    from rich.console import RenderableType

RATES = ("hydrated_bytes", "evicted_bytes", "remote_sent_bytes", "remote_received_bytes")


class Frame(msgspec.Struct, frozen=True):
    """What the daemon said, and when."""

    at_s: float
    volume: VolumeStatus
    mount: MountStatus


@click.command(epilog="Example: aof2 top --once")
@click.option("--once", is_flag=True, help="One frame, then end.")
@click.option("--every", metavar="SECONDS", type=click.FloatRange(0.2, 3600), default=1.0, help="Default: 1.")
@volume_options("One JSON object a frame.")
def top(once: bool, every: float, as_json: bool, conf: str | None) -> None:
    """What the mounted volume is doing, live: tiers, rates, open and dirty files, jobs, the remote.

    Ends with Ctrl-C. Where the output is no terminal, a frame is printed as names and values.
    """
    settings = load_conf(conf)
    if as_json or not output.on_terminal():
        _print_frames(settings, once, every, as_json)
        return
    from rich.console import Console
    from rich.live import Live

    last = _frame(settings)
    if once:
        Console().print(_drawn(last, None))
        return
    live = Live(_drawn(last, None), auto_refresh=False, screen=True)
    with contextlib.suppress(KeyboardInterrupt), live:  # which is how it ends
        while True:
            time.sleep(every)
            now = _frame(settings)
            live.update(_drawn(now, last), refresh=True)
            last = now


def _frame(settings: Settings) -> Frame:
    answer = ask(settings, "status", light=True)
    volume = msgspec.convert(answer["volume"], VolumeStatus)
    return Frame(time.monotonic(), volume, msgspec.convert(answer["mount"], MountStatus))


def _print_frames(settings: Settings, once: bool, every: float, as_json: bool) -> None:
    last: Frame | None = None
    while True:
        now = _frame(settings)
        if as_json:
            output.print_json({"volume": now.volume, "mount": now.mount, "rates": _rates(now, last)})
        else:
            output.print_facts(_facts(now, last))
        if once:
            return
        last = now
        time.sleep(every)


def _rates(now: Frame, last: Frame | None) -> dict[str, float]:
    """Bytes a second since the last frame."""
    if last is None or now.at_s <= last.at_s:
        return dict.fromkeys(RATES, 0.0)
    span_s = now.at_s - last.at_s
    return {name: max(0, getattr(now.mount, name) - getattr(last.mount, name)) / span_s for name in RATES}


def _facts(now: Frame, last: Frame | None) -> list[tuple[str, str]]:
    v, m, rates = now.volume, now.mount, _rates(now, last)
    seen = m.page_cache_hits + m.page_cache_misses
    hit_rate = f"{100 * m.page_cache_hits / seen:.0f} % of {seen} found" if seen else "not asked yet"
    unsealed = f"{m.unsealed_files} file(s), {human_size(m.unsealed_bytes)} of it not sealed"
    pinned = f"{m.pinned_files} file(s), {human_size(m.pinned_bytes)} pinned"
    return [
        ("mount", f"{m.mountpoint}, {'read-only' if m.read_only else 'read-write'}, up {uptime(m.started_ms)}"),
        *_read_only(m),
        ("transport", m.transport),
        ("passthrough", _passthrough(m)),
        ("brake", _brake(m)),
        ("memory", f"{_share(m.page_cache_bytes, m.page_cache_limit_bytes)}; {hit_rate}"),
        ("hot", f"{_share(v.hot_bytes, v.hot_limit_bytes)}; {pinned}"),
        ("warm", _share(v.warm_bytes, v.warm_limit_bytes)),
        ("open", f"{m.open_files} file(s)"),
        ("dirty", f"{human_size(v.dirty_bytes)}; {unsealed}"),
        ("fetched", f"{human_size(m.hydrated_bytes)}, {human_size(int(rates['hydrated_bytes']))}/s"),
        ("evicted", f"{human_size(m.evicted_bytes)}, {human_size(int(rates['evicted_bytes']))}/s; thrash {m.thrash}"),
        (
            "remote",
            f"{v.remote} ({_remote(m)}), up {human_size(int(rates['remote_sent_bytes']))}/s,"
            f" down {human_size(int(rates['remote_received_bytes']))}/s",
        ),
        *_follow(m),
        *([] if m.follow else [("replication", replication_line(v.replication))]),
        ("jobs", jobs_line(v)),
        ("needs repair", str(v.needs_repair)),
        *damaged_logs(v),
    ]


def jobs_line(v: VolumeStatus) -> str:
    return ", ".join(f"{count} {state}" for state, count in v.jobs.items() if count) or "none"


def replication_line(streams: Sequence[StreamReplication]) -> str:
    """The streams that lag: how far here and there, and why the log stands."""
    behind = [one for one in streams if one.lag_records]
    if not behind:
        records = sum(one.here for one in streams)
        return f"all of the log is in the remote ({records} records)"
    return "; ".join(_lag(one) for one in behind)


def _lag(one: StreamReplication) -> str:
    name = one.tenant or "volume"
    text = (
        f"{name}: record {one.here} here, {one.there} in the remote; {one.lag_records} record(s), "
        f"{human_size(one.lag_bytes)} and {one.lag_s:.1f} s behind"
    )
    if one.stands_since_ms is None:
        return text
    verb = "refused" if one.refused else "stands"
    return f"{text}; {verb} since {iso_time(one.stands_since_ms)} UTC: {one.stands_because}"


def damaged_logs(v: VolumeStatus) -> list[tuple[str, str]]:
    """Tenants that are read-only because of their log, and the volume's own."""
    found = [("damaged log", f"{one.tenant} is read-only: {one.damage}") for one in v.tenants if one.damage]
    return found + ([("damaged log", f"the volume's own: {v.damage}")] if v.damage else [])


def _remote(m: MountStatus) -> str:
    if m.refused_since_ms is not None:
        return f"refuses us since {iso_time(m.refused_since_ms)} UTC: {m.refused_why}; asked again by itself"
    return "answers" if m.remote_state == "closed" else f"away, {m.remote_errors} failed request(s)"


def _read_only(m: MountStatus) -> list[tuple[str, str]]:
    """Why nothing is taken any more, where that was not asked for."""
    return [("fenced" if m.fenced else "read-only", m.read_only_why)] if m.read_only_why else []


def _follow(m: MountStatus) -> list[tuple[str, str]]:
    """How far a follower is; on a writer, who follows."""
    found: list[tuple[str, str]] = []
    if m.follow is not None:
        at = ", ".join(
            f"{one.tenant or 'volume'} at record {one.position.ordinal if one.position else 0}"
            for one in m.follow.streams
        )
        state = f"{m.follow.lag_s:.1f} s behind the log's end in the remote"
        if m.follow.away_since_ms:
            state = f"the remote is away since {iso_time(m.follow.away_since_ms)} UTC ({m.follow.why_away})"
        found.append(("follows", f"{state}; {at}"))
        found += [("log problem", problem) for problem in m.follow.problems]
    for one in m.followers:
        state = f"{one.lag_records} record(s) behind" if one.live else "not heard of, nothing is kept for it"
        found.append(("follower", f"{one.id} on {one.host}: {state}, heartbeat {one.seen_s_ago:.0f} s ago"))
    return found


def _passthrough(m: MountStatus) -> str:
    return ("on" if m.passthrough else "off") + (f": {m.passthrough_why}" if m.passthrough_why else "")


def _brake(m: MountStatus) -> str:
    """How passthrough writers keep within the room."""
    if m.brake:
        return "on: who finds no room waits for uploads"
    if not m.passthrough:
        return "not needed: every write asks"
    return f"off: {m.brake_why}; without comfortable room every write asks, and who outruns that is stopped (EPERM)"


def _share(used: int, limit: int) -> str:
    percent = f" ({100 * used / limit:.0f} %)" if limit else ""
    return f"{human_size(used)} of {human_size(limit)}{percent}"


def _drawn(now: Frame, last: Frame | None) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    for name, value in _facts(now, last):
        bad = name == "needs repair" and value != "0"
        bad |= name in ("remote", "replication", "follows") and any(
            w in value for w in ("away", "refuse", "stands since")
        )
        bad |= name in ("fenced", "damaged log", "log problem") or (name == "read-only" and now.mount.follow is None)
        head.add_row(Text(name, style="bold"), Text(value, style="red" if bad else ""))
    tenants = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("tenant", "kind", "objects", "bytes", "hot", "warm", "remote", "dirty"):
        tenants.add_column(title, justify="left" if title in ("tenant", "kind") else "right")
    for one in now.volume.tenants:
        sizes = (one.bytes, one.hot_bytes, one.warm_bytes, one.remote_bytes, one.dirty_bytes)
        tenants.add_row(one.tenant, one.kind, str(one.objects), *(human_size(n) for n in sizes))
    return Group(head, Text(""), tenants)


def uptime(started_ms: int) -> str:
    seconds = max(0, int(time.time() - started_ms / 1000))
    days, seconds = divmod(seconds, 86_400)
    clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{days} d {clock}" if days else clock


def summary(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """What `aof2 status` adds when a daemon answers."""
    m = msgspec.convert(answer, MountStatus)
    return [
        ("mount", f"{m.mountpoint}{' (read-only)' if m.read_only else ''}, pid {m.pid}, up {uptime(m.started_ms)}"),
        *_read_only(m),
        *_follow(m),
        ("transport", m.transport),
        ("passthrough", _passthrough(m)),
        ("brake", _brake(m)),
        ("open files", str(m.open_files)),
        ("not sealed", f"{m.unsealed_files} file(s), {human_size(m.unsealed_bytes)}"),
        ("pinned", f"{m.pinned_files} file(s), {human_size(m.pinned_bytes)}"),
        ("memory", f"{human_size(m.page_cache_bytes)} of {human_size(m.page_cache_limit_bytes)}"),
        ("remote is", _remote(m)),
    ]
