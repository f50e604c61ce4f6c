"""The disk of state_dir loses its power under changes of names: what was synced is there, the rest up to some
change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.power import PowerRounds, on_a_disk


@pytest.mark.parametrize("mode", ["passthrough", "nopassthrough"])
def test_what_was_synced_is_there(tmp_path: Path, mode: str) -> None:
    options = ["nopassthrough"] if mode == "nopassthrough" else []
    with on_a_disk(tmp_path, options=options, timeout_s=240) as (volume, disk):
        rounds = PowerRounds(volume, disk, tmp_path / "journals", 3)
        for changes in (20, 100):
            rounds.one(changes)
        assert rounds.answered > 0
