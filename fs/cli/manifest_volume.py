"""A log of the conf's volume: found by its tenant's name, checked, and compared with its remote copy.

Read-only, and works on a log being written. A remote that is away is a note, no damage.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.catalog.store import Catalog
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, TransientError
from aof2.engine.inspect.rows import MANIFEST_DIR, OpenRows, open_rows, tenant_names
from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.manifest.examine import Kind
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.reconcile import ObjectFinding, Status, StreamReport, examine_stream
from aof2.engine.settings import Settings
from aof2.fs.cli import output
from aof2.fs.cli.conf import load_conf
from aof2.fs.cli.errors import CliError, complain
from aof2.fs.cli.manifest import facts_of, has_conf, tell
from aof2.fs.cli.progress import counted
from aof2.fs.cli.records import ADVICE
from aof2.fs.wording import explain

# A look at a log does not wait long for the remote; a check of it does.
GLANCE_TIMEOUT_S = 5.0
GLANCE_RETRIES = 1
VOLUME_STREAM = 0
STREAM_COLUMNS = ("stream", "tenant", "verdict", "chunks", "snapshots", "records", "remote")


class VolumeStream(NamedTuple):
    """A log of the conf's volume. `tenant` is "" for the volume's own."""

    settings: Settings
    stream_id: int
    tenant: str

    @property
    def folder(self) -> Path:
        return self.settings.volume.state_dir / MANIFEST_DIR / str(self.stream_id)


def find_stream(tenant: str, conf: str | None) -> VolumeStream:
    if not has_conf(conf):
        raise CliError(f"{tenant}: no such directory, and no mount.conf to look up a tenant in; name one with --conf")
    settings = load_conf(conf)
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        names = tenant_names(view)
        why = rows.damaged.get(VOLUME_STREAM)
    for stream_id, name in names.items():
        if name == tenant:
            return VolumeStream(settings, stream_id, name)
    if why:
        raise CliError(f"{tenant}: not among the tenants that the volume's own log still names: {why}")
    known = ", ".join(sorted(names.values())) or "none"
    raise CliError(f"{tenant}: no such directory, and no tenant of the volume; its tenants: {known}")


# -- the remote copy ---------------------------------------------------------------------------------------------


class _NotComparedError(Aof2Error):
    """The remote copy cannot be looked at now; the message says why."""


def _compare(stream: VolumeStream, rows: OpenRows, *, glance: bool = False, deep: bool = False) -> StreamReport:
    """The log against the remote. A live volume deletes and bundles meanwhile: what looks bad is looked at twice.

    `_NotComparedError` when it cannot be done: for the log itself that is no damage.
    """
    if stream.stream_id in rows.damaged:
        raise _NotComparedError(f"the log cannot be replayed: {rows.damaged[stream.stream_id]}")
    remote = stream.settings.remote
    if remote.directory is not None and not remote.directory.is_dir():  # opening it would make it
        raise _NotComparedError(f"the remote is away: {remote.directory}: no such directory; is its disk mounted?")
    if glance:
        timeout_s, retries = min(remote.timeout_s, GLANCE_TIMEOUT_S), min(remote.retries, GLANCE_RETRIES)
        remote = msgspec.structs.replace(remote, timeout_s=timeout_s, retries=retries)
    catalog = cast(Catalog, rows)  # only its rows are read
    try:
        with contextlib.closing(open_remote(Env(), remote)) as store:
            with contextlib.suppress(RemoteMissingError):  # deleted since it was listed
                report = examine_stream(store, catalog, stream.folder, stream.stream_id, deep=deep)
                if report.clean:
                    return report
            return examine_stream(store, catalog, stream.folder, stream.stream_id, deep=deep)
    except TransientError as e:
        raise _NotComparedError(f"the remote is away: {e}") from None
    except (Aof2Error, OSError, ValueError) as e:
        raise _NotComparedError(explain(e)) from None


def note_differences(stream: VolumeStream) -> frozenset[int]:
    """Says which remote copies differ; the chunks among them."""
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
    match keys.parse_key(key):
        case keys.ManifestChunkKey(_, index):
            return f"chunk {index}"
        case keys.ManifestBundleKey(_, first, last):
            return f"the bundle of chunks {first} to {last}"
        case keys.ManifestSnapshotKey(_, snapshot_id):
            return f"snapshot {snapshot_id}"
    return key


# -- verify ------------------------------------------------------------------------------------------------------


class StreamVerified(msgspec.Struct, kw_only=True):
    """A log of a volume: checked by itself, and compared with the remote. Scripts see these names: they stay."""

    stream_id: int
    tenant: str
    clean: bool = False
    log: CheckReport | None = None
    remote: str = "not compared"
    """Or "compared"."""
    remote_objects: int = 0
    findings: list[ObjectFinding] = []
    damage: list[str] = []
    """What is wrong beyond `log.damage`."""
    notes: list[str] = []


def verify_tenant(stream: VolumeStream, as_json: bool, deep: bool) -> bool:
    with open_rows(stream.settings.volume.state_dir) as rows:
        found = _verify_stream(stream, rows, deep)
    if as_json:
        output.print_json(found)
    elif found.log is not None:
        facts = facts_of(found.log)
        verdict = "clean" if found.clean else f"damaged ({len(found.log.damage) + len(found.damage)} finding(s))"
        facts[:2] = [("tenant", stream.tenant), facts[0], ("verdict", verdict), ("remote", _remote_text(found))]
        output.print_facts(facts)
    _tell_stream(found)
    return found.clean


def verify_volume(settings: Settings, as_json: bool, deep: bool) -> bool:
    state_dir = settings.volume.state_dir
    with open_rows(state_dir) as rows:
        with rows.view() as view:
            names = tenant_names(view)
        present = stream_ids(state_dir / MANIFEST_DIR)
        found = [
            _verify_stream(VolumeStream(settings, stream_id, names.get(stream_id, "")), rows, deep)
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
        tell(one.log)
    for damage in one.damage:
        complain(damage)


def _verify_stream(stream: VolumeStream, rows: OpenRows, deep: bool) -> StreamVerified:
    label = stream.tenant or f"stream {stream.stream_id}"
    found = StreamVerified(stream_id=stream.stream_id, tenant=stream.tenant)
    if not stream.folder.is_dir():
        found.damage = [f"{stream.folder}: {label} has no log here; fetch what is missing from the remote"]
        return found
    with counted(f"chunks of {label}") as report_progress:
        found.log = report = check(stream.folder, on_progress=report_progress)
    found.clean = report.clean
    try:
        compared = _compare(stream, rows, deep=deep)
    except _NotComparedError as e:
        found.notes = [f"{label}: not compared with its remote copy: {e}"]
        return found
    found.remote = "compared"
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
    advice = "; the next mount puts it again" if one.status is Status.MISSING else ""
    return f"{label}: {one.key} is missing in the remote though the log says it was uploaded: {one.detail}{advice}"
