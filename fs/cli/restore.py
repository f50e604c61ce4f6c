"""`aof2 restore`: a working state_dir on an empty machine, from the remote alone, and what could not be found there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from aof2.engine.env import Env
from aof2.engine.opening import log_settings
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.lost import Lost, Why
from aof2.engine.replicate.restore import RestoreReport
from aof2.engine.replicate.restore import restore as run_restore
from aof2.engine.settings import Settings
from aof2.engine.settings.remote import RemoteSettings, parse_url
from aof2.engine.units import format_size
from aof2.fs.cli import output
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import CliError, complain, fail_if
from aof2.fs.cli.records import iso_time

WHY_TEXT = {
    Why.NEVER_SEALED: "it was still being written",
    Why.NEVER_UPLOADED: "it was never uploaded",
    Why.BLOB_MISSING: "its blob is missing",
    Why.WAL_MISSING: "its WAL segment is missing",
}


@click.command(epilog="Example: aof2 restore --from s3://bucket/prefix --conf /etc/aof2/mount.conf")
@click.option("--from", "url", metavar="URL", required=True, help="The remote: s3://bucket/prefix or file:///dir.")
@volume_options("The whole report as one JSON object.")
def restore(url: str, as_json: bool, conf: str | None) -> None:
    """Build the conf's state_dir from a remote, on a machine that has nothing else.

    state_dir must be empty or not there; the remote is only read. Endpoint, region, timeout and retries are the conf's.
    What could not be found is listed, and so is where the log ends, and whether the writer unmounted cleanly after it:
    only then it is complete. Exit code 0: everything that the log names is back; 1: something is missing (the volume
    can be mounted all the same), or it failed and state_dir is as it was.
    """
    settings = load_conf(conf)
    remote = _remote(settings, url)
    env = Env()
    with _progress() as tell, contextlib.closing(open_remote(env, remote)) as store:
        report = run_restore(env, store, settings.volume.state_dir, log_settings=log_settings(settings), progress=tell)
    missing = _missing(report)
    if as_json:
        whole = {"complete": report.complete, "whole": report.whole, **msgspec.to_builtins(report)}
        output.print_json({**whole, "gaps": report.gaps})
    else:
        output.print_facts(_facts(report, url, missing))
        for path in report.rescued:
            complain(f"note: {path}: its upload was complete, though the log did not say so yet")
        for line in missing:
            complain(f"not found: {line}")
    if not _same_place(settings.remote.url, url):
        complain(f"note: remote.url in the conf is {settings.remote.url}; to go on with this volume, set it to {url}")
    fail_if(not report.whole)


def _remote(settings: Settings, url: str) -> RemoteSettings:
    remote = settings.remote
    try:
        parsed = parse_url(url)
    except ValueError as e:
        raise CliError(str(e).replace("remote.url =", "--from", 1)) from None
    if parsed.scheme == "file":
        remote = msgspec.structs.replace(remote, endpoint_url="")
        if not parsed.path.is_dir():  # opening it would make it
            raise CliError(f"{parsed.path}: no such directory; is the remote's disk mounted?")
        there, here = os.path.realpath(parsed.path), os.path.realpath(settings.volume.state_dir)
        if Path(here).is_relative_to(there) or Path(there).is_relative_to(here):
            raise CliError(f"volume.state_dir ({here}) and --from ({there}) overlap; give each a folder of its own")
    return msgspec.structs.replace(remote, url=url)


def _same_place(one: str, two: str) -> bool:
    try:
        return parse_url(one) == parse_url(two)
    except ValueError:
        return False


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function to call with what is done now: one line that changes on a terminal, else a line each."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(f"restore: {text}", err=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("restore") as status:
        yield lambda text: status.update(f"restore: {escape(text)}")


def _facts(report: RestoreReport, url: str, missing: list[str]) -> list[tuple[str, str]]:
    records = sum(s.records for s in report.streams)
    chunks = sum(s.chunks_fetched for s in report.streams)
    return [
        ("volume", report.volume_uuid),
        ("from", url),
        ("state_dir", report.state_dir),
        ("verdict", _verdict(report, missing)),
        ("log ends", _log_ends(report)),
        ("writer", _writer(report)),
        ("tenants", ", ".join(report.tenants) or "none"),
        ("logs", f"{len(report.streams)} stream(s), {chunks} chunk(s), {records} record(s) replayed"),
        ("blobs", f"{report.checked_blobs} looked up"),
        ("audit", f"{sum(a.records for a in report.audit)} record(s)"),
        ("rescued", str(len(report.rescued))),
        ("lost", str(len(report.lost))),
    ]


def _verdict(report: RestoreReport, missing: list[str]) -> str:
    if missing:
        return f"restored, but {len(missing)} thing(s) could not be found"
    return "complete" if report.complete else "restored up to where the log ends; its end may be lost"


def _log_ends(report: RestoreReport) -> str:
    ends = [f"{end.tenant or 'volume'} at record {end.ordinal}, {iso_time(end.at_ms)} UTC" for end in report.log_ends]
    return "; ".join(ends) or "there is none"


def _writer(report: RestoreReport) -> str:
    if report.clean:
        return f"unmounted cleanly at {iso_time(report.closed_at_ms)} UTC, and the log reaches that"
    if report.closed_at_ms:
        return f"unmounted at {iso_time(report.closed_at_ms)} UTC, and the log does not reach that"
    return "did not unmount after that: what it wrote later, if anything, is not in the remote"


def _missing(report: RestoreReport) -> list[str]:
    """A line each, gaps in the logs first: what is behind them may be missing, and the report cannot name it."""
    lines = list(report.gaps)
    lines += [f"tenant {name}: nothing of its log was uploaded; it comes back empty" for name in report.never_uploaded]
    lines += [_lost_line(lost) for lost in report.lost]
    lines += [f"audit log of {a.tenant}: {a.problem}" for a in report.audit if a.problem]
    return lines


def _lost_line(lost: Lost) -> str:
    path = lost.path if lost.path.startswith(f"{lost.tenant}/") else f"{lost.tenant}/{lost.path.lstrip('/')}"
    keys = f" ({', '.join(lost.keys)})" if lost.keys else ""
    return f"{path}, generation {lost.generation}, {format_size(lost.size)}: {WHY_TEXT[lost.why]}{keys}; {lost.outcome}"
