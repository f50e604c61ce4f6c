"""Four processes change names at once until daemon and channel are killed: what each was told is there afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mount.changers import CURRENT, SHARED, differences, may_be_current, nodes_of
from tests.support.mount import MountedVolume, mounted_volume, until

PROCESSES = 4
ROUNDS = (150, 40, 80)  # changes that each process makes before the kill; the log is folded twenty times a second


def one_round(volume: MountedVolume, number: int, changes: int) -> list[dict[str, Any]]:
    """What each process was told until the kill."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mount.changers", volume.path, str(10 * number + i), str(100 * number + i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    for process in running:
        while int(told_by(process)) < changes:
            pass
    for pid in volume.pids():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not volume.pids(), "one of them lives on")
    said = [json.loads(process.communicate(timeout=30)[0].splitlines()[-1]) for process in running]
    assert not any(process.returncode for process in running)
    return said


def told_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def check(volume: MountedVolume, one: dict[str, Any]) -> None:
    found = [differences(nodes, volume.path, one["own"]) for nodes in nodes_of(one)]
    assert not all(found), f"{one['own']}, then {one['pending']}: {min(found, key=len)[:10]}"


@pytest.mark.parametrize("mode", ["passthrough", "nopassthrough"])
def test_what_was_answered_is_there(tmp_path: Path, mode: str) -> None:
    options = ["nopassthrough"] if mode == "nopassthrough" else []
    with mounted_volume(tmp_path, options=options) as volume:
        for name in SHARED:
            (volume.path / name).mkdir()
        said: list[dict[str, Any]] = []
        for number, changes in enumerate(ROUNDS):
            said += one_round(volume, number, changes)
            volume.remount()
            for one in said:
                check(volume, one)
            replaced = [put for one in said for put in one["replaced"]]
            assert may_be_current((volume.path / CURRENT).stat().st_ino, replaced)
        assert not volume.complaints()
        volume.umount()
        verified = volume.aof2("verify", "--remote")
        assert not verified.returncode, verified.stdout + verified.stderr
