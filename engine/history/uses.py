"""What was opened, as the log's samples have it: how many opens found their bytes here, and what a cache of another
size would have had of it.

What-if is a replay: the notes of the samples, in their order, to the policy that the volume has (`recency`), with the
room that is asked about; evictions go to the low-water mark, as the volume's do. Where only some files were noted, the
cache is as much smaller as they are fewer (Waldspurger et al., SHARDS, FAST '15).

What it is based on, and says: opens, not reads. The first open of a file in the history counts as it was measured, for
what was here before is not known: so a larger cache may do a little better than said. Bytes that are not in the remote
yet cannot leave, which the replay does not know.

Owner: one thread. Memory: what the policy keeps of files that were noted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from aof2.engine.errors import CorruptError
from aof2.engine.history.timeline import Timeline
from aof2.engine.manifest.batch import EventAssembler
from aof2.engine.manifest.format import ManifestIntegrityError
from aof2.engine.recency import InUse
from aof2.engine.recency.uses import SCHEMA_ID, Did, Sample, Use, decode, is_sampled

UNIT_BYTES: Final = 4096
HELD_MAX: Final = 200_000  # notes: of more, fewer files stand for all
_COUNTED: Final = (Did.HIT, Did.MISS)


class Measured(msgspec.Struct, kw_only=True):
    """All opens that samples tell of: their counts are exact, whatever was noted."""

    samples: int = 0
    uses: int = 0
    missed: int = 0
    first_ms: int = 0
    last_ms: int = 0
    limit_bytes: int = 0
    """The size of hot_cache when the last sample was taken."""
    one_in: int = 1
    """Of so many files, one was noted."""

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.missed / self.uses if self.uses else None


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A replay: `measured_rate` of the same opens that `hit_rate` is of."""

    hot_bytes: int
    uses: int
    hits: int
    measured_hits: int
    first_uses: int

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.uses if self.uses else None

    @property
    def measured_rate(self) -> float | None:
        return self.measured_hits / self.uses if self.uses else None


class Uses:
    """Takes the samples out of a log as it goes by."""

    def __init__(self) -> None:
        self.measured = Measured()
        self.timeline = Timeline(("opens", "open_misses"))
        self.samples: list[Sample] = []
        self._events: dict[int, EventAssembler] = {}
        self.damaged = 0
        self._held = self._shift = 0

    def feed(self, stream_id: int, blobs: Iterable[bytes]) -> list[Sample]:
        """Blobs of the stream's CustomEvents of the samples' schema, in order; the samples that are whole."""
        found = []
        for blob in blobs:
            try:
                event = self._events.setdefault(stream_id, EventAssembler()).feed(SCHEMA_ID, blob)
                if event is not None:
                    found.append(decode(event.body))
            except (CorruptError, ManifestIntegrityError):
                self.damaged += 1
        for sample in found:
            self._take(sample)
        return found

    def _take(self, sample: Sample) -> None:
        m = self.measured
        m.samples += 1
        m.uses += sample.uses
        m.missed += min(sample.missed, sample.uses)
        m.first_ms = min(m.first_ms or sample.from_ms, sample.from_ms)
        if sample.to_ms >= m.last_ms:
            m.last_ms, m.limit_bytes = sample.to_ms, sample.limit_units * UNIT_BYTES
        m.one_in = max(m.one_in, 1 << sample.shift)
        self.timeline.put(sample.to_ms, {"opens": sample.uses, "open_misses": sample.missed})
        kept = _thinned(sample, max(self._shift, sample.shift))
        self.samples.append(kept)
        self._held += len(kept.entries)
        while self._held > HELD_MAX:
            self._shift += 1
            self.samples = [one for s in self.samples if (one := _thinned(s, max(self._shift, s.shift))).entries]
            self._held = sum(len(one.entries) for one in self.samples)

    def what_if(self, hot_bytes: int) -> WhatIf:
        return replay(self.samples, hot_bytes)


def _thinned(sample: Sample, shift: int) -> Sample:
    entries = tuple(one for one in sample.entries if is_sampled(one.ino, shift))
    return sample._replace(shift=shift, entries=entries)


def in_order(samples: Iterable[Sample], shift: int) -> Iterator[Use]:
    """Every note about a file that all samples would have noted, by time; tenants' samples lie beside each other."""
    wanted = ([one for one in sample.entries if is_sampled(one.ino, shift)] for sample in samples)
    return heapq.merge(*wanted, key=lambda one: one.ms)


class _Clock:
    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> float:
        return self.ms / 1000


def replay(samples: list[Sample], hot_bytes: int) -> WhatIf:
    """What a hot_cache of that size would have had of the opens that were noted."""
    shift = max((sample.shift for sample in samples), default=0)
    low_water = samples[-1].low_water if samples else 1.0
    cache = _Cache(max(1, (hot_bytes // UNIT_BYTES) >> shift), low_water)
    met: set[int] = set()
    uses = hits = measured = first_uses = 0
    last: dict[int, bool] = {}
    for ino, ms, did, units in in_order(samples, shift):
        cache.clock.ms = max(cache.clock.ms, ms)
        if did in _COUNTED:
            was_hit = did is Did.HIT
            has = cache.used(ino, units)
            hit = has if ino in met else was_hit
            first_uses += ino not in met
            uses, hits, measured = uses + 1, hits + hit, measured + was_hit
            last[ino] = hit
        elif did is Did.LATE:
            # The open was told as a hit by the sample before; it had not read yet.
            if ino in last:
                measured -= 1
                if last.pop(ino) and (ino in met and not cache.grow(ino, units)):
                    hits -= 1
        elif did is Did.SIZED:
            cache.grow(ino, units)
        elif did is Did.CAME:
            cache.came(ino, units)
        else:
            cache.policy.forget(ino)
        if did is not Did.CAME:
            met.add(ino)
    return WhatIf(
        hot_bytes=hot_bytes, uses=uses, hits=max(0, hits), measured_hits=max(0, measured), first_uses=first_uses
    )


class _Cache:
    """The policy, and a room that is kept."""

    def __init__(self, capacity_units: int, low_water: float) -> None:
        self.clock = _Clock()
        self.policy = InUse(capacity_units, clock_s=self.clock)
        self._capacity = capacity_units
        self._low = int(capacity_units * low_water)

    def used(self, ino: int, units: int) -> bool:
        """Opened; whether all that this use is of was here."""
        had = self.policy.units_of(ino)
        self.policy.used(ino)
        return self.grow(ino, max(units, had)) if units > had or ino not in self.policy else True

    def grow(self, ino: int, units: int) -> bool:
        """It takes so much now; whether it did already."""
        had = self.policy.units_of(ino)
        if ino in self.policy and had >= units > 0:
            if units < had:
                self.policy.sized(ino, units)
            return True
        self._make_room(units - had, ino)
        if units <= self._capacity:
            self.policy.sized(ino, units)
        return False

    def came(self, ino: int, units: int) -> None:
        if ino not in self.policy:
            self._make_room(units, ino)
            self.policy.admit_old(ino, units)

    def _make_room(self, units: int, but: int) -> None:
        if self.policy.units + units <= self._capacity:
            return
        for ino in self.policy.in_order():
            if self.policy.units + units <= self._low:
                return
            if ino != but:
                self.policy.evicted(ino)
