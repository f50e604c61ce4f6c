"""`aof2 manifest …`: a log, from its folder alone, or as a volume's tenant with its remote copy beside it.

Read-only, and works on a log being written. What needs a volume is imported when one is asked for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click
import msgspec

from aof2.engine.errors import Aof2Error, TransientError
from aof2.engine.inspect.records import COLUMNS
from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.manifest.examine import Kind
from aof2.fs.cli import output
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import EXIT_FAILED, CliError, complain
from aof2.fs.cli.progress import counted
from aof2.fs.cli.records import (
    ADVICE,
    RecordRows,
    as_object,
    complain_of,
    json_text,
    note_of,
    parse_types,
    print_table,
)
from aof2.fs.wording import explain

if TYPE_CHECKING:
    from aof2.engine.catalog.store import Catalog
    from aof2.engine.inspect.rows import OpenRows
    from aof2.engine.replicate.reconcile import ObjectFinding, StreamReport
    from aof2.engine.settings import Settings


# A look at a log does not wait long for the remote; a check of it does.
GLANCE_TIMEOUT_S = 5.0
GLANCE_RETRIES = 1
VOLUME_STREAM = 0
STREAM_COLUMNS = ("stream", "tenant", "verdict", "chunks", "snapshots", "records", "remote")


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
    name: str,
    from_chunk: int,
    types: tuple[str, ...],
    limit: int | None,
    as_json: bool,
    conf: str | None,
) -> None:
    """Print the log, a row a record.

    A directory of that name comes before a tenant. Damage is reported on stderr with its chunk and offset; the records
    before it and the chunks after it are still shown, and the exit code is 1. Uncommitted bytes at the end are only
    noted, and so are a tenant's chunks and snapshots that differ from their remote copies.
    """
    wanted = parse_types(types)
    stream = None if _is_folder(name) else _find_stream(name, conf)
    differing = _note_differences(stream) if stream else frozenset()
    rows = RecordRows(stream.folder if stream else Path(name), from_chunk, wanted, limit, differing)
    if as_json:
        for record in rows:
            output.print_json(as_object(record, rows))
    elif output.on_terminal():
        print_table(rows)
    else:
        output.print_tsv(COLUMNS)
        for record in rows:
            *cells, payload = as_object(record, rows).values()
            output.print_tsv((*cells, json_text(payload)))
    if rows.damaged:
        raise click.exceptions.Exit(EXIT_FAILED)


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
    if name is None and _has_conf(conf):
        clean = _verify_volume(load_conf(conf), as_json, deep)
    elif name is None or _is_folder(name):
        clean = _verify_folder(Path(name or "."), as_json)
    else:
        clean = _verify_tenant(_find_stream(name, conf), as_json, deep)
    if not clean:
        raise click.exceptions.Exit(EXIT_FAILED)


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
    if as_json:
        output.print_json(report)
    else:
        output.print_facts(_facts(report))
    _tell(report)
    return report.clean


def _tell(report: CheckReport) -> None:
    for finding in report.notes:
        note_of(finding)
    for finding in report.damage:
        complain_of(finding)


# -- which log ---------------------------------------------------------------------------------------------------


class _VolumeStream(NamedTuple):
    """A log of the conf's volume. `tenant` is "" for the volume's own."""

    settings: Settings
    stream_id: int
    tenant: str

    @property
    def folder(self) -> Path:
        return self.settings.volume.state_dir / "manifest" / str(self.stream_id)


def _is_folder(name: str) -> bool:
    """Whether it is a directory; else it may be a tenant. CliError for what can be neither."""
    from aof2.engine.settings.keys import TENANT_NAME

    path = Path(name)
    if path.is_dir():
        return True
    advice = "give a tenant, or the folder that holds a stream's .mlog files"
    if path.exists():
        raise CliError(f"{name}: not a directory; {advice}")
    if not TENANT_NAME.fullmatch(name):
        raise CliError(f"{name}: no such directory; {advice}")
    return False


def _has_conf(conf: str | None) -> bool:
    """Whether there is a conf to go by. One that was named and is not there is an error, not a no."""
    from aof2.engine.settings import SettingsError, find_conf
    from aof2.engine.settings.loader import CONF_VARIABLE

    try:
        find_conf(conf)
    except SettingsError:
        if conf or os.environ.get(CONF_VARIABLE):
            raise
        return False
    return True


def _find_stream(tenant: str, conf: str | None) -> _VolumeStream:
    from aof2.engine.inspect.rows import open_rows

    if not _has_conf(conf):
        raise CliError(f"{tenant}: no such directory, and no mount.conf to look up a tenant in; name one with --conf")
    settings = load_conf(conf)
    with open_rows(settings.volume.state_dir) as rows:
        names = _tenants(rows)
        why = rows.damaged.get(VOLUME_STREAM)
    for stream_id, name in names.items():
        if name == tenant:
            return _VolumeStream(settings, stream_id, name)
    if why:
        raise CliError(f"{tenant}: not among the tenants that the volume's own log still names: {why}")
    known = ", ".join(sorted(names.values())) or "none"
    raise CliError(f"{tenant}: no such directory, and no tenant of the volume; its tenants: {known}")


def _tenants(rows: OpenRows) -> dict[int, str]:
    from aof2.engine.inspect.rows import tenant_names

    with rows.view() as view:
        return tenant_names(view)


# -- the remote copy ---------------------------------------------------------------------------------------------


class _NotComparedError(Aof2Error):
    """The remote copy cannot be looked at now; the message says why."""


def _compare(stream: _VolumeStream, rows: OpenRows, *, glance: bool = False, deep: bool = False) -> StreamReport:
    """The log against the remote. A live volume deletes and bundles meanwhile: what looks bad is looked at twice.

    `_NotComparedError` when it cannot be done: for the log itself that is no damage.
    """
    from aof2.engine.env import Env
    from aof2.engine.remote.errors import RemoteMissingError
    from aof2.engine.remote.open import open_remote
    from aof2.engine.replicate.reconcile import examine_stream

    if stream.stream_id in rows.damaged:
        raise _NotComparedError(f"the log cannot be replayed: {rows.damaged[stream.stream_id]}")
    remote = stream.settings.remote
    if remote.directory is not None and not remote.directory.is_dir():  # opening it would make it
        raise _NotComparedError(f"the remote is away: {remote.directory}: no such directory; is its disk mounted?")
    if glance:
        patience = {
            "timeout_s": min(remote.timeout_s, GLANCE_TIMEOUT_S),
            "retries": min(remote.retries, GLANCE_RETRIES),
        }
        remote = msgspec.structs.replace(remote, **patience)
    catalog = cast("Catalog", rows)  # only its rows are read
    try:
        store = open_remote(Env(), remote)
        try:
            with contextlib.suppress(RemoteMissingError):  # deleted since it was listed
                report = examine_stream(store, catalog, stream.folder, stream.stream_id, deep=deep)
                if report.clean:
                    return report
            return examine_stream(store, catalog, stream.folder, stream.stream_id, deep=deep)
        finally:
            store.close()
    except TransientError as e:
        raise _NotComparedError(f"the remote is away: {e}") from None
    except (Aof2Error, OSError, ValueError) as e:
        raise _NotComparedError(explain(e)) from None


def _note_differences(stream: _VolumeStream) -> frozenset[int]:
    """Says which remote copies differ; the chunks among them."""
    from aof2.engine.inspect.rows import open_rows
    from aof2.engine.remote import keys
    from aof2.engine.replicate.reconcile import Status

    try:
        with open_rows(stream.settings.volume.state_dir) as rows:
            report = _compare(stream, rows, glance=True)
    except _NotComparedError as e:
        complain(f"note: {stream.tenant}: not compared with its remote copy: {e}")
        return frozenset()
    chunks: set[int] = set()
    for found in report.of(Status.DIVERGENT):
        match keys.parse_key(found.key):
            case keys.ManifestChunkKey(_, index):
                chunks.add(index)
            case keys.ManifestBundleKey(_, first, last):
                chunks.update(range(first, last + 1))
        complain(f"note: {_object_name(found.key)} differs from its remote copy ({found.detail})")
    return frozenset(chunks)


def _object_name(key: str) -> str:
    from aof2.engine.remote import keys

    match keys.parse_key(key):
        case keys.ManifestChunkKey(_, index):
            return f"chunk {index}"
        case keys.ManifestBundleKey(_, first, last):
            return f"the bundle of chunks {first} to {last}"
        case keys.ManifestSnapshotKey(_, snapshot_id):
            return f"snapshot {snapshot_id}"
    return key


# -- verify ------------------------------------------------------------------------------------------------------


def _facts(report: CheckReport) -> list[tuple[str, str]]:
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


class StreamVerified(msgspec.Struct, kw_only=True):
    """A log of a volume: checked by itself, and compared with the remote. Scripts see these names: they stay."""

    stream_id: int
    tenant: str
    clean: bool
    log: CheckReport | None
    remote: str
    """"compared", or "not compared"."""
    remote_objects: int = 0
    findings: list[ObjectFinding] = []
    damage: list[str] = []
    """What is wrong beyond `log.damage`."""
    notes: list[str] = []


def _verify_tenant(stream: _VolumeStream, as_json: bool, deep: bool) -> bool:
    from aof2.engine.inspect.rows import open_rows

    with open_rows(stream.settings.volume.state_dir) as rows:
        found = _verify_stream(stream, rows, deep)
    if as_json:
        output.print_json(found)
    elif found.log is not None:
        facts = _facts(found.log)
        verdict = "clean" if found.clean else f"damaged ({len(found.log.damage) + len(found.damage)} finding(s))"
        facts[:2] = [("tenant", stream.tenant), facts[0], ("verdict", verdict), ("remote", _remote_text(found))]
        output.print_facts(facts)
    _tell_stream(found)
    return found.clean


def _verify_volume(settings: Settings, as_json: bool, deep: bool) -> bool:
    from aof2.engine.catalog.recovery import stream_ids
    from aof2.engine.inspect.rows import open_rows

    state_dir = settings.volume.state_dir
    with open_rows(state_dir) as rows:
        names = _tenants(rows)
        present = stream_ids(state_dir / "manifest")
        found = [
            _verify_stream(_VolumeStream(settings, stream_id, names.get(stream_id, "")), rows, deep)
            for stream_id in sorted({VOLUME_STREAM, *names, *present})
        ]
    clean = all(one.clean for one in found)
    if as_json:
        output.print_json({"clean": clean, "state_dir": str(state_dir), "streams": found})
    else:
        output.print_found(found, STREAM_COLUMNS, _stream_cells, style=lambda one: "" if one.clean else "red")
    for one in found:
        _tell_stream(one)
    return clean


def _stream_cells(one: StreamVerified) -> tuple[str, ...]:
    counts = (one.log.chunks, one.log.snapshots, one.log.records) if one.log else (0, 0, 0)
    verdict = "clean" if one.clean else "damaged"
    return (str(one.stream_id), one.tenant or "-", verdict, *(str(n) for n in counts), _remote_text(one))


def _remote_text(one: StreamVerified) -> str:
    return f"{one.remote_objects} object(s)" if one.remote == "compared" else one.remote


def _tell_stream(one: StreamVerified) -> None:
    for note in one.notes:
        complain(f"note: {note}")
    if one.log is not None:
        _tell(one.log)
    for damage in one.damage:
        complain(damage)


def _verify_stream(stream: _VolumeStream, rows: OpenRows, deep: bool) -> StreamVerified:
    from aof2.engine.replicate.reconcile import Status

    label = stream.tenant or f"stream {stream.stream_id}"
    if not stream.folder.is_dir():
        gone = f"{stream.folder}: {label} has no log here; fetch what is missing from the remote"
        return StreamVerified(
            stream_id=stream.stream_id,
            tenant=stream.tenant,
            clean=False,
            log=None,
            remote="not compared",
            damage=[gone],
        )
    with counted(f"chunks of {label}") as report_progress:
        report = check(stream.folder, on_progress=report_progress)
    found = StreamVerified(
        stream_id=stream.stream_id, tenant=stream.tenant, clean=report.clean, log=report, remote="compared"
    )
    try:
        compared = _compare(stream, rows, deep=deep)
    except _NotComparedError as e:
        found.remote = "not compared"
        found.notes = [f"{label}: not compared with its remote copy: {e}"]
        return found
    found.remote_objects = len(compared.objects) - len(compared.of(Status.MISSING, Status.NEEDS_REPAIR))
    found.findings = [one for one in compared.objects if one.status is not Status.OK]
    found.notes = [f"{one.key}: {one.detail or 'not ours'}" for one in compared.of(Status.UNKNOWN)]
    found.damage = [
        f"{label}: {rule}; {ADVICE[Kind.RETENTION]}"
        for rule in compared.retention
        if not any(rule in said.message for said in report.damage)
    ]
    found.damage += [_missing_line(label, one) for one in compared.of(Status.MISSING, Status.NEEDS_REPAIR)]
    found.damage += [
        f"{label}: {_object_name(one.key)} differs from its remote copy {one.key}: {one.detail};"
        " damaged there, or another writer's"
        for one in compared.of(Status.DIVERGENT)
    ]
    found.clean = report.clean and not found.damage
    return found


def _missing_line(label: str, one: ObjectFinding) -> str:
    from aof2.engine.replicate.reconcile import Status

    advice = "; the next mount puts it again" if one.status is Status.MISSING else ""
    return f"{label}: {one.key} is missing in the remote though the log says it was uploaded: {one.detail}{advice}"
