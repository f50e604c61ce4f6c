"""`aof2 manifest …`: the log of one stream, from its folder alone. Read-only, and works on a log being written."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.manifest.examine import Finding, Kind, examine, survey
from aof2.engine.manifest.format import (
    COMMIT_BLOB,
    COMMIT_SCHEMA_ID,
    LOG_SEGMENT_ID,
    ManifestIntegrityError,
    RecordType,
)
from aof2.engine.manifest.payloads import CustomEvent, SealSegment
from aof2.engine.manifest.reader import Record
from aof2.fs.cli import output
from aof2.fs.cli.errors import EXIT_FAILED, CliError, complain

COLUMNS = (
    "chunk_index",
    "chunk_offset",
    "ordinal",
    "type",
    "type_id",
    "flags",
    "segment_id",
    "logical_offset",
    "timestamp_ms",
    "payload",
)

ADVICE = {
    Kind.CHUNK: "restore the chunk from its remote copy",
    Kind.GAP: "fetch what is missing from the remote",
    Kind.BUNDLE: "restore the bundle from its remote copy",
    Kind.SNAPSHOT: "remove it: an older one, or the whole log, is replayed instead",
    Kind.RETENTION: "fetch what is missing from the remote",
    Kind.REPLAY: "restore the chunk from its remote copy",
    Kind.UNREADABLE: "check the file's owner and the disk",
    Kind.QUARANTINE: "once the log is clean, remove quarantine.json to lift it",
}


@click.group()
def manifest() -> None:
    """Look at a manifest log, and check it.

    DIR is the folder of one stream: its .mlog chunks, .mlogs bundles and snapshots. No volume is needed, and the log
    may be in use.
    """


@manifest.command(
    epilog="Example: aof2 manifest inspect /var/lib/aof2/manifest/1 --type UploadDone --json | jq .payload.key"
)
@click.argument("directory", metavar="DIR")
@click.option(
    "--from", "from_chunk", metavar="CHUNK", type=click.IntRange(min=0), default=0, help="Start at this chunk."
)
@click.option("--type", "types", metavar="NAME", multiple=True, help="Only records of this type; may be repeated.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Stop after N rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_context
def inspect(
    ctx: click.Context, directory: str, from_chunk: int, types: tuple[str, ...], limit: int | None, as_json: bool
) -> None:
    """Print the log, a row a record.

    Damage is reported on stderr with its chunk and offset; the records before it and the chunks after it are still
    shown, and the exit code is 1. Uncommitted bytes at the end are only noted.
    """
    wanted = _parse_types(types)
    rows = _Rows(_folder(directory), from_chunk, wanted, limit)
    if as_json:
        for record in rows:
            output.print_json(_as_object(record, rows))
    elif output.on_terminal():
        _print_table(rows)
    else:
        output.print_tsv(COLUMNS)
        for record in rows:
            *cells, payload = _as_object(record, rows).values()
            output.print_tsv((*cells, _json_text(payload)))
    if rows.damaged:
        ctx.exit(EXIT_FAILED)


@manifest.command(epilog="Example: aof2 manifest verify /var/lib/aof2/manifest/1 && echo clean")
@click.argument("directory", metavar="[DIR]", default=".")
@click.option("--json", "as_json", is_flag=True, help="The whole report as one JSON object.")
@click.pass_context
def verify(ctx: click.Context, directory: str, as_json: bool) -> None:
    """Check a log: every checksum, the order of chunks and records, snapshots, retention, and that replay works.

    DIR is the current directory when not given. Exit code 0: clean (notes, such as an unfinished write at the end, are
    no damage); 1: damaged.
    """
    folder = _folder(directory)
    with output.progress("chunks") as report_progress:
        report = check(folder, on_progress=report_progress)
    if as_json:
        output.print_json(report)
    else:
        output.print_facts(_facts(report))
    for finding in report.notes:
        _note(finding)
    for finding in report.damage:
        _complain(finding)
    if not report.clean:
        ctx.exit(EXIT_FAILED)


def _folder(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise CliError(f"{name}: no such directory; give the folder that holds a stream's .mlog files")
    if not path.is_dir():
        raise CliError(f"{name}: not a directory; give the folder that holds a stream's .mlog files")
    return path


def _complain(finding: Finding) -> None:
    advice = ADVICE.get(finding.kind)
    complain(f"{finding.message}; {advice}" if advice else finding.message)


def _note(finding: Finding) -> None:
    advice = ADVICE.get(finding.kind) if finding.kind is Kind.QUARANTINE else None
    complain(f"note: {finding.message}{'; ' + advice if advice else ''}")


# -- inspect -----------------------------------------------------------------------------------------------------


def _parse_types(names: tuple[str, ...]) -> frozenset[int]:
    known = {t.label.lower(): int(t) for t in RecordType}
    wanted = set()
    for name in names:
        text = name.lower()
        number = text.removeprefix("unknown")
        if text in known:
            wanted.add(known[text])
        elif number != text and number.isdecimal() and number.isascii():
            wanted.add(int(number))
        else:
            choices = ", ".join(t.label for t in RecordType)
            raise click.BadParameter(f"{name!r} is no record type; there are {choices}", param_hint="--type")
    return frozenset(wanted)


class _Rows:
    """The records to show, in order. Damage and notes met on the way go to stderr as they are met."""

    def __init__(self, directory: Path, from_chunk: int, types: frozenset[int], limit: int | None) -> None:
        self.damaged = False
        self._directory = directory
        self._from_chunk = from_chunk
        self._types = types
        self._limit = limit

    def __iter__(self) -> Iterator[Record]:
        found = survey(self._directory)
        for finding in found.damage:
            self.damage(finding)
        if not found.chunks:
            complain(f"note: {self._directory}: no manifest chunks here; a stream's folder holds files such as 0.mlog")
        left = self._limit
        for examined in examine(found, self._from_chunk):
            if examined.gap:
                self.damage(examined.gap)
            for record in examined.chunk.records() if examined.chunk else ():
                if self._types and record.type_id not in self._types:
                    continue
                yield record
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            if examined.damage:
                self.damage(examined.damage)
            if examined.note:
                _note(examined.note)

    def damage(self, finding: Finding) -> None:
        self.damaged = True
        _complain(finding)

    def payload(self, record: Record) -> dict[str, Any]:
        """The decoded fields by name; what cannot be decoded as hex."""
        if not record.known:
            return {"raw": record.payload.hex()}
        try:
            payload = record.decoded()
        except ManifestIntegrityError as e:
            self.damage(Finding(kind=Kind.CHUNK, message=f"{self._directory}: {e}"))
            return {"raw": record.payload.hex()}
        if isinstance(payload, CustomEvent):
            return _event(payload)
        fields = payload._asdict()
        if isinstance(payload, SealSegment) and payload.ext_id is None:  # the short form has no more
            return {name: fields[name] for name in ("durable_bytes", "segment_crc64")}
        return fields


def _event(event: CustomEvent) -> dict[str, Any]:
    if event.schema_id == COMMIT_SCHEMA_ID and len(event.blob) == COMMIT_BLOB.size:
        fields = zip(("span_start", "span_crc64", "durable_len"), COMMIT_BLOB.unpack(event.blob), strict=True)
        return {"schema_id": event.schema_id, **dict(fields)}
    blob = base64.b64encode(event.blob).decode()
    return {"schema_id": event.schema_id, "blob_len": len(event.blob), "blob": blob}


def _as_object(record: Record, rows: _Rows) -> dict[str, Any]:
    values = (
        record.chunk_index,
        record.chunk_offset,
        record.ordinal,
        record.type,
        record.type_id,
        record.flags,
        record.segment_id,
        record.logical_offset,
        record.timestamp_ms,
        rows.payload(record),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _print_table(rows: _Rows) -> None:
    columns = (
        output.Column("chunk", right=True),
        output.Column("offset", right=True),
        output.Column("ordinal", right=True),
        output.Column("time (UTC)"),
        output.Column("type"),
        output.Column("segment", right=True),
        output.Column("logical", right=True),
        output.Column("payload", fold_min=30),
    )
    output.print_table(columns, (_table_row(record, rows) for record in rows))


def _table_row(record: Record, rows: _Rows) -> output.Styled:
    payload = rows.payload(record)
    commit = payload.keys() == {"schema_id", "span_start", "span_crc64", "durable_len"}
    cells = (
        str(record.chunk_index),
        str(record.chunk_offset),
        str(record.ordinal),
        iso_time(record.timestamp_ms),
        "commit" if commit else record.type + (f" flags={record.flags:#x}" if record.flags else ""),
        "log" if record.segment_id == LOG_SEGMENT_ID else str(record.segment_id),
        str(record.logical_offset),
        " ".join(f"{name}={_value(name, value)}" for name, value in payload.items()),
    )
    return output.Styled(cells, "dim" if commit else style(record.type))


def style(label: str) -> str:
    """The colour of a record by what it is about; failures stand out whatever they are about."""
    if label.endswith("Failed"):
        return "bold red"
    for prefix, colour in (
        ("Hydration", "cyan"),
        ("LocalEvicted", "yellow"),
        ("Upload", "green"),
        ("Compression", "magenta"),
        ("Tier2", "bright_red"),
        ("Snapshot", "blue"),
        ("Unknown", "reverse"),
    ):
        if label.startswith(prefix):
            return colour
    return ""


def iso_time(timestamp_ms: int) -> str:
    """`2026-01-31T12:00:00.123`; a number no calendar reaches stays one."""
    try:
        moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03}"


def _value(name: str, value: object) -> str:
    if name.endswith("crc64") and isinstance(value, int):
        return f"{value:016x}"
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


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
