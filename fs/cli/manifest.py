"""`aof2 manifest …`: a log, from its folder alone, or as a volume's tenant with its remote copy beside it.

Read-only, and works on a log being written. What needs a volume (`manifest_volume.py`) is imported when one is asked
for.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from aof2.engine.inspect.records import COLUMNS
from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.settings import SettingsError, find_conf
from aof2.engine.settings.keys import TENANT_NAME
from aof2.engine.settings.loader import CONF_VARIABLE
from aof2.fs.cli import output
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import CliError, fail_if
from aof2.fs.cli.progress import counted
from aof2.fs.cli.records import RecordRows, complain_of, note_of, parse_types, print_table


@click.group()
def manifest() -> None:
    """Look at a manifest log, and check it.

    DIR is the folder of one stream: its .mlog chunks, .mlogs bundles and snapshots; no volume is needed. TENANT is one
    of the conf's volume; its log is also compared with the remote. The log may be in use.
    """


@manifest.command(epilog="Example: aof2 manifest inspect default --type UploadDone --json | jq .payload.key")
@click.argument("name", metavar="TENANT|DIR")
@click.option(
    "--from", "from_chunk", metavar="CHUNK", type=click.IntRange(min=0), default=0, help="Start at this chunk."
)
@click.option("--type", "types", metavar="NAME", multiple=True, help="Only records of this type; may be repeated.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Stop after N rows.")
@volume_options("One JSON object a line.")
def inspect(
    name: str, from_chunk: int, types: tuple[str, ...], limit: int | None, as_json: bool, conf: str | None
) -> None:
    """Print the log, a row a record.

    A directory of that name comes before a tenant. Damage is reported on stderr with its chunk and offset; the records
    before it and the chunks after it are still shown, and the exit code is 1. Uncommitted bytes at the end are only
    noted, and so are a tenant's chunks and snapshots that differ from their remote copies.
    """
    wanted, folder, differing = parse_types(types), Path(name), frozenset[int]()
    if not _is_folder(name):
        from aof2.fs.cli.manifest_volume import find_stream, note_differences

        stream = find_stream(name, conf)
        folder, differing = stream.folder, note_differences(stream)
    rows = RecordRows(folder, from_chunk, wanted, limit, differing)
    if as_json:
        for record in rows:
            output.print_json(rows.as_object(record))
    elif output.on_terminal():
        print_table(rows)
    else:
        output.print_tsv(COLUMNS)
        for record in rows:
            *cells, payload = rows.as_object(record).values()
            output.print_tsv((*cells, msgspec.json.encode(payload).decode()))
    fail_if(rows.damaged)


@manifest.command(epilog="Example: aof2 manifest verify default && echo clean")
@click.argument("name", metavar="[TENANT|DIR]", required=False)
@click.option("--remote", "deep", is_flag=True, help="Read a tenant's log in the remote, too, not only the listing.")
@volume_options("The whole report as one JSON object.")
def verify(name: str | None, deep: bool, as_json: bool, conf: str | None) -> None:
    """Check a log: every checksum, the order of chunks and records, snapshots, retention, and that replay works.

    A tenant's log is compared with the remote, too: what it says was uploaded must be there, and be the same. Without
    an argument, every log of the conf's volume is checked; where there is no conf, the current directory. Exit code 0:
    clean (notes, such as an unfinished write at the end or a remote that is away, are no damage); 1: damaged.
    """
    if not has_conf(conf) if name is None else _is_folder(name):
        clean = _verify_folder(Path(name or "."), as_json)
    else:
        from aof2.fs.cli.manifest_volume import find_stream, verify_tenant, verify_volume

        if name is None:
            clean = verify_volume(load_conf(conf), as_json, deep)
        else:
            clean = verify_tenant(find_stream(name, conf), as_json, deep)
    fail_if(not clean)


@manifest.command(epilog="Example: aof2 manifest disable")
@volume_options("One JSON object.")
def disable(as_json: bool, conf: str | None) -> None:
    """Turn the log of the mounted volume off: it becomes read-only, and the log stands still.

    What is closed is uploaded first, the log's end too. A file that is open for writing is in the way:
    nothing is turned off then. The next mount does what [manifest] enabled says.
    """
    _toggle(False, as_json, conf)


@manifest.command(epilog="Example: aof2 manifest enable")
@volume_options("One JSON object.")
def enable(as_json: bool, conf: str | None) -> None:
    """Turn the log of the mounted volume on again: changes are taken."""
    _toggle(True, as_json, conf)


def _toggle(enabled: bool, as_json: bool, conf: str | None) -> None:
    from aof2.fs.cli.client import ask

    done = ask(load_conf(conf), "manifest", enabled=enabled)
    was = "" if done["changed"] else " already"
    said = f"the log is{was} on: changes are taken" if enabled else f"the log is{was} off: read-only"
    output.print_done(done, said, as_json=as_json)


def _verify_folder(folder: Path, as_json: bool) -> bool:
    with counted("chunks") as report_progress:
        report = check(folder, on_progress=report_progress)
    output.print_report(report, facts_of(report), as_json=as_json)
    tell(report)
    return report.clean


def tell(report: CheckReport) -> None:
    for finding in report.notes:
        note_of(finding)
    for finding in report.damage:
        complain_of(finding)


def facts_of(report: CheckReport) -> list[tuple[str, str]]:
    span = "" if report.first_chunk is None else f" ({report.first_chunk} to {report.last_chunk})"
    if report.replayed_snapshot_id is not None:
        replay = f"works, from snapshot {report.replayed_snapshot_id}"
    else:
        replay = "works, from the start" if report.replay_ok else "not possible"
    repair = f", {report.needs_repair} in need of repair" if report.needs_repair else ""
    facts = [
        ("folder", report.directory),
        ("verdict", "clean" if report.clean else f"damaged ({len(report.damage)} finding(s))"),
        ("chunks", f"{report.chunks}{span}, {report.sealed_chunks} sealed, {report.uploaded_chunks} uploaded"),
        ("bundles", str(report.bundles)),
        ("snapshots", str(report.snapshots)),
        ("records", f"{report.records}, the next is {report.next_ordinal}"),
        ("bytes", str(report.bytes)),
        ("replay", replay),
        ("segments", f"{report.segments}{repair}"),
        ("pending", f"{report.pending_uploads} upload(s), {report.pending_deletes} delete(s)"),
    ]
    if report.torn_bytes:
        facts.append(("uncommitted", f"{report.torn_bytes} bytes at the end"))
    if report.incomplete_events:
        facts.append(("incomplete events", str(report.incomplete_events)))
    facts += [(f"type {name}", str(count)) for name, count in report.types.items()]
    return facts


# -- which log -------------------------------------------------------------------------------------------------


def _is_folder(name: str) -> bool:
    """Whether it is a directory; else it may be a tenant. CliError for what can be neither."""
    path = Path(name)
    if path.is_dir():
        return True
    advice = "give a tenant, or the folder that holds a stream's .mlog files"
    if path.exists():
        raise CliError(f"{name}: not a directory; {advice}")
    if not TENANT_NAME.fullmatch(name):
        raise CliError(f"{name}: no such directory; {advice}")
    return False


def has_conf(conf: str | None) -> bool:
    """Whether there is a conf to go by. One that was named and is not there is an error, not a no."""
    try:
        find_conf(conf)
    except SettingsError:
        if conf or os.environ.get(CONF_VARIABLE):
            raise
        return False
    return True
