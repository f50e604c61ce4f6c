"""The log in pieces: byte ranges cut behind each SNAPSHOT_ANCHOR, stored remotely, and verified joined again.

Joined in order, the ranges are a prefix of the log file, byte for byte: the first starts with the header. Each is named
by its first logseq (`audit/<tenant_id>/<first_logseq>.asl`), so a listing sorted by number is their order.

Invariants
- A range ends behind an anchor, and never changes once cut: an upload may be repeated, never replaced.
- A range has no torn tail. One that ends elsewhere than behind an anchor is not a range that was cut here.

Owner: pure readers, any thread. A crash leaves a prefix of the ranges uploaded; `cut_points` from the last one's
`after` continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from aof2.engine.audit.damage import Tail
from aof2.engine.audit.format import ZERO_HASH, ChainBrokenError, SnapshotAnchor
from aof2.engine.audit.reader import LogRecord, Position, Replay, first_position
from aof2.engine.audit.source import Source, open_source
from aof2.engine.errors import CorruptError


class LogRange(msgspec.Struct, frozen=True):
    """Bytes [start, end) of the log, records from `first_logseq` on."""

    first_logseq: int
    start: int
    end: int
    after: Position
    """Where the next range starts."""


def cut_points(log: bytes | Path | Source, *, start: Position | None = None) -> Iterator[LogRange]:
    """The complete ranges of `log`, verified. Records behind the last anchor belong to no range yet.

    `start` is `after` of the last range already stored; without it the first range, header included, comes first.
    """
    first, begin = (start.logseq, start.offset) if start else (1, 0)
    for record in Replay(log, start=start):
        if isinstance(record.payload, SnapshotAnchor):
            after = Position(record.logseq + 1, record.record_hash, record.end)
            yield LogRange(first, begin, record.end, after)
            first, begin = after.logseq, after.offset


def replay_ranges(parts: Iterable[tuple[int, bytes | Path]], *, start: Position | None = None) -> Iterator[LogRecord]:
    """The records of ranges given as (first_logseq, bytes or file) in order, verified as one chain.

    Offsets of the records are within the joined log. One range is read at a time. `start`: those before it are known.
    """
    logseq, prev, base = (start.logseq, start.prev_hash, start.offset) if start else (1, ZERO_HASH, 0)
    for first_logseq, part in parts:
        if first_logseq != logseq:
            raise ChainBrokenError(f"the next range starts at {first_logseq}", logseq=logseq, offset=base)
        with open_source(part) as source:
            begin = first_position(source).offset if base == 0 else 0
            replay = Replay(source, start=Position(logseq, prev, begin))
            last: LogRecord | None = None
            for last in replay:
                yield last._replace(offset=last.offset + base, end=last.end + base)
            outcome = replay.outcome
            if outcome.tail is not Tail.CLEAN:
                raise CorruptError(f"audit range {first_logseq} is {outcome.tail.value}", path=source.path, offset=base)
            if last is None or not isinstance(last.payload, SnapshotAnchor) or last.end != source.size:
                raise CorruptError(f"audit range {first_logseq} does not end with an anchor", path=source.path)
            logseq, prev, base = outcome.position.logseq, outcome.position.prev_hash, base + source.size
