"""Sums over the files that are known, kept up to date by each change instead of being counted: with tens of thousands
of files open or unsealed, what is paid a tick, an open or a create must not grow with their number.

Invariant: `files` and `bytes_of` are what a walk over the known files would find dirty, and charged.

Owner: the trio thread. A crash leaves nothing of this: the files are charged again as they are loaded.
"""

from __future__ import annotations

from collections import Counter


class Ledger:
    """How many dirty files there are, and what they are charged, by tenant."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes_of: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return self.bytes_of.total()

    def bytes_in(self, tenant: str | None) -> int:
        """Of a tenant, or of all."""
        return self.bytes if tenant is None else self.bytes_of[tenant]

    def add(self, tenant: str, charged_bytes: int) -> None:
        """A dirty file is known from here on."""
        self.files += 1
        self.bytes_of[tenant] += charged_bytes

    def remove(self, tenant: str, charged_bytes: int) -> None:
        """It is clean, or forgotten."""
        self.files -= 1
        self.bytes_of[tenant] -= charged_bytes

    def change(self, tenant: str, more_bytes: int) -> None:
        """A dirty file is charged so much more."""
        self.bytes_of[tenant] += more_bytes
