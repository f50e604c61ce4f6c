"""What the channel was told of a file, from its first open to its last close.

Modes. All opens of an inode are in one mode at a time, decided at the first open and held to until the last close:
- PASSTHROUGH: the kernel reads and writes the backing file itself. Only for files that are here whole, and for writers
  of files that no descriptor can read meanwhile, whose finished chunks may go (`brake.py`).
- RANGED: reads and writes are requests. The channel answers those whose blocks it knows to be in the backing file,
  the rest comes to `Files`.

Owner: the trio thread. A crash leaves nothing of this: the channel ends with the daemon.
"""

from __future__ import annotations

from typing import Final

import trio

from aof2.engine.kinds.kernel import Mode


class AtChannel:
    """A file as the channel has it."""

    __slots__ = (
        "appends", "budget", "closed", "doubted", "granted_bytes", "masked", "mode", "registered", "special", "told",
        "window_bytes", "write_only",
    )  # fmt: skip

    def __init__(self, mode: Mode | None, *, write_only: bool = False, appends: bool = False) -> None:
        self.mode = mode
        self.registered = False
        self.masked = False  # registered block by block: the channel can be told that one is not to be relied on
        self.special = False  # suid, sgid or capabilities: a write by another user takes them away
        self.told = 0  # up to which block the channel knows what is here
        self.budget = 0  # what the channel may still write without asking, as far as is known
        self.granted_bytes = 0  # all it was ever allowed
        self.window_bytes = 0  # the last grant: the next is larger
        self.appends = appends  # a descriptor was opened with O_APPEND
        self.write_only = write_only  # no descriptor was open that could map it: parts can go from under a writer
        self.doubted = False  # a block of it turned out bad: what the kernel was given may be
        self.closed: trio.Event | None = None  # the last handle was closed; made by who waits for that

    @property
    def ranged(self) -> bool:
        """Whether the channel answers for blocks of it."""
        return self.registered and self.mode is Mode.RANGED

    @property
    def passed(self) -> bool:
        """Whether the kernel reads and writes the backing file past the channel."""
        return self.registered and self.mode is Mode.PASSTHROUGH

    async def until_closed(self) -> None:
        if self.closed is None:
            self.closed = trio.Event()
        await self.closed.wait()


class _NotOpen(AtChannel):
    """Of every file without a handle, so that such a file takes no memory for this. It cannot be changed."""

    __slots__ = ("_made",)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_made"):
            raise AttributeError(f"{name} of a file that is not open")
        super().__setattr__(name, value)

    def __init__(self) -> None:
        super().__init__(None)
        self._made = True


NOT_OPEN: Final = _NotOpen()
