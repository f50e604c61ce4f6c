"""`aof2 report OUT.html`: the volume's history as one page, or as JSON. Read-only, daemon or not."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, LimitError
from aof2.engine.units import format_size, parse_size
from aof2.fs.cli import output
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import CliError, complain
from aof2.fs.cli.progress import counted

if TYPE_CHECKING:
    from aof2.engine.catalog.store import View
    from aof2.engine.history.history import History
    from aof2.engine.remote.store import RemoteStore
    from aof2.engine.settings import Settings
    from aof2.fs.report.page import Waiting

PACKAGES = {"numpy": "numpy", "plotly": "plotly"}
# Sizes that the page shows beside those that were asked for, as shares of the one in use.
SHARES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)


@click.command(epilog="Example: aof2 report /tmp/aof2.html --what-if hot_bytes=40GiB")
@click.argument("out", metavar="[OUT.html]", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--what-if", "what_if", metavar="hot_bytes=SIZE", multiple=True, help="A cache size to replay; repeatable."
)
@click.option("--price", "prices", metavar="NAME=DOLLARS", multiple=True,
              help="put, get, delete (a thousand), transfer (a GiB), storage (a GiB a month).")  # fmt: skip
@click.option("--local", is_flag=True, help="Only the log on this disk; ask the remote nothing.")
@volume_options("The numbers as one JSON object; OUT.html may be left out.")
def report(
    out: Path | None, what_if: tuple[str, ...], prices: tuple[str, ...], local: bool, as_json: bool, conf: str | None
) -> None:
    """The volume's history as one page that needs no network.

    Bytes per tier over time, what was fetched and evicted, hit rate, thrash, the hottest directories, requests and
    their cost, and what is not durable yet: from the manifest log, here and in the remote.
    """
    if out is None and not as_json:
        raise click.UsageError("name the page to write, or ask for --json")
    _check_installed(drawn=out is not None)
    from aof2.engine.history.cost import prices_of
    from aof2.engine.inspect.rows import MANIFEST_DIR, open_rows

    asked, table = [_size_of(text) for text in what_if], prices_of(prices)
    settings = load_conf(conf)
    state_dir = settings.volume.state_dir
    with open_rows(state_dir) as rows, rows.view() as view, _store(settings, local) as store:
        from aof2.engine.history.history import read_history
        from aof2.engine.history.sources import Log

        with counted("logs") as tell:
            found = read_history(
                Log(state_dir / MANIFEST_DIR, store), view, prices=table, what_if=asked, shares=SHARES, tell=tell
            )
        waiting = _waiting(settings, view)
    if out is not None:
        _write(out, found, waiting, settings)
    if as_json:
        output.print_json(found)
    else:
        for note in found.notes:
            complain(f"note: {note}")
        output.print_facts(_facts(found, out))


def _check_installed(*, drawn: bool) -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None and (drawn or name != "plotly")]
    if missing:
        raise CliError(f"{' and '.join(missing)} are not installed; run: pip install 'aof2[report]'")


def _size_of(text: str) -> int:
    name, _, value = text.partition("=")
    if name != "hot_bytes":
        raise LimitError(f"--what-if {text}: only hot_bytes can be replayed, as in hot_bytes=40GiB")
    try:
        size = parse_size(value)
    except ValueError as e:
        raise LimitError(f"--what-if {text}: {e}") from None
    if not size:
        raise LimitError(f"--what-if {text}: a cache has 1 byte at least")
    return size


@contextlib.contextmanager
def _store(settings: Settings, local: bool) -> Iterator[RemoteStore | None]:
    """The remote, if it answers: without it the history is what this disk has, which is said."""
    from aof2.engine.remote.open import open_remote

    directory = settings.remote.directory
    if local or (directory is not None and not directory.is_dir()):
        if not local:
            complain(f"note: the remote is away ({directory}); the history is what this disk has")
        yield None
        return
    with contextlib.closing(open_remote(Env(), settings.remote)) as store:
        try:
            next(iter(store.list("manifest/")), None)
        except Aof2Error as e:
            complain(f"note: the remote is away ({e}); the history is what this disk has")
            yield None
            return
        yield store


def _waiting(settings: Settings, view: View) -> Waiting:
    from aof2.engine.inspect.left import left_here
    from aof2.engine.inspect.rows import is_live
    from aof2.engine.inspect.status import volume_status
    from aof2.fs.report.page import Waiting

    state_dir = settings.volume.state_dir
    left = left_here(view, state_dir)
    status = volume_status(view, settings, live=is_live(state_dir), now_ms=time.time_ns() // 1_000_000)
    lines = [
        f"log of {one.tenant or 'the volume'}: {one.lag_records:,} records, {format_size(one.lag_bytes)}"
        for one in status.replication
        if one.lag_records
    ]
    return Waiting(left.files, left.bytes, left.paths, lines)


def _write(out: Path, found: History, waiting: Waiting, settings: Settings) -> None:
    from aof2.fs.report.page import page_of

    text = page_of(found, waiting, str(settings.volume.mountpoint), time.time_ns() // 1_000_000)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _facts(found: History, out: Path | None) -> list[tuple[str, str]]:
    from aof2.fs.report.page import percent

    facts = [
        ("records", f"{found.records}"),
        *((f"{tier} bytes", format_size(size)) for tier, size in found.tiers.items()),
        ("fetched", f"{format_size(found.totals['hydrated_bytes'])} in {found.totals['hydrations']} step(s)"),
        (
            "evicted",
            f"{format_size(found.totals['evicted_bytes'])}, {found.totals['quick_returns']} back in 10 minutes",
        ),
        ("hit rate", f"{percent(found.hit_rate)} of {found.measured.uses} open(s)"),
    ]
    for one in found.what_if:
        if one.hot_bytes in found.asked:
            facts.append((f"what if {format_size(one.hot_bytes)}", percent(one.hit_rate)))
    return [*facts, ("page", str(out))]
