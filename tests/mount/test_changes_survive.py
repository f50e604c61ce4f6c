"""What the channel answered is there after a kill of the daemon, of the channel, or of both, and nothing else is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.posix.test_by_the_channel import EXPECTED, IS_ROOT, change_everything, made_to_change, portrait, stopped
from tests.support.mount import mounted_volume, until

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="a user's mounts pass nothing through")


@pytest.mark.parametrize("who", ["daemon", "channel", "both", "both, ranged"])
def test_after_a_kill(tmp_path: Path, who: str) -> None:
    ranged = who.endswith("ranged")
    with mounted_volume(tmp_path, options=["nopassthrough"] if ranged else []) as volume:
        here = volume.path / "here"
        here.mkdir()
        made_to_change(here, bears=not ranged)
        volume.done("wait", here)
        daemon = volume.daemon_pid()
        channel = next(pid for pid in volume.pids() if pid != daemon)
        with stopped(volume, here):  # so that nothing is folded
            change_everything(here)
            before = portrait(here)
            assert before.keys() == EXPECTED
            for pid in {"daemon": [daemon], "channel": [channel, daemon], "both": [daemon, channel]}[who.split(",")[0]]:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not volume.pids(), "one of them lives on")
        volume.remount()
        assert portrait(here) == before
        volume.umount()
        verified = volume.aof2("verify", "--remote")
        assert not verified.returncode, verified.stdout + verified.stderr
        volume.remount()
        assert portrait(here) == before
