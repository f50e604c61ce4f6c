"""A volume's history in one pass: what `aof2 report` draws and prints.

    logs (sources) → columns → fold, heat, uses → History

Owner: the calling thread; reads only. Memory is bounded by segments and directories, not by records or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.history.columns import LABELS, columns_of, event_blobs
from aof2.engine.history.cost import Cost, Prices, cost_of
from aof2.engine.history.fold import FIELDS, RETURN_NAMES, TIERS, Fold
from aof2.engine.history.heat import GONE, Cell, Heat
from aof2.engine.history.sources import Log
from aof2.engine.history.uses import Measured, Uses, WhatIf
from aof2.engine.inspect.left import path_of
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.recency.uses import SCHEMA_ID

POINTS_MAX: Final = 400
HOTTEST: Final = 20
DIRECTORIES_KNOWN: Final = 100_000
_WIDTHS_MS: Final = tuple(
    1000 * s for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """By time: when each bin begins, and what happened in it. Of `…_bytes` of a tier: what there was at its end."""

    width_ms: int
    times_ms: list[int]
    values: dict[str, list[int]]


class Returner(msgspec.Struct, frozen=True, kw_only=True):
    """A file's chunk that was evicted and fetched again so many times."""

    path: str
    segment_id: int
    returns: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    """`from_ms`: the history goes back to there; `whole`: which is where the volume began."""

    records: int
    types: dict[str, int]
    from_ms: int
    to_ms: int
    whole: bool
    tiers: dict[str, int]
    totals: dict[str, int]
    returned: dict[str, int]
    requests: dict[str, int]
    cost: Cost
    measured: Measured
    hit_rate: float | None
    what_if: list[WhatIf]
    """Replays: first at the size in use, then by size; `asked`: the sizes that were asked for."""
    what_if_rates: list[float | None]
    asked: list[int]
    series: Series
    hottest: list[Cell]
    heat: list[Cell]
    returners: list[Returner]
    notes: list[str]


