"""Counts and checksums of rows, the same in any order: what was read is what is there.

A row's hash is Spark's xxhash64 of its columns; a frame's checksum is the sum of them, modulo 2^64, so that it does not
matter how rows are cut into tasks and files. A row that is missing, there twice or changed changes count or checksum.

`observed` counts rows as they pass on their way to be written, for the price of the hash. A stage that Spark ran again
may have counted rows twice there: a difference is not believed before `counted` has read them once more.

Owner: the driver. Crash: nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

PART_BITS: Final = 22  # a sum of so many bits of each hash does not overflow before 2^41 rows
PARTS: Final = (0, PART_BITS, 2 * PART_BITS)
MASK: Final = (1 << PART_BITS) - 1


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows, and the sum of their hashes."""

    rows: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Tally:
        """Out of the columns of `tally_columns`; sums of no row are null."""
        total = sum((found[f"hash{shift}"] or 0) << shift for shift in PARTS)
        return cls(found["rows"], total % 2**64)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.checksum + other.checksum) % 2**64)

    def __str__(self) -> str:
        return f"{self.rows} row(s), checksum {self.checksum:016x}"


def tally_columns(frame: DataFrame) -> list[Column]:
    """What `observe` or `agg` makes of a frame, to be read by `Tally.of`."""
    from pyspark.sql import functions as f

    row = f.xxhash64(*(_hashable(frame[f"`{field.name}`"], field.dataType) for field in frame.schema.fields))
    parts = [f.sum(f.shiftrightunsigned(row, shift).bitwiseAND(f.lit(MASK))).alias(f"hash{shift}") for shift in PARTS]
    return [f.count(f.lit(1)).alias("rows"), *parts]


def _hashable(column: Column, kind: DataType) -> Column:
    """Spark hashes no maps: their text is hashed, whose order a file keeps."""
    from pyspark.sql import functions as f

    return f.to_json(f.struct(column)) if "map<" in kind.simpleString() else column


def counted(frame: DataFrame) -> Tally:
    """Reads all of it."""
    return Tally.of(frame.agg(*tally_columns(frame)).collect()[0].asDict())


class Observed:
    """A frame that is counted while one job passes through it."""

    def __init__(self, frame: DataFrame) -> None:
        from pyspark.sql import Observation

        self._observation = Observation()
        self._plain = frame
        self.frame = frame.observe(self._observation, *tally_columns(frame))

    def agreed(self, there: Tally) -> Tally:
        """What was read: as it was counted in passing, or anew where that is not what is there."""
        passing = Tally.of(self._observation.get)
        return passing if passing == there else counted(self._plain)
