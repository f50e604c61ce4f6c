"""Killed at every named point of moving data: verify calls it orphans at worst, and mends those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aof2.engine.catalog import writer
from aof2.engine.local import warm
from aof2.engine.tiering import evict, hydrate, publish
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from tests.engine.helpers import small_settings
from tests.verify.build import kinds

CHILD = """
import os, sys
from pathlib import Path
from aof2.engine.env import Env
from tests.verify.build import make

class Dying(Env):
    left = int(sys.argv[2])
    def failpoint(self, name):
        if name == sys.argv[1]:
            Dying.left -= 1
            if not Dying.left:
                os._exit(9)

make(Path(sys.argv[3]), env=Dying())
"""
POINTS = [
    *((point, 1) for module in (evict, hydrate, publish, warm) for point in module.CRASH_POINTS),
    *((point, nth) for point in writer.CRASH_POINTS for nth in (1, 5)),
]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_killed_volume_holds_no_damage(tmp_path: Path, point: str, nth: int) -> None:
    top = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", CHILD, point, str(nth), str(tmp_path)], cwd=top, check=False)
    assert child.returncode == 9
    settings = small_settings(tmp_path)
    assert set(kinds(verify(settings, deep_remote=True))) <= {Kind.LOCAL_ORPHAN, Kind.SCRATCH}
    assert verify(settings, repair=True).exit_code in (0, 1)
    assert verify(settings, deep_remote=True).exit_code == 0
