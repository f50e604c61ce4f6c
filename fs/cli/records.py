"""Records of a manifest log as people read them: chosen, decoded, as JSON, lines or a coloured table.

What is wrong with the log goes to stderr as it is met, with what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from aof2.engine.inspect.records import payload_of, raw_payload, record_object
from aof2.engine.manifest.examine import Finding, Kind, examine, survey
from aof2.engine.manifest.format import LOG_SEGMENT_ID, ManifestIntegrityError, RecordType
from aof2.engine.manifest.reader import Record
from aof2.fs.cli import output
from aof2.fs.cli.errors import complain

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


def complain_of(finding: Finding) -> None:
    advice = ADVICE.get(finding.kind)
    complain(f"{finding.message}; {advice}" if advice else finding.message)


def note_of(finding: Finding) -> None:
    advice = ADVICE.get(finding.kind) if finding.kind is Kind.QUARANTINE else None
    complain(f"note: {finding.message}{'; ' + advice if advice else ''}")


def parse_types(names: tuple[str, ...]) -> frozenset[int]:
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


@dataclass
class RecordRows:
    """The records to show, in order. Damage and notes met on the way go to stderr as they are met."""

    directory: Path
    from_chunk: int
    types: frozenset[int]
    limit: int | None
    differing: frozenset[int] = frozenset()
    damaged: bool = False

    def __iter__(self) -> Iterator[Record]:
        found = survey(self.directory)
        for finding in found.damage:
            self.damage(finding)
        if not found.chunks:
            complain(f"note: {self.directory}: no manifest chunks here; a stream's folder holds files such as 0.mlog")
        left = self.limit
        for examined in examine(found, self.from_chunk):
            if examined.gap:
                self.damage(examined.gap)
            for record in examined.chunk.records() if examined.chunk else ():
                if self.types and record.type_id not in self.types:
                    continue
                yield record
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            if examined.damage:
                self.damage(examined.damage)
            if examined.note:
                note_of(examined.note)

    def damage(self, finding: Finding) -> None:
        self.damaged = True
        complain_of(finding)

    def as_object(self, record: Record) -> dict[str, Any]:
        return record_object(record, self.payload(record))

    def payload(self, record: Record) -> dict[str, Any]:
        """The decoded fields by name; what cannot be decoded as hex."""
        try:
            return payload_of(record)
        except ManifestIntegrityError as e:
            self.damage(Finding(kind=Kind.CHUNK, message=f"{self.directory}: {e}"))
            return raw_payload(record)


def print_table(rows: RecordRows) -> None:
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


def _table_row(record: Record, rows: RecordRows) -> output.Styled:
    payload = rows.payload(record)
    commit = payload.keys() == {"schema_id", "span_start", "span_crc64", "durable_len"}
    cells = (
        f"{record.chunk_index}{' (differs)' if record.chunk_index in rows.differing else ''}",
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
