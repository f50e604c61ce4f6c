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
        rounds.keep_short()
        old_s = time.time() - 3600
        for path in (volume.remote / "inbox").rglob("*"):
            if path.is_file():
                os.utime(path, (old_s, old_s))
        volume.mount()
        rounds.is_clean(JOBS)
        volume.umount()
        volume.done("verify", "--remote")
        volume.mount()


def test_delivered_by_the_command(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, tenants=TENANTS, follow=FOLLOW) as volume:
        folder = tmp_path / "out"
        (folder / "sub").mkdir(parents=True)
        (folder / "a.csv").write_bytes(b"1,2\n")
        (folder / "sub" / "b.csv").write_bytes(b"3,4\n" * 100_000)
        to = volume.mountpoint / "default" / "reports"
        done = volume.json("deliver", "--to", to, "--job", "daily", folder, folder / "a.csv")
        assert (done["files"], done["bytes"]) == (3, 400_008)
        assert (to / "out" / "sub" / "b.csv").read_bytes() == b"3,4\n" * 100_000
        again = volume.aof2("deliver", "--to", to, folder / "a.csv")
        assert again.returncode == 1 and "something of that name" in again.stderr and "Traceback" not in again.stderr
        said = volume.done("deliver", "--to", volume.mountpoint / "events" / "clicks", folder / "a.csv")
        assert "1 record(s)" in said
        assert (volume.mountpoint / "events" / "clicks" / f"{0:020}.jsonl").read_bytes() == b"1,2\n"
        volume.done("wait", to)
        assert volume.json("status", to / "a.csv")["durable"]
