"""From rates to the rows of the table: who is compared with whom, and which ratio has a target.

Every baseline of an outcome has a row, so that the whole field can be read; only some have a target. "The best peer" is
whichever was fastest in this run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

import msgspec

from aof2.fs.bench.measure import Measurement, compared

BEST_PEER: Final = "best peer"
V = TypeVar("V")


class Outcome(msgspec.Struct, frozen=True):
    """What a row of the bench saw: a rate for each contestant that got through, a reason for each that did not."""

    rates: dict[str, float] = {}
    failures: dict[str, str] = {}
    costs_us: dict[str, float] = {}  # processor time of a contestant's daemons, for each unit

    def without(self, name: str) -> Outcome:
        return Outcome(_without(self.rates, name), _without(self.failures, name), _without(self.costs_us, name))


def _without(values: dict[str, V], name: str) -> dict[str, V]:
    return {key: value for key, value in values.items() if key != name}


def judge(
    what: str,
    unit: str,
    outcome: Outcome,
    *,
    subject: str,
    peers: Collection[str] = (),
    targets: Mapping[str, float] | None = None,
) -> list[Measurement]:
    """A row for each baseline. `targets`: the least ratio against a baseline's name or BEST_PEER."""
    targets = targets or {}
    rate, failure = outcome.rates.get(subject), outcome.failures.get(subject, "")
    rivals = {name: r for name, r in outcome.rates.items() if name != subject}
    best = max((name for name in rivals if name in peers), key=lambda name: rivals[name], default=None)
    rows = []
    for name, rival in rivals.items():
        target = targets[BEST_PEER] if name == best and BEST_PEER in targets else targets.get(name)
        label = f"{name}, {BEST_PEER}" if name == best and BEST_PEER in targets else name
        row = compared(what, unit, rate, label, rival, at_least=target, note=failure)
        costs = {"cost_us": outcome.costs_us.get(subject), "baseline_cost_us": outcome.costs_us.get(name)}
        rows.append(msgspec.structs.replace(row, **costs))
    for name, reason in outcome.failures.items():
        if name != subject:
            rows.append(Measurement(what=what, unit=unit, value=rate, baseline=name, note=reason))
    if not rows:
        rows.append(Measurement(what=what, unit=unit, value=rate, ok=False if failure else None, note=failure))
    return rows


def at_most(what: str, unit: str, outcome: Outcome, *, subject: str, limit: float) -> list[Measurement]:
    """Less is better: the subject against a fixed limit, the others as information."""
    value = outcome.rates.get(subject)
    failure = outcome.failures.get(subject, "")
    rows = [
        Measurement(
            what=what,
            unit=unit,
            value=value,
            target=limit,
            target_text=f"less than {limit:g}",
            ok=value < limit if value is not None else (False if failure else None),
            note=failure,
        )
    ]
    others = {name: rate for name, rate in outcome.rates.items() if name != subject}
    return rows + [Measurement(what=f"{what}, by {name}", unit=unit, value=rate) for name, rate in others.items()]
