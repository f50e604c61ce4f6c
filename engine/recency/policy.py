"""What an eviction policy is asked and told. Replace the one in use by another class with these methods.

A key is a 64-bit number that stands for one evictable thing: an inode (hot_cache), a chunk of a stream (warm). Its size
is in units of the caller's choice.

Owner: one thread or lock of the caller's. A policy touches no disk and no clock but the one it is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class Image(NamedTuple):
    """The order at one instant, as it is saved: keys and sizes of up to three lists, each oldest first, one behind the
    other. The highest bit of a size is the policy's own."""

    counts: tuple[int, int, int]
    keys: array[int]
    sizes: array[int]


class EvictionPolicy(Protocol):
    """Knows what is here, how large it is and when it was used; says in which order it goes.

    Made with the room that all of it together has, in units, and a clock (`clock_s`)."""

    @property
    def changes(self) -> int:
        """Goes up with every change of the order: it is saved when there were some."""

    def used(self, key: int) -> None:
        """A use begins: what is here is opened, a warm copy is read."""

    def touched(self, key: int) -> None:
        """It was made, or fetched, or a use goes on or ends (reads, the close): the newest, but not used once more."""

    def sized(self, key: int, units: int) -> None:
        """It takes so much room here now. A key that is not known yet counts as touched."""

    def admit_old(self, key: int, units: int) -> None:
        """It is here, and no use of it was seen in this run: older than everything used in this run."""

    def unwanted(self, key: int) -> None:
        """It may go before everything else: its last name is gone."""

    def evicted(self, key: int) -> None:
        """It left to make room. It may be remembered, not as something that is here."""

    def forget(self, key: int) -> None:
        """It is gone for good."""

    def units_of(self, key: int) -> int:
        """How large it is here; 0: it is not."""

    def in_order(self) -> Iterator[int]:
        """What is here, first to go first. Everything above may be called between two steps."""

    def imager(self) -> Callable[[], Image]:
        """Copies what is needed at once; what it returns makes the image of it later, in any thread."""

    def load(self, image: Image) -> None:
        """Goes on from a saved order, perhaps that of another policy. Before any use."""

    def __contains__(self, key: int) -> bool: ...

    def __len__(self) -> int: ...
