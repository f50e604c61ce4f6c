"""Bounds of offset and time, and what pushed-down filters add to them.

A bound is only ever as narrow as a filter is: Spark evaluates every filter again, on the rows that are left.

Owner: frozen values. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from aof2.engine.spark.options import OFFSET_MAX, ReadOptions, micros

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `start` up to before `end`."""

    start: int = 0
    end: int = OFFSET_MAX

    def within(self, other: Span) -> Span:
        return Span(max(self.start, other.start), min(self.end, other.end))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which records: by logical offset, by timestamp in milliseconds."""

    offsets: Span = Span()
    times_ms: Span = Span()

    @classmethod
    def of(cls, options: ReadOptions) -> Bounds:
        offsets = Span(options.starting_offset, options.ending_offset)
        return cls(offsets, Span(options.starting_ms, options.ending_ms))

    def narrowed(self, filters: Iterable[Filter]) -> Bounds:
        offsets, times_ms = self.offsets, self.times_ms
        for pushed in filters:
            attribute = getattr(pushed, "attribute", None)
            if attribute == ("offset",):
                offsets = offsets.within(_span(pushed, _whole))
            elif attribute == ("timestamp",):
                times_ms = times_ms.within(_span(pushed, _milliseconds))
        return Bounds(offsets, times_ms)


def _whole(value: Any) -> tuple[int, int] | None:
    """The largest whole number at or below the value, and the smallest at or above it; None when that is unknown."""
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else None


def _milliseconds(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    us = micros(value)
    return us // 1000, -(-us // 1000)


def _span(pushed: Filter, rounded: Any) -> Span:
    kind, value = type(pushed).__name__, getattr(pushed, "value", None)
    if kind == "In" and isinstance(value, tuple) and value:
        spans = [_one("EqualTo", rounded(item)) for item in value if item is not None]
        return Span(min(s.start for s in spans), max(s.end for s in spans)) if spans else Span(0, 0)
    return _one(kind, rounded(value))


def _one(kind: str, value: tuple[int, int] | None) -> Span:
    if value is None:
        return Span()
    below, above = value
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return Span(above, below + 1)
        case "GreaterThan":
            return Span(below + 1)
        case "GreaterThanOrEqual":
            return Span(above)
        case "LessThan":
            return Span(0, above)
        case "LessThanOrEqual":
            return Span(0, below + 1)
    return Span()
