"""Where a replay reads from: a file or bytes, through one bounded window.

Invariants
- At most WINDOW_BYTES, or the one piece asked for, is in memory, however large the log or a length in it.
- The size is taken once: records appended later belong to the next replay. A file cut meanwhile reads short, which is
  CorruptError, where a mapping would be SIGBUS.

Owner: the one thread that replays. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from aof2.engine.errors import CorruptError
from aof2.engine.fds import opened

WINDOW_BYTES = 1 << 20


class Source:
    """`size` bytes, read with `pread(length, offset)`. `path` is for messages."""

    def __init__(self, pread: Callable[[int, int], bytes], size: int, path: str = "") -> None:
        self._pread = pread
        self.size = size
        self.path = path
        self._window = b""
        self._at = 0

    @classmethod
    def of_bytes(cls, data: bytes, path: str = "") -> Source:
        view = memoryview(data)
        return cls(lambda length, offset: bytes(view[offset : offset + length]), len(data), path)

    @classmethod
    def of_fd(cls, fd: int, path: str = "", size: int | None = None) -> Source:
        """The descriptor stays the caller's, open while the source is used."""
        return cls(
            lambda length, offset: os.pread(fd, length, offset), os.fstat(fd).st_size if size is None else size, path
        )

    def window(self, offset: int, length: int) -> tuple[bytes, int]:
        """(buffer, i): `length` bytes of the source from `offset` are buffer[i : i + length]. The caller asks within
        the size."""
        start = offset - self._at
        if start < 0 or start + length > len(self._window):
            want = min(max(length, WINDOW_BYTES), self.size - offset)
            pieces = []
            at = offset
            while want:
                piece = self._pread(want, at)
                if not piece:
                    raise CorruptError("audit log became shorter while it was read", path=self.path, offset=at)
                pieces.append(piece)
                at += len(piece)
                want -= len(piece)
            self._window, self._at, start = b"".join(pieces), offset, 0
        return self._window, start

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes: fewer at the end."""
        length = max(0, min(length, self.size - offset))
        buffer, i = self.window(offset, length)
        return buffer[i : i + length]

    def sha256(self, prefix: bytes, offset: int, length: int) -> bytes:
        """SHA-256(prefix, length bytes from offset), a window at a time. The caller asks within the size."""
        digest = hashlib.sha256(prefix)
        end = offset + length
        while offset < end:
            piece = self.read(offset, min(WINDOW_BYTES, end - offset))
            digest.update(piece)
            offset += len(piece)
        return digest.digest()


@contextlib.contextmanager
def open_source(log: bytes | Path | Source) -> Iterator[Source]:
    if isinstance(log, Source):
        yield log
    elif isinstance(log, bytes):
        yield Source.of_bytes(log)
    else:
        with opened(log) as fd:
            yield Source.of_fd(fd, str(log))
