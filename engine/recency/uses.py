"""Samples of what was opened: the bytes of a CustomEvent of schema 18, in the log of the tenant that the files are of.

The log has every movement between tiers, and no use of what is here already. So about once a minute a mount that was
used says which files were: enough to know how many opens found their bytes here, and what a cache of another size would
have had. A sample is bounded: of many files, those whose number hashes to zeros in `shift` bits stand for all.

Written to disk: never renumber, never reorder. What a later version adds is behind the entries.

Owner: pure. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from aof2.engine.errors import CorruptError
from aof2.engine.manifest.batch import USES_SAMPLED

SCHEMA_ID: Final = USES_SAMPLED
# from_ms, to_ms, limit_units, uses, missed, low_water (thousandths), shift, count, 0
HEADER: Final = Struct("<QQQQQHHII")
ENTRY: Final = Struct("<QII")  # inode, ms since from_ms, kind << 29 | units
UNITS_MAX: Final = (1 << 29) - 1
MS_MAX: Final = (1 << 32) - 1
SHIFT_MAX: Final = 32
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Did(IntEnum):
    """Written to disk. Never renumber."""

    HIT = 0  # opened, and every byte that was read of it was in hot_cache
    MISS = 1  # opened, and some had to be fetched
    LATE = 2  # … of a use that began in a sample before this one
    SIZED = 3  # written, or grown: it takes so much room
    CAME = 4  # fetched along with another, and not asked for yet
    LEFT = 5  # removed, or evicted by name: not because of the room


class Use(NamedTuple):
    """`units`: pages of 4 KiB that it had here then, or had when the use was over."""

    ino: int
    ms: int
    did: Did
    units: int


class Sample(NamedTuple):
    """`uses` of the tenant's files between the two times, of which so many `missed`; `entries`: of one file in
    2^shift, in their order."""

    from_ms: int
    to_ms: int
    limit_units: int
    low_water: float
    uses: int
    missed: int
    shift: int
    entries: tuple[Use, ...]


def is_sampled(ino: int, shift: int) -> bool:
    """Whether this file is one of those that stand for all."""
    return not shift or (ino * _MIX & _MASK) >> (64 - shift) == 0


def encode(sample: Sample) -> bytes:
    head = HEADER.pack(
        sample.from_ms,
        sample.to_ms,
        sample.limit_units,
        sample.uses,
        sample.missed,
        round(sample.low_water * 1000),
        sample.shift,
        len(sample.entries),
        0,
    )
    return head + b"".join(_packed(sample.from_ms, sample.entries))


def _packed(from_ms: int, entries: Iterable[Use]) -> Iterator[bytes]:
    for ino, ms, did, units in entries:
        yield ENTRY.pack(ino, min(max(0, ms - from_ms), MS_MAX), int(did) << 29 | min(units, UNITS_MAX))


def decode(body: bytes) -> Sample:
    """CorruptError where it does not add up; an entry of a kind that is not known is passed over."""
    if len(body) < HEADER.size:
        raise CorruptError(f"a sample of uses has {len(body)} bytes, its header takes {HEADER.size}")
    from_ms, to_ms, limit_units, uses, missed, low_water, shift, count, _ = HEADER.unpack_from(body)
    end = HEADER.size + count * ENTRY.size
    if end > len(body) or shift > SHIFT_MAX:
        raise CorruptError(f"a sample of uses has {len(body)} bytes, its {count} entries end at {end}")
    found = []
    for ino, after_ms, packed in ENTRY.iter_unpack(body[HEADER.size : end]):
        if packed >> 29 in _KINDS:
            found.append(Use(ino, from_ms + after_ms, Did(packed >> 29), packed & UNITS_MAX))
    return Sample(from_ms, to_ms, limit_units, low_water / 1000, uses, missed, shift, tuple(found))


_KINDS: Final = frozenset(map(int, Did))
