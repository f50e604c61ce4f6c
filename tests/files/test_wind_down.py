"""The end of a mount: what the remote has of the log is all of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.files import Files, stream_of
from aof2.engine.tiering import landing
from aof2.engine.volume import Volume
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, content, publish, run_files, top

COUNT = 20


class SlowLanding(Env):
    """Each commit of what landed is followed by a pause."""

    def failpoint(self, name: str) -> None:
        if name == "land.synced":
            time.sleep(0.6)


def test_the_log_of_what_landed_at_the_end_is_in_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume is closed while the neighbours of a file come in."""
    monkeypatch.setattr(landing, "AT_ONCE", 4)
    volumes: list[Volume] = []

    async def body(files: Files, kernel: FakeKernel) -> None:
        inos = []
        for n in range(COUNT):
            row, fh = await files.create(top(files.volume), b"f%d" % n, os.O_WRONLY, mode=0o644, uid=0, gid=0)
            await files.handle(fh).write(0, b"%d " % n * 20)
            await files.release(fh)
            inos.append(row.ino)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1) for ino in inos])
        for ino in inos[:2]:
            assert await content(files, ino)
        volumes.append(files.volume)

    run_files(small_settings(tmp_path), body, env=SlowLanding())
    assert volumes[0].replicator.is_there
