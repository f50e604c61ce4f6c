"""How things are timed: subject and baseline in turns, several rounds, the best of each.

A busy machine slows whatever runs at that moment. Taking turns gives both sides the same chance of a quiet one, and the
best round is the one least disturbed; absolute figures still change with the machine, so only ratios have targets.

Owner: the calling thread. A crash leaves the folder of a run (`aof2-bench-…` under $TMPDIR), nothing else.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
    rate: float | None,
    baseline: str,
    baseline_rate: float,
    *,
    at_least: float | None = None,
    expected: str = "",
    note: str = "",
) -> Measurement:
    """A rate against another, with a target for their ratio or what is `expected` of the rate. Where there is no rate,
    `note` says why, and the target is missed."""
    ratio = None if rate is None else rate / baseline_rate
    missed = False if note else None
    return Measurement(
        what=what,
        unit=unit,
        value=rate,
        baseline=baseline,
        baseline_value=baseline_rate,
        ratio=ratio,
        target=at_least,
        target_text=expected if at_least is None else f"at least {at_least:g}",
        ok=None if at_least is None else ratio >= at_least if ratio is not None else missed,
        note=note,
    )


def run_parts(
    parts: Sequence[Callable[[Path], list[Measurement]]], on_progress: Callable[[int, int], None]
) -> list[Measurement]:
    """The measurements of all parts, in order, each with a folder of its own, which is removed."""
    results: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="aof2-bench-") as name:
        for done, part in enumerate(parts):
            on_progress(done, len(parts))
            folder = Path(name) / str(done)
            folder.mkdir()
            results += part(folder)
            shutil.rmtree(folder, ignore_errors=True)
    return results
