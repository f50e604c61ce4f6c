"""Replay: the records of an audit log in order, each proven by the hash chain before it is handed out.

`Replay` is iterated once; afterwards (and only then) `outcome` says how the log ends. Records of unknown type are
skipped by their length, counted, and stay in the chain. damage.py decides what a record that does not verify means:
a torn tail is an outcome with the offset to trim at, broken history is ChainBrokenError.

Invariants
- A record is yielded only when its hash, chained from the start given, verifies and its payload decodes strictly.
- Yielded logseqs rise; together with skipped ones they are start.logseq, +1, +1 …
- Memory: one window and one payload of a known type (65,551 bytes at most); unknown records are hashed, not held.
- Of a log that a writer is appending to, pass a Source cut at `AuditWriter.end`, or take a torn tail for what it is.

Owner: the one thread that iterates. Reads only: trimming is the writer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from aof2.engine.audit import format as fmt
from aof2.engine.audit.damage import Checked, Tail, check_at, classify
from aof2.engine.audit.source import Source, open_source
from aof2.engine.errors import CorruptError

KNOWN_TYPES = frozenset(int(t) for t in fmt.RecordType)


class LogRecord(NamedTuple):
    """One verified record; it fills [offset, end) of its source."""

    logseq: int
    payload: fmt.Payload
    record_hash: bytes
    offset: int
    end: int


class Position(msgspec.Struct, frozen=True):
    """A point between records: the next logseq due, the hash it chains to, the byte where it starts."""

    logseq: int
    prev_hash: bytes
    offset: int


class Outcome(msgspec.Struct, frozen=True):
    """How a replay ended. `position` is behind the last verified record: where to trim, and where to append."""

    tail: Tail
    position: Position
    records: int
    """Records verified, unknown ones included."""
    unknown: int
    dropped_bytes: int
    """TORN: bytes from `position.offset` to the end of the file."""
    commit_at: Position | None
    """UNCOMMITTED: where the record is whose logseq is to be written; it and those behind it were yielded."""


class Replay:
    """Iterates the records of `log` (bytes, a path or a Source), from `start` or from its header on."""

    def __init__(self, log: bytes | Path | Source, *, start: Position | None = None) -> None:
        self._log = log
        self._start = start
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            raise RuntimeError("the replay has not run to its end")
        return self._outcome

    def run(self) -> Outcome:
        """Verifies everything, keeps nothing."""
        for _ in self:
            pass
        return self.outcome

    def __iter__(self) -> Iterator[LogRecord]:
        with open_source(self._log) as source:
            yield from self._records(source)

    def _records(self, source: Source) -> Iterator[LogRecord]:
        start = self._start or first_position(source)
        logseq, prev, offset = start.logseq, start.prev_hash, start.offset
        if not 0 <= offset <= source.size:
            raise CorruptError(f"audit log of {source.size} bytes", path=source.path, offset=offset)
        unknown = 0
        tail = Tail.CLEAN
        commit_at: Position | None = None
        while offset < source.size:
            pending = commit_at is not None and commit_at.offset == offset  # its logseq is not written yet
            this = check_at(source, offset, logseq, prev)
            if this is None or this.computed != this.stored or (this.logseq != logseq and not pending):
                tail = classify(source, offset, logseq, prev)
                if tail is Tail.TORN:
                    break
                commit_at = Position(logseq, prev, offset)
                continue
            if this.record_type in KNOWN_TYPES:
                yield LogRecord(logseq, _decode(source, offset, logseq, this), this.stored, offset, this.end)
            else:
                unknown += 1
            logseq, prev, offset = logseq + 1, this.stored, this.end
        self._outcome = Outcome(
            tail=tail,
            position=Position(logseq, prev, offset),
            records=logseq - start.logseq,
            unknown=unknown,
            dropped_bytes=source.size - offset,
            commit_at=commit_at,
        )


def first_position(source: Source) -> Position:
    """Behind the header. A longer header than ours is believed only when no first record hides in it."""
    size = fmt.decode_header(source.read(0, fmt.HEADER.size), source.size, path=source.path)
    if size != fmt.HEADER.size:
        hidden = check_at(source, fmt.HEADER.size, 1, fmt.ZERO_HASH)
        if hidden is not None and hidden.computed == hidden.stored:
            raise CorruptError(f"header_size {size} covers the first record", path=source.path, offset=12)
    return Position(1, fmt.ZERO_HASH, size)


def _decode(source: Source, offset: int, logseq: int, this: Checked) -> fmt.Payload:
    try:
        if this.payload is None:
            length = this.end - offset - fmt.RECORD_BYTES_MIN
            raise CorruptError(f"type {this.record_type:#x} has a payload of {length} bytes")
        value = fmt.decode_payload(this.record_type, this.payload)
    except CorruptError as e:
        raise CorruptError(f"record {logseq}: {e.what}", path=source.path, offset=offset) from None
    return cast(fmt.Payload, value)  # None is for unknown types, and those do not come here
