"""The folder of backing files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.local.hot import HotCache


def read_of_an_old_file(path: Path) -> float:
    """Its access time after a read, where it was older than its last change."""
    os.utime(path, (1, 2))
    path.read_bytes()
    return path.stat().st_atime


@pytest.mark.parametrize("tenant_first", [False, True])
def test_reading_a_backing_file_leaves_its_access_time(tmp_path: Path, tenant_first: bool) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"x")
    if read_of_an_old_file(plain) == 1:
        pytest.skip("access times do not move on this filesystem")
    hot = HotCache(Env(), tmp_path / "hot")
    path = hot.path("tenant", 5, 1)
    if tenant_first:
        hot.env.make_dirs(path.parent)
    hot.leave_access_times()
    fd = hot.create(path)
    os.write(fd, b"x")
    os.close(fd)
    assert read_of_an_old_file(path) == 1
