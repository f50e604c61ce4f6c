"""What a daemon hands to the control server and to the views of `.aof2/`: the volume, and what the mount knows.

Owner: the daemon; the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from aof2.engine.files.state import OpenFile
from aof2.engine.volume import Volume
from aof2.fs.options import Options


class OpenFiles(Protocol):
    """The table of open files (`engine.files.Files`), as far as the verbs need it."""

    @property
    def passthrough(self) -> bool: ...

    @property
    def passthrough_why(self) -> str:
        """Why it is on, or off."""

    @property
    def brake(self) -> bool:
        """Whether passthrough writers are held, not stopped, where room ends."""

    @property
    def brake_why(self) -> str:
        """Why not."""

    async def seal_closed(self, inos: Collection[int] | None = None) -> int:
        """Seals what is closed and dirty now (of these, or all); how many files."""

    def is_open(self, ino: int) -> bool: ...

    def open_count(self) -> int: ...

    def dirty_count(self) -> int: ...

    def dirty_bytes(self) -> int:
        """Written and not sealed yet."""

    def writing(self) -> set[int]:
        """Inodes of files that are open for writing."""

    async def drop_kernel_pages(self, ino: int) -> None: ...

    def file(self, ino: int) -> OpenFile | None:
        """The file, if it is open or not sealed yet."""

    def holding(self, ino: int) -> AbstractAsyncContextManager[None]:
        """One at a time for what changes a file's state."""


class Channel(Protocol):
    """The process that owns /dev/fuse, as far as the verbs need it."""

    @property
    def handed_over(self) -> int:
        """Answers too long for the FUSE socket."""

    def invalidate_entry(self, parent: int, name: bytes) -> None: ...

    async def settled(self) -> None:
        """Returns when what it was told before has had effect."""


class Mounted(Protocol):
    """A volume that is mounted. `files` and `channel` keep to the protocols above."""

    @property
    def volume(self) -> Volume: ...

    @property
    def mountpoint(self) -> Path: ...

    @property
    def options(self) -> Options: ...

    @property
    def files(self) -> OpenFiles: ...

    @property
    def channel(self) -> Channel: ...

    @property
    def started_ms(self) -> int: ...

    def stop_births(self) -> None:
        """No file comes to be without the daemon, until it made one again itself."""

    async def caught_up(self) -> None:
        """Returns when every file that an application was told of is in the catalog."""
