"""`aof2 snapshot`: moments of a tenant that are kept."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from aof2.engine.inspect.snapshots import SnapshotStatus, every_snapshot
from aof2.fs.cli import output
from aof2.fs.cli.client import ask, ask_or_read
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.records import iso_time
from aof2.fs.wording import human_size

KEPT = list[SnapshotStatus]
COLUMNS = ("snapshot", "name", "taken (UTC)", "files", "bytes", "complete")


@click.group()
def snapshot() -> None:
    """Moments of a tenant: what its files were then is kept until the snapshot is deleted.

    Generations and deleted files that a snapshot needs are not pruned, whatever retention says: they are listed by aof2
    generations, and come back with aof2 revert and aof2 undelete. What there was, with names, owners, sizes and hashes,
    is in the remote as snapshots/TENANT/NUMBER/meta-….json.
    """


@snapshot.command(epilog="Example: aof2 snapshot create default --name before-the-upgrade")
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--name", metavar="TEXT", default="", help="To know it by.")
@volume_options("One JSON object a line.")
def create(tenant: str | None, name: str, as_json: bool, conf: str | None) -> None:
    """Take a snapshot of TENANT, or of each: of all that is closed, which is uploaded first.

    Of a file that is open for writing, it is what the file was in the remote before.
    """
    _print(ask(load_conf(conf), "snapshot", action="create", tenant=tenant, name=name), as_json)


@snapshot.command("list", epilog="Example: aof2 snapshot list --json")
@volume_options("One JSON object a line.")
def list_(as_json: bool, conf: str | None) -> None:
    """The snapshots there are. Also works while nothing is mounted."""
    kept = ask_or_read(load_conf(conf), KEPT, lambda view: list(every_snapshot(view)), "snapshot", action="list")
    _print(kept, as_json)


@snapshot.command(epilog="Example: aof2 snapshot delete default/3")
@click.argument("snapshot_", metavar="SNAPSHOT")
@volume_options("One JSON object a line.")
def delete(snapshot_: str, as_json: bool, conf: str | None) -> None:
    """Let go of a snapshot, TENANT/NUMBER: what only it kept goes with the next gc."""
    _print(ask(load_conf(conf), "snapshot", action="delete", snapshot=snapshot_), as_json)


def _print(answer: Any, as_json: bool) -> None:
    found = msgspec.convert(answer, KEPT)
    output.print_found(found, COLUMNS, _cells, as_json=as_json, folding={"name": 20})


def _cells(one: SnapshotStatus) -> tuple[str, ...]:
    complete = "yes" if one.complete else "no"
    return (one.snapshot, one.name, iso_time(one.taken_ms), str(one.files), human_size(one.bytes), complete)