def read_history(
    log: Log,
    view: View | None,
    *,
    prices: Prices | None = None,
    what_if: Sequence[int] = (),
    shares: Sequence[float] = (),
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> History:
    """One pass over all streams. `view`: the rows that know what a segment is of; None: no directories. `what_if`:
    sizes of hot_cache to replay; `shares`: the same as shares of the size in use."""
    fold, uses, places = Fold(), Uses(), _Places(view)
    heat = Heat(places.of_segment, places.of_inode)
    streams = log.streams()
    for number, stream_id in enumerate(streams):
        tell(number, len(streams))
        start = log.start(stream_id)
        if start is not None:
            fold.start(stream_id, start.index.entries.items(), start.created_ms)
        for chunk, offset in log.parts(stream_id, start.position if start else None):
            columns = columns_of(chunk, offset)
            moved = fold.feed(stream_id, columns, log_bytes=chunk.end - offset)
            heat.moved(stream_id, moved)
            for sample in uses.feed(stream_id, event_blobs(chunk, columns, SCHEMA_ID)):
                heat.opened(stream_id, sample)
    tell(len(streams), len(streams))
    now = uses.measured.limit_bytes
    sizes = sorted({*what_if, *(int(now * share) for share in shares)} - {now})
    ifs = [uses.what_if(size) for size in (now, *sizes)] if uses.measured.uses else []
    return _history(fold, uses, heat, places, log.notes, log.whole, prices or Prices(), ifs, what_if)


def _history(
    fold: Fold,
    uses: Uses,
    heat: Heat,
    places: _Places,
    notes: list[str],
    whole: bool,
    prices: Prices,
    ifs: list[WhatIf],
    asked: Sequence[int],
) -> History:
    totals = {name: fold.timeline.total(name) for name in FIELDS if name.removesuffix("_bytes") not in TIERS}
    tiers = fold.tier_bytes()
    return History(
        records=fold.records,
        types={LABELS[kind]: count for kind, count in sorted(fold.types.items()) if kind < len(LABELS)},
        from_ms=fold.first_ms,
        to_ms=fold.last_ms,
        whole=whole,
        tiers=tiers,
        totals=totals,
        returned={name: fold.returned[name] for name in RETURN_NAMES},
        requests=dict(sorted(fold.requests.items())),
        cost=cost_of(fold.requests, totals["hydrated_bytes"], tiers["remote"], prices),
        measured=uses.measured,
        hit_rate=uses.measured.hit_rate,
        what_if=ifs,
        what_if_rates=[one.hit_rate for one in ifs],
        series=_series(fold, uses),
        hottest=heat.hottest(HOTTEST),
        heat=heat.cells(),
        asked=list(asked),
        returners=_returners(fold, places),
        notes=list(dict.fromkeys(notes)),
    )


def _series(fold: Fold, uses: Uses) -> Series:
    span_ms = max(1, fold.last_ms - fold.first_ms)
    width_ms = next((w for w in _WIDTHS_MS if span_ms / w <= POINTS_MAX), _WIDTHS_MS[-1])
    width_ms = max(width_ms, fold.timeline.bin_ms, uses.timeline.bin_ms)
    while span_ms / width_ms > POINTS_MAX:
        width_ms *= 2
    moved, opened = (dict(_by_bin(line, width_ms)) for line in (fold.timeline, uses.timeline))
    first = min((*moved, *opened), default=0)
    last = max((*moved, *opened), default=-width_ms)
    times = list(range(first, last + 1, width_ms)) if moved or opened else []
    values: dict[str, list[int]] = {}
    for source, fields in ((moved, fold.timeline.fields), (opened, uses.timeline.fields)):
        for at, name in enumerate(fields):
            values[name] = [source[ms][at] if ms in source else 0 for ms in times]
    for tier in TIERS:
        name, held = f"{tier}_bytes", 0
        for at, change in enumerate(values[name]):
            held += change
            values[name][at] = held
    return Series(width_ms=width_ms, times_ms=times, values=values)


def _by_bin(line: Any, width_ms: int) -> list[tuple[int, tuple[int, ...]]]:
    times, values = line.rows()
    sums: dict[int, list[int]] = {}
    for at, ms in enumerate(times):
        cell = sums.setdefault(ms // width_ms * width_ms, [0] * len(line.fields))
        for column, name in enumerate(line.fields):
            cell[column] += values[name][at]
    return [(ms, tuple(cell)) for ms, cell in sums.items()]


def _returners(fold: Fold, places: _Places) -> list[Returner]:
    found = [
        (returns, stream_id, segment_id)
        for stream_id, state in fold.streams.items()
        for segment_id, returns in state.returns.top(HOTTEST)
    ]
    found.sort(key=lambda one: (-one[0], one[1:]))
    return [
        Returner(path=places.path_of_segment(stream_id, segment_id), segment_id=segment_id, returns=returns)
        for returns, stream_id, segment_id in found[:HOTTEST]
    ]


class _Places:
    """What the rows know of segments and inodes. What they do not know any more is GONE."""

    def __init__(self, view: View | None) -> None:
        self._view = view
        self._tenants = tenant_names(view) if view is not None else {}
        self._directory = lru_cache(DIRECTORIES_KNOWN)(self._directory_of)

    def of_segment(self, stream_id: int, segment_id: int) -> str:
        ino = self._inode_of(stream_id, segment_id)
        return self.of_inode(stream_id, ino) if ino else self._gone(stream_id)

    def of_inode(self, stream_id: int, ino: int) -> str:
        row = self._view.get(stream_id, t.INODES, ino) if self._view is not None else None
        return self._directory(stream_id, row.parent) if row is not None else self._gone(stream_id)

    def path_of_segment(self, stream_id: int, segment_id: int) -> str:
        ino = self._inode_of(stream_id, segment_id)
        row = self._view.get(stream_id, t.INODES, ino) if ino and self._view is not None else None
        if row is None or self._view is None:
            return self._gone(stream_id)
        return path_of(self._view, stream_id, self._tenants.get(stream_id, str(stream_id)), row)

    def _inode_of(self, stream_id: int, segment_id: int) -> int:
        row = self._view.get(stream_id, t.CHUNKS, segment_id) if self._view is not None else None
        return row.ino if row is not None else 0

    def _gone(self, stream_id: int) -> str:
        return f"{self._tenants.get(stream_id, stream_id)}/{GONE}"

    def _directory_of(self, stream_id: int, ino: int) -> str:
        tenant = self._tenants.get(stream_id, str(stream_id))
        row = self._view.get(stream_id, t.INODES, ino) if self._view is not None else None
        if row is None or not row.last_name:
            return tenant
        return path_of(self._view, stream_id, tenant, row) if self._view is not None else tenant
