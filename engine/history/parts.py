"""Part of a volume's history, folded in a task: all the records of some segments, in the order of their logs.

What comes of parts adds up: the sums of all of them by hour, segment and name are the volume's.

Owner: one task. Memory: a few numbers a segment of its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aof2.engine.history.columns import Columns
from aof2.engine.history.fold import FIELDS, Fold, Moved
from aof2.engine.history.heat import HOUR_MS
from aof2.engine.history.timeline import Timeline
from aof2.engine.history.units import START_HOT, STARTS
from aof2.engine.history.uses import Uses
from aof2.engine.recency.uses import Did

if TYPE_CHECKING:
    import pyarrow as pa

FACTS_SCHEMA: Final = "what string, stream_id int, id bigint, hour_ms bigint, name string, amount bigint"
HOURS_MAX: Final = 1 << 20
ROWS_AT_ONCE: Final = 64_000
_TIER_OF_START: Final = ("hot", "warm", "remote", "sealed")

Fact = tuple[str, int, int, int, str, int]


class _Part:
    def __init__(self) -> None:
        self.fold = Fold(Timeline(FIELDS, bin_ms=HOUR_MS, bins_max=HOURS_MAX))
        self.uses = Uses()
        self._heat: Counter[tuple[int, int, int, str]] = Counter()
        self._opens: Counter[tuple[int, int, int]] = Counter()

    def feed(self, batch: pa.RecordBatch) -> None:
        streams = batch.column("stream_id").to_numpy()
        for stream_id in np.unique(streams).tolist():
            mine = batch if streams[0] == streams[-1] else batch.filter(streams == stream_id)
            kinds = mine.column("type_id").to_numpy()
            started = kinds >= START_HOT
            if started.any():
                self._start(stream_id, mine.filter(started))
                mine = mine.filter(~started)
            self._feed(stream_id, mine)

    def _start(self, stream_id: int, batch: pa.RecordBatch) -> None:
        for tier in range(len(STARTS)):
            one = batch.filter(batch.column("type_id").to_numpy() == START_HOT + tier)
            if one.num_rows:
                self.fold.start_at(
                    stream_id,
                    _TIER_OF_START[tier],
                    one.column("segment_id").to_numpy().astype(np.uint64),
                    one.column("value").to_numpy().astype(np.uint64),
                    one.column("key").to_pylist(),
                    one.column("timestamp_ms")[0].as_py(),
                )

    def _feed(self, stream_id: int, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        samples = [blob for blob in batch.column("sample").to_pylist() if blob is not None]
        for sample in self.uses.feed(stream_id, samples):
            for ino, ms, did, _ in sample.entries:
                if did in (Did.HIT, Did.MISS):
                    self._opens[stream_id, ino, ms // HOUR_MS * HOUR_MS] += 1 << sample.shift
        self._moved(stream_id, self.fold.feed(stream_id, columns_in(batch)))

    def _moved(self, stream_id: int, moved: Moved) -> None:
        for name, amounts in (
            ("misses", moved.misses),
            ("fetched_bytes", moved.fetched_bytes),
            ("evictions", moved.evictions),
        ):
            some = np.flatnonzero(amounts)
            hours = moved.timestamp_ms[some] // np.uint64(HOUR_MS) * np.uint64(HOUR_MS)
            columns = (moved.segment_id[some].tolist(), hours.tolist(), amounts[some].tolist())
            for segment, hour, amount in zip(*columns, strict=True):
                self._heat[stream_id, segment, hour, name] += amount

    def facts(self) -> Iterator[Fact]:
        times_ms, values = self.fold.timeline.rows()
        for name, sums in values.items():
            for hour_ms, amount in zip(times_ms, sums, strict=True):
                if amount:
                    yield "tier", 0, 0, hour_ms, name, amount
        for (stream_id, segment, hour_ms, name), amount in self._heat.items():
            yield "heat", stream_id, segment, hour_ms, name, amount
        for (stream_id, ino, hour_ms), amount in self._opens.items():
            yield "opens", stream_id, ino, hour_ms, "opens", amount
        for name, count in self.fold.returned.items():
            yield "returned", 0, 0, 0, name, count
        for stream_id, state in self.fold.streams.items():
            for segment, times in state.returns.top(1 << 30):
                yield "returns", stream_id, segment, 0, "returns", times
        for name in ("samples", "uses", "missed"):
            yield "uses", 0, 0, 0, name, getattr(self.uses.measured, name)


def columns_in(batch: pa.RecordBatch) -> Columns:
    """Rows of the table of records as columns again."""

    def numbers(name: str, kind: Any) -> Any:
        return batch.column(name).to_numpy(zero_copy_only=False).astype(kind)

    keys = batch.column("key").dictionary_encode()
    codes = keys.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    return Columns(
        numbers("ordinal", np.uint64),
        numbers("chunk_offset", np.uint64),
        numbers("type_id", np.uint16),
        numbers("segment_id", np.uint64),
        numbers("logical_offset", np.uint64),
        numbers("timestamp_ms", np.uint64),
        np.zeros(batch.num_rows, np.uint32),
        numbers("schema_id", np.uint32),
        numbers("value", np.uint64),
        codes,
        keys.dictionary.to_pylist(),
    )


def fold_part(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The facts of one part."""
    import pyarrow as pa

    part = _Part()
    for batch in batches:
        if batch.num_rows:
            part.feed(batch)
    names = [one.split()[0] for one in FACTS_SCHEMA.split(",")]
    types = [pa.string(), pa.int32(), pa.int64(), pa.int64(), pa.string(), pa.int64()]
    rows: list[Fact] = []

    def batch_of() -> pa.RecordBatch:
        columns = zip(*rows, strict=True) if rows else ((),) * len(names)
        return pa.RecordBatch.from_arrays([pa.array(c, k) for c, k in zip(columns, types, strict=True)], names=names)

    for fact in part.facts():
        rows.append(fact)
        if len(rows) == ROWS_AT_ONCE:
            yield batch_of()
            rows.clear()
    yield batch_of()
