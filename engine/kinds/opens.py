"""The open files of one mount, by the number the kernel knows each by.

Numbers of the kinds come from here; what the channel creates by itself has numbers of its own (bit 61), and is put here
when it is folded; so has what it opens (bit 62), which is put here when it tells.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import errno
from typing import Final

from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import FileHandle

OPENED_FH: Final = 1 << 62  # in the numbers of what the channel opened by itself


class Opens:
    """Handles by number."""

    def __init__(self) -> None:
        self._handles: dict[int, FileHandle] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._handles)

    def new_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def put(self, number: int, handle: FileHandle) -> None:
        self._handles[number] = handle

    def get(self, number: int) -> FileHandle:
        try:
            return self._handles[number]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def find(self, number: int) -> FileHandle | None:
        return self._handles.get(number)

    def pop(self, number: int) -> FileHandle | None:
        return self._handles.pop(number, None)
