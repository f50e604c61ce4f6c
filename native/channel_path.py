"""Where the installed `aof2-channel` is: beside this module, in an editable install as in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "aof2-channel"


def channel_path() -> Path:
    """The executable; FileNotFoundError says how to build it."""
    path = Path(__file__).with_name(NAME)
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"{path} is missing: install the project again (scripts/aof2 does it), which builds it")
    return path
