"""Counters, gauges and histograms that any thread may touch, exposed under exactly the name they were given.

prometheus-client's own instruments add `_total` to every counter, and some of our names are fixed without it. So these
count, and hand prometheus-client finished samples; the text is written in `exposition`.

Invariants
- An update is one short critical section: nothing is formatted or allocated until a scrape.
- The labels' values are given when an instrument is made, or by a callback at scrape time; a typo raises KeyError
  instead of making a new time series.
- A callback runs in the scraping thread. It reads plain attributes and never waits. One that raises costs its own
  family at that scrape, and is counted.

Owner: shared by all threads, each value behind a lock of its own. Crash: counts start from 0, as Prometheus expects.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Final, Generic, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from aof2.engine.observe.exposition import number

LATENCY_BUCKETS_S: Final = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
DURATION_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Instrument(ABC):
    """What one family of samples comes from; `documentation` is its HELP."""

    kind: str

    def __init__(self, documentation: str = "") -> None:
        self.documentation = documentation
        self._lock = threading.Lock()

    @abstractmethod
    def samples(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        """Those of a scrape."""


class _Value(Instrument):
    """One number."""

    def __init__(self, documentation: str = "") -> None:
        super().__init__(documentation)
        self._value: float = 0
        self._callback: Callable[[], float] | None = None

    def set_callback(self, callback: Callable[[], float] | None) -> None:
        """From now on the value is what this returns at scrape time, whatever was counted or set here."""
        self._callback = callback

    @property
    def value(self) -> float:
        return self._value if self._callback is None else float(self._callback())

    def samples(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        return [Sample(name, labels, self.value)]


class Counter(_Value):
    """Only goes up. Where another part counts already, a callback says how far it is."""

    kind = "counter"

    def inc(self, amount: float = 1) -> None:
        if amount < 0:
            raise ValueError("a counter only goes up")
        with self._lock:
            self._value += amount


class Gauge(_Value):
    """Set, or asked for by a callback at scrape time."""

    kind = "gauge"

    def set(self, value: float) -> None:
        self._value = value


class Histogram(Instrument):
    """How often each range of values was seen."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float], documentation: str = "") -> None:
        super().__init__(documentation)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        i = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[i] += 1
            self._sum += value

    @property
    def count(self) -> int:
        with self._lock:
            return sum(self._counts)

    def samples(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen = 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            seen += count
            yield Sample(f"{name}_bucket", {**labels, "le": number(bound)}, seen)
        yield Sample(f"{name}_count", labels, seen)
        yield Sample(f"{name}_sum", labels, total)


Each = TypeVar("Each", Counter, Histogram)


class Labelled(Instrument, Generic[Each]):
    """An instrument for each combination of the labels' values, which are fixed at the start."""

    def __init__(self, make: Callable[[], Each], documentation: str = "", **labels: Iterable[str]) -> None:
        super().__init__(documentation)
        self.kind = make().kind
        self._labels = tuple(labels)
        self._instruments: dict[tuple[str, ...], Each] = {values: make() for values in product(*labels.values())}

    def __getitem__(self, values: str | tuple[str, ...]) -> Each:
        return self._instruments[(values,) if isinstance(values, str) else values]

    def samples(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        for values, instrument in self._instruments.items():
            yield from instrument.samples(name, {**labels, **dict(zip(self._labels, values, strict=True))})


class GaugeTable(Instrument):
    """Gauges whose label values are known only at scrape time (tenants): a callback gives them all at once."""

    kind = "gauge"

    def __init__(self, labels: Sequence[str], documentation: str = "") -> None:
        super().__init__(documentation)
        self._labels = tuple(labels)
        self._callback: Callable[[], Mapping[tuple[str, ...], float]] = dict

    def set_callback(self, callback: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        self._callback = callback

    def samples(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        rows = self._callback().items()
        return [Sample(name, {**labels, **dict(zip(self._labels, v, strict=True))}, n) for v, n in rows]


def as_metric(name: str, instrument: Instrument) -> Metric:
    """A scrape of one family. The family has the samples' own name, `_total` or not."""
    metric = Metric(name, instrument.documentation, instrument.kind)
    metric.samples = list(instrument.samples(name, {}))
    return metric
