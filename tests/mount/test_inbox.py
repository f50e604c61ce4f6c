"""The inbox of a mounted volume: jobs of processes that know no mount, some killed, the daemon killed meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.mount.inboxrounds import FOLLOW, TENANTS, InboxRounds
from tests.support.mount import mounted_volume

JOBS = 12


def test_each_committed_job_is_there_once_and_nothing_else(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, tenants=TENANTS, follow=FOLLOW, timeout_s=240.0) as volume:
        rounds = InboxRounds(volume, seed=16)
        rounds.run(JOBS, processes=2, kills=2)
        volume.umount()
        old_s = time.time() - 3600
        for path in (volume.remote / "inbox").rglob("*"):
            if path.is_file():
                os.utime(path, (old_s, old_s))
        volume.mount()
        rounds.is_clean(JOBS)
        volume.umount()
        volume.done("verify", "--remote")
        volume.mount()
