"""Descriptors that are open for the length of a block.

Owner: stateless. A crash closes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opened(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)
