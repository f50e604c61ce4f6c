"""ARCHITECTURE.md names modules: each is there."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parent.parent
PLACES = ("", "engine", "fs", "engine/files", "engine/tiering", "engine/replicate", "engine/inbox", "native/channel")


def test_every_module_of_the_walks_is_there() -> None:
    page = (TOP / "engine" / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"[a-z_0-9/]+\.(?:py|c|h|md)\b", page, re.IGNORECASE))
    assert len(named) > 50
    assert [name for name in sorted(named) if not any((TOP / place / name).is_file() for place in PLACES)] == []
