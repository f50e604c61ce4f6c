"""SegmentFile: the space and the durability of one unsealed segment file. It knows offsets, not records.

Space is reserved in steps ahead of the data, always with `tail_bytes` (a footer's length) to spare.

Invariants
- ENOSPC shows in `write`, before a byte is written; whatever went wrong there, nothing past `end` remains.
- The last `tail_bytes` of the file are zeros until the footer is put there, so no payload can pass for a footer.
- A failed fsync is FatalIOError; from then on `refusal` is set and no write is taken.

Owner: its SegmentWriter.

What a crash leaves behind: reserved zeros, and any mix of the pages written since the last `sync`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, ReadOnlyError

SEALED_MODE: Final = 0o400
RESERVE_STEP_BYTES: Final = 4 << 20


class SegmentFile:
    """Writes go to the end."""

    def __init__(
        self, env: Env, path: Path, fd: int, *, end: int, size_max: int, tail_bytes: int, step_bytes: int
    ) -> None:
        self._env = env
        self._fd = fd
        self._size_max = size_max
        self._tail_bytes = tail_bytes
        self._step_bytes = step_bytes
        self._reserved_end = end
        self._named = False  # whether the file's name is durable
        self.path = path
        self.end = end  # where the next byte goes
        self.refusal = ""  # why no write is taken

    @property
    def fd(self) -> int:
        return self._fd

    def adopt(self, end: int) -> None:
        """Bytes up to there were written through the descriptor; what failed on the way was cut off."""
        self.end = end
        self._reserved_end = max(end, min(self._reserved_end, os.fstat(self._fd).st_size))

    def check_writable(self) -> None:
        if self.refusal:
            raise ReadOnlyError(f"{self.path}: takes no writes: {self.refusal}")

    def append(self, data: bytes) -> None:
        """Puts `data` at the end. OSError: the file is as before."""
        self.reserve(self.end + len(data) + self._tail_bytes)
        self._write(data)
        self.end += len(data)

    def put_tail(self, data: bytes) -> None:
        """Puts the footer behind the end, which stays where it is."""
        self.reserve(self.end + self._tail_bytes)
        self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._env.files.pwrite(self._fd, data, self.end)
        except OSError:
            self._cut_back()
            self.sync()  # or bytes of the failed write could pass for records after a crash
            raise

    def reserve(self, wanted_end: int) -> None:
        """The disk has room up to there, and a step further where there is one. OSError: as before."""
        if wanted_end <= self._reserved_end:
            return
        target = max(wanted_end, min(self._reserved_end + self._step_bytes, self._size_max))
        try:
            self._env.files.preallocate(self._fd, self._reserved_end, target - self._reserved_end)
        except OSError:
            self._cut_back()
            raise
        self._reserved_end = target
        self._env.failpoint("segment.append.reserved")

    def _cut_back(self) -> None:
        """Undoes a write or reservation that failed midway: only zeros follow the end."""
        try:
            self._env.files.truncate(self._fd, self.end)
            if self.end:
                self._env.files.truncate(self._fd, self.end + self._tail_bytes)
        except OSError as e:
            self.refusal = "a failed write could not be undone"
            raise FatalIOError(f"{self.path}: {self.refusal}: {e.strerror}") from e
        self._reserved_end = self.end

    def cut_to_size(self) -> None:
        """Gives back what was reserved beyond end and footer."""
        try:
            self._env.files.truncate(self._fd, self.end + self._tail_bytes)
        except OSError:
            self._cut_back()
            raise
        self._reserved_end = self.end + self._tail_bytes

    def sync(self) -> None:
        """Makes the bytes durable."""
        try:
            self._env.files.fsync(self._fd)
        except (OSError, FatalIOError) as e:
            raise self._sync_failed(e) from e

    def sync_name(self) -> bool:
        """Makes the file's name durable; True when it was not yet."""
        if self._named:
            return False
        try:
            self._env.files.fsync_dir(self.path.parent)
        except (OSError, FatalIOError) as e:
            raise self._sync_failed(e) from e
        self._named = True
        return True

    def _sync_failed(self, cause: Exception) -> FatalIOError:
        self.refusal = "an fsync failed"
        return FatalIOError(f"{self.path}: {cause}")

    def protect(self) -> None:
        """Takes away the permission to write: the file is sealed."""
        os.fchmod(self._fd, SEALED_MODE)

    def close(self, refusal: str = "it is closed") -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self.refusal = self.refusal or refusal
            self._env.files.close(fd)
