"""Who takes part in a run in which role, and how much of everything is done."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aof2.fs.bench import subject
from aof2.fs.bench.contestants import Contestant, Disk, Plan
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.race import Race
from aof2.fs.bench.subject import Aof2
from aof2.fs.bench.verdict import Outcome, judge


class Field(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    race: Race
    disk: Disk
    aof2: Aof2 | None
    peers: list[Contestant]

    @property
    def everybody(self) -> list[Contestant]:
        return [self.disk, *self.over_s3]

    @property
    def over_s3(self) -> list[Contestant]:
        return [*self.subjects, *self.peers]

    @property
    def subjects(self) -> list[Contestant]:
        return [self.aof2] if self.aof2 else []

    def judge(
        self, what: str, unit: str, outcome: Outcome, targets: Mapping[str, float], name: str = subject.NAME
    ) -> list[Measurement]:
        return judge(what, unit, outcome, subject=name, peers=[c.name for c in self.peers], targets=targets)
