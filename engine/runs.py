"""Neighbours taken together: the one place where blocks and bits become runs of (first, how many).

Owner: pure functions. A crash leaves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator


def runs_of(
    numbers: Iterable[int], kind: Callable[[int], object] = lambda _: None, most: int = sys.maxsize
) -> Iterator[tuple[int, int]]:
    """Numbers that follow each other and are of one kind, at most so many together. They come in ascending order."""
    first = count = 0
    what: object = None
    for number in numbers:
        this = kind(number)
        if count and number == first + count and this == what and count < most:
            count += 1
            continue
        if count:
            yield first, count
        first, count, what = number, 1, this
    if count:
        yield first, count


def runs_of_masks(masks: Iterable[int], bits_per_mask: int) -> Iterator[tuple[int, int]]:
    """The bits that are set, mask by mask, numbered through: no run goes on in the next mask."""
    for number, bits in enumerate(masks):
        at = number * bits_per_mask
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            ones = (~(bits >> zeros) & (bits >> zeros) + 1).bit_length() - 1
            yield at + zeros, ones
            bits >>= zeros + ones
            at += zeros + ones
