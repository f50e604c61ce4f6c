"""A kernel that is not there: for a volume that a program has open by itself. Nothing is open through a mount, so there
is nothing to be told.

Owner: stateless.
"""

from __future__ import annotations

from typing import cast

from aof2.engine.kinds.kernel import Kernel


class _NoKernel:
    """What a kind without a mount says to the kernel, and what it asks."""

    passthrough_offered = False

    def invalidate_attr(self, nodeid: int) -> None:
        """No kernel remembers any."""

    def invalidate_entry(self, parent: int, name: bytes, child: int = 0) -> None:
        """Nor names."""

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        """Nor bytes."""

    def hear(self) -> None:
        """No channel tells anything."""

    async def caught_up(self) -> None:
        """There is no channel to wait for."""


def no_kernel() -> Kernel:
    return cast(Kernel, _NoKernel())
