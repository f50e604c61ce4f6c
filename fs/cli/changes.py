"""`aof2 changes`: the change feed, a row a change, for scripts and for people."""

from __future__ import annotations

import sys
from typing import Any

import click

from aof2.engine.settings import Settings
from aof2.fs.cli import output
from aof2.fs.cli.client import ask
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import complain
from aof2.fs.cli.records import iso_time

COLUMNS = ("tenant", "sequence", "time (UTC)", "change", "chunk", "path", "generation", "bytes", "key")
CURSOR_COLUMNS = ("cursor", "tenant", "acknowledged", "newest", "last used (UTC)")
WAIT_S = 15.0
OPS = {"UpsertChunk": "chunk", "DeleteChunk": "chunk deleted", "SetWatermark": "watermark"}


@click.command(epilog="Example: aof2 changes --cursor backup --follow --json")
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--cursor", metavar="NAME", default="cli", help='Whose place in the feed. Default: "cli".')
@click.option("--follow", is_flag=True, help="Go on with what comes, until interrupted.")
@click.option("--peek", is_flag=True, help="Do not acknowledge: the next time begins at the same place.")
@click.option(
    "--ack", metavar="N", type=click.IntRange(min=0), help="Show nothing: of TENANT, all up to N is processed."
)
@click.option("--cursors", "list_cursors", is_flag=True, help="Show the cursors there are.")
@click.option("--forget", is_flag=True, help="Drop the cursor: the feed is no longer kept for it.")
@volume_options("One JSON object a line.")
def changes(
    tenant: str | None,
    cursor: str,
    follow: bool,
    peek: bool,
    ack: int | None,
    list_cursors: bool,
    forget: bool,
    as_json: bool,
    conf: str | None,
) -> None:
    """What changed in the catalog of chunks: of TENANT, or of all, from where the cursor stands.

    The feed is kept for its cursors: the first call with a new name registers it and shows nothing; later ones show
    what changed since. What was shown is acknowledged once it is written to the output, so it may be shown again after
    a crash and is never left out. With --peek the cursor stays; --ack moves it when the work is done. A cursor that was
    not used for retention.cursor_idle is dropped.
    """
    settings = load_conf(conf)
    if ack is not None:
        _acknowledge(settings, tenant, cursor, ack, as_json)
    elif list_cursors or forget:
        _cursors(settings, tenant, cursor if forget else "", as_json)
    else:
        _show(settings, tenant, cursor, follow=follow, peek=peek, as_json=as_json)


def _acknowledge(settings: Settings, tenant: str | None, cursor: str, ack: int, as_json: bool) -> None:
    if tenant is None:
        raise click.UsageError("--ack N: sequences are a tenant's; name it")
    stands = ask(settings, "acknowledge", cursor=cursor, sequences={tenant: ack})
    said = f"{cursor} stands at {stands[tenant]} of {tenant}"
    output.print_done({"cursor": cursor, "acknowledged": stands}, said, as_json=as_json)


def _cursors(settings: Settings, tenant: str | None, forget: str, as_json: bool) -> None:
    found = ask(settings, "cursors", tenant=tenant, forget=forget)
    output.print_found(found, CURSOR_COLUMNS, _cursor_cells, as_json=as_json)


def _cursor_cells(one: dict[str, Any]) -> tuple[str, ...]:
    return (one["cursor"], one["tenant"], str(one["acknowledged"]), str(one["newest"]), iso_time(one["seen_ms"]))


def _show(settings: Settings, tenant: str | None, cursor: str, *, follow: bool, peek: bool, as_json: bool) -> None:
    after: dict[str, int] = {}
    headed = as_json
    while True:
        wait_s = WAIT_S if follow else 0.0
        page = ask(settings, "changes", cursor=cursor, tenant=tenant, after=after, wait_s=wait_s)
        if page["registered"]:
            names = ", ".join(page["registered"])
            complain(f"note: cursor {cursor} is new in {names}: what changes from now on is kept for it")
        for row in page["rows"]:
            if not headed:
                output.print_tsv(COLUMNS)
                headed = True
            if as_json:
                output.print_json(row)
            else:
                output.print_tsv(_cells(row))
        sys.stdout.flush()  # what is acknowledged is out of our buffers
        after |= page["upto"]
        if page["upto"] and not peek:
            ask(settings, "acknowledge", cursor=cursor, sequences=page["upto"])
        if not follow and not page["more"]:
            return


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    op = row["op"]
    what = OPS.get(op, op)
    if op == "SetWatermark":
        what = f"watermark {row['component']} {row['generation']}"
    elif row.get("superseded"):
        what = "chunk superseded"
    generation = "" if op == "SetWatermark" else row.get("generation", "")
    cells = (row.get("chunk_id", ""), row.get("path", ""), generation, row.get("length", ""), row.get("key", ""))
    return (row["tenant"], str(row["sequence"]), iso_time(row["timestamp_ms"]), what, *map(str, cells))
