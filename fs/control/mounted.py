"""What a daemon hands to the control server and to the views of `.aof2/`: the volume, and what the mount knows.

Owner: the daemon; the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from aof2.engine.inbox.intake import Intake
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.volume import Volume
from aof2.fs.channel_wire import KnownHandle
from aof2.fs.options import Options


class Channel(Protocol):
    """The process that owns /dev/fuse, as far as the verbs need it."""

    @property
    def handed_over(self) -> int:
        """Answers too long for the FUSE socket."""

    @property
    def transport(self) -> str:
        """How requests come."""

    def invalidate_entry(self, parent: int, name: bytes) -> None: ...

    @property
    def device(self) -> tuple[int, int]:
        """Major and minor number of the mount."""

    async def caught_up(self) -> None:
        """Returns when what it was told before has had effect."""

    async def dump(self) -> list[KnownHandle]:
        """Every handle that it knows."""


class Mounted(Protocol):
    """A volume that is mounted."""

    volume: Volume
    mountpoint: Path
    options: Options
    kinds: Kinds
    inbox: Intake
    started_ms: int

    @property
    def channel(self) -> Channel: ...

    def end(self) -> None:
        """The daemon ends as it does when the mount is gone."""


async def by_the_daemon_alone(mounted: Mounted) -> None:
    """From here on the channel changes no names by itself, until a file that the daemon creates lets it go on; what it
    answered before is in the rows."""
    mounted.kinds.stop_ahead()
    await mounted.channel.caught_up()
    await mounted.kinds.fold()
