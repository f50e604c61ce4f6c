"""How contestants are timed: in turns, several rounds, the median of each; who fails sits out, and says why.

A busy machine slows the one that runs at that moment, so all run in every round and every other round runs backwards.
Before each turn the daemons of the run have become idle: a second core that is busy with another's uploads makes a FUSE
round trip several times as fast. Work that takes long is done once: its noise is small beside it.

Beside a rate stands what it cost: the processor time that the contestant's own processes took while it was measured.

Owner: the calling thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aof2.fs.bench import work
from aof2.fs.bench.contestants import Contestant
from aof2.fs.bench.process import Processes, StepError
from aof2.fs.bench.verdict import Outcome

LONG_S = 30.0
QUIET_S_MAX = 20.0


class Meter:
    """Processor time of one attempt, and how much was done in it (reads, files, MiB)."""

    def __init__(self) -> None:
        self.processor_s = 0.0
        self.units = 0.0

    @property
    def us_per_unit(self) -> float | None:
        return 1e6 * self.processor_s / self.units if self.units else None


class Race:
    """The contestants that are still in, and what they are asked to do."""

    def __init__(
        self, processes: Processes, contestants: Sequence[Contestant], *, rounds: int, deadline_s: float
    ) -> None:
        self.processes = processes
        self.contestants = list(contestants)
        self.rounds = rounds
        self.deadline_s = deadline_s
        self.out: dict[str, str] = {}  # for good: why
        self._meter = Meter()

    def named(self, name: str) -> Contestant | None:
        return next((c for c in self.contestants if c.name == name and name not in self.out), None)

    def work(
        self, name: str, *arguments: object, env: dict[str, str] | None = None, script: str = work.__file__
    ) -> dict[str, float]:
        """A loop of work.py, or of another script like it, in a process of its own."""
        command = [sys.executable, script, name, *(str(a) for a in arguments)]
        answer: dict[str, float] = json.loads(self.processes.run(command, deadline_s=self.deadline_s, env=env))
        return answer

    @contextmanager
    def metering(self, contestant: Contestant) -> Iterator[Meter]:
        """What the contestant's daemons take inside the block counts; the block says of how many units."""
        before = self.processes.processor_s(contestant.name)
        yield self._meter
        self._meter.processor_s += self.processes.processor_s(contestant.name) - before

    def each(self, step: Callable[[Contestant], Any], who: Sequence[Contestant] | None = None) -> None:
        """A step that is not measured; who fails it is out for good."""
        for contestant in self._still_in(self.contestants if who is None else who):
            try:
                step(contestant)
            except (StepError, OSError) as e:
                self.out[contestant.name] = str(e)

    def turns(
        self,
        attempt: Callable[[Contestant, int], float],
        who: Sequence[Contestant],
        *,
        rounds: int | None = None,
        quiet: bool = True,
    ) -> Outcome:
        """Medians of the rates that `attempt(contestant, round)` returns. Not `quiet`: in the middle of other work."""
        samples: dict[str, list[float]] = {}
        costs: dict[str, list[float]] = {}
        slow: set[str] = set()
        failures = {c.name: self.out[c.name] for c in who if c.name in self.out}
        for n in range(self.rounds if rounds is None else rounds):
            order = self._still_in(who)
            for contestant in order if n % 2 == 0 else reversed(order):
                name = contestant.name
                if name in failures or name in slow:
                    continue
                if quiet:
                    self.processes.quiet(QUIET_S_MAX)
                start = time.monotonic()
                self._meter = Meter()
                try:
                    samples.setdefault(name, []).append(attempt(contestant, n))
                    if self._meter.us_per_unit is not None:
                        costs.setdefault(name, []).append(self._meter.us_per_unit)
                except (StepError, OSError) as e:
                    failures[name] = str(e)
                    samples.pop(name, None)
                    self._revive(contestant)
                if time.monotonic() - start > LONG_S:
                    slow.add(name)
        medians = {c.name: statistics.median(samples[c.name]) for c in who if samples.get(c.name)}
        return Outcome(medians, failures, {name: statistics.median(costs[name]) for name in medians if name in costs})

    def _still_in(self, who: Sequence[Contestant]) -> list[Contestant]:
        return [c for c in who if c.name not in self.out]

    def _revive(self, contestant: Contestant) -> None:
        """A fresh mount after a failure, or out for good."""
        try:
            contestant.stop()
            contestant.start()
        except (StepError, OSError) as e:
            self.out[contestant.name] = str(e)


def drop_metadata() -> bool:
    """Names and attributes leave the kernel's caches; only root can ask for it."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2")
    except OSError:
        return False
    return True
