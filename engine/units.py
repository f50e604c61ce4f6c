"""Sizes and times as people write them: `64MiB`, `1.5GiB`, `250ms`, `7d`, `5%`.

Invariants
- What is accepted is exact: a whole number of bytes or milliseconds comes out, or ValueError. Nothing is rounded.
- A size may go without a unit (bytes); a time may not, because a bare number does not tell its unit.

Owner: pure functions. Crash: nothing here touches a disk.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

import msgspec

SIZE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
TIME_UNITS_MS: Final = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZE_MAX: Final = 2**63 - 1
SIZE_HELP: Final = "a size such as 64MiB (B, KiB, MiB, GiB, TiB)"
TIME_HELP: Final = "a time such as 30s (ms, s, min, h, d)"

_AMOUNT: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z%]*)")


class MinFree(msgspec.Struct, frozen=True):
    """Room to leave free on a disk: so many bytes, or a share of the disk's size. One of the two is 0."""

    size_bytes: int = 0
    fraction: float = 0.0

    def bytes_of(self, disk_bytes: int) -> int:
        """What it comes to on a disk of that size."""
        return self.size_bytes or int(self.fraction * disk_bytes)


def parse_size(value: object) -> int:
    """`64MiB` → 67108864. Integers are bytes. ValueError says what is accepted."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount, factor = Decimal(value), 1
    else:
        amount, unit = _split(value, SIZE_HELP)
        factor = SIZE_UNITS.get(unit or "B", 0)
    size = amount * factor
    if not factor or size != int(size) or not 0 <= size <= SIZE_MAX:
        raise ValueError(SIZE_HELP)
    return int(size)


def parse_time_ms(value: object) -> int:
    """`1.5s` → 1500. ValueError says what is accepted."""
    amount, unit = _split(value, TIME_HELP)
    time_ms = amount * TIME_UNITS_MS.get(unit, 0)
    if unit not in TIME_UNITS_MS or time_ms != int(time_ms) or time_ms > SIZE_MAX:
        raise ValueError(TIME_HELP)
    return int(time_ms)


def parse_min_free(value: object) -> MinFree:
    """`5%` or 0.05 of the disk, or a size."""
    wanted = f"a share of the disk such as 5% (below 100%), or {SIZE_HELP}"
    if isinstance(value, float):
        fraction = value
    elif isinstance(value, str) and value.endswith("%"):
        fraction = float(_split(value, wanted)[0] / 100)
    else:
        try:
            return MinFree(size_bytes=parse_size(value))
        except ValueError:
            raise ValueError(wanted) from None
    if not 0 <= fraction < 1:
        raise ValueError(wanted)
    return MinFree(fraction=fraction)


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling: 67108864 → `64MiB`, 1000 → `1000B`."""
    return _shortest(size_bytes, SIZE_UNITS)


def format_time(time_ms: int) -> str:
    """The shortest exact spelling: 60000 → `1min`, 1500 → `1500ms`."""
    return _shortest(time_ms, TIME_UNITS_MS)


def _shortest(amount: int, units: dict[str, int]) -> str:
    """In the largest unit that it is a whole number of."""
    fitting = [unit for unit, factor in units.items() if amount >= factor and amount % factor == 0]
    unit = fitting[-1] if fitting else next(iter(units))
    return f"{amount // units[unit]}{unit}"


def _split(value: object, wanted: str) -> tuple[Decimal, str]:
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(wanted)
    return Decimal(match[1]), match[2]
