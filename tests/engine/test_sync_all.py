"""Many files are synced at once where that is cheaper, one by one elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aof2.engine import env


@pytest.mark.parametrize(("count", "dirty", "singly"), [(3, 0, True), (40, 0, False), (40, 1 << 40, True)])
def test_which_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, dirty: int, singly: bool) -> None:
    synced: list[int] = []

    class Counting(env.Files):
        def fsync(self, fd: int) -> None:
            synced.append(fd)
            super().fsync(fd)

    monkeypatch.setattr(env, "_dirty_bytes", lambda: dirty)
    fds = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(count)]
    Counting().fsync_all(fds)
    assert synced == (fds if singly else [])
    for fd in fds:
        os.close(fd)


def test_what_is_to_be_written_out_is_known() -> None:
    assert env._dirty_bytes() >= 0
