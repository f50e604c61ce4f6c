"""Thousands of files open at once are ordinary: each is sealed after its last close, in whatever order that comes."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tests.support.mount import MountedVolume, mounted_volume

MANY = 1_100  # more than the handles that are kept for later


def paths_of(volume: MountedVolume, count: int = MANY) -> list[Path]:
    return [volume.path / f"f{n:05}" for n in range(count)]


@contextlib.contextmanager
def all_open(paths: list[Path], flags: int) -> Iterator[list[int]]:
    fds = [os.open(path, flags) for path in paths]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def test_opened_closed_and_appended_to(tmp_path: Path) -> None:
    """Read by many at once, then written to in no order at all, some while they are read: all of it is sealed."""
    with mounted_volume(tmp_path) as own:
        paths = paths_of(own)
        for n, path in enumerate(paths):
            path.write_bytes(b"%d\n" % n)
        own.done("wait", own.path)
        order = random.Random(1).sample(paths, MANY)
        with all_open(paths, os.O_RDONLY) as fds:
            assert [os.read(fd, 10) for fd in fds] == [b"%d\n" % n for n in range(MANY)]
            for path in order[::2]:
                with path.open("ab") as f:
                    f.write(b"read")
        with all_open(order[1::2], os.O_RDWR | os.O_APPEND) as fds:
            for fd in fds:
                os.write(fd, b"more")
        own.umount()
        own.remount()
        assert [x["dirty_objects"] for x in own.ask("status")["volume"]["tenants"]] == [0, 0]
        written_to = set(order[::2])
        for n, path in enumerate(paths):
            assert path.read_bytes() == b"%d\n" % n + (b"read" if path in written_to else b"more")
