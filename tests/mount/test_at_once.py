"""Four processes change names at once until daemon, channel or both are killed: what each was told is there
afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.namerounds import NameRounds
from tests.support.mount import mounted_volume

PROCESSES = 4
# What is killed, and how many changes each process makes before; the log is folded twenty times a second.
ROUNDS = {"both": 150, "channel": 40, "daemon": 80}


@pytest.mark.parametrize("mode", ["passthrough", "nopassthrough"])
def test_what_was_answered_is_there(tmp_path: Path, mode: str) -> None:
    options = ["nopassthrough"] if mode == "nopassthrough" else []
    with mounted_volume(tmp_path / "v", options=options) as volume:
        rounds = NameRounds(volume, tmp_path / "journals", 7, processes=PROCESSES)
        for kind, changes in ROUNDS.items():
            rounds.one(kind, changes)
        rounds.is_clean()
