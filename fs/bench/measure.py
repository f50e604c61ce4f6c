"""How things are timed: subject and baseline in turns, several rounds, the best of each.

A busy machine slows whatever runs at that moment. Taking turns gives both sides the same chance of a quiet one, and the
best round is the one least disturbed; absolute figures still change with the machine, so only ratios have targets.

Owner: the calling thread. Memory only; a crash leaves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

Timed = Callable[[], float]
"""Does its work once and returns the seconds that counted."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. Without a target it is information; `note` says why there is no ratio."""

    what: str
    unit: str
    value: float | None = None
    baseline: str = ""
    baseline_value: float | None = None
    ratio: float | None = None
    target: float | None = None
    target_text: str = ""
    ok: bool | None = None
    note: str = ""
    cost_us: float | None = None  # processor time of the subject's daemons for each unit (bytes: for each MiB)
    baseline_cost_us: float | None = None


def timed(work: Callable[[], object]) -> Timed:
    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def best(sides: Sequence[Timed], rounds: int) -> list[float]:
    """The best seconds of each side, taken in turns."""
    seconds = [float("inf")] * len(sides)
    for _ in range(rounds):
        for i, side in enumerate(sides):
            seconds[i] = min(seconds[i], side())
    return seconds


def compared(
    what: str,
    unit: str,
    rate: float,
    baseline: str,
    baseline_rate: float,
    *,
    at_least: float | None = None,
    expected: str = "",
) -> Measurement:
    """A rate against another, with a target for their ratio or what is `expected` of the rate."""
    ratio = rate / baseline_rate
    return Measurement(
        what=what,
        unit=unit,
        value=rate,
        baseline=baseline,
        baseline_value=baseline_rate,
        ratio=ratio,
        target=at_least,
        target_text=expected if at_least is None else f"at least {at_least:g}",
        ok=None if at_least is None else ratio >= at_least,
    )
