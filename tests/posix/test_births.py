"""Files that the channel creates by itself, and the backing files it makes ahead of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.files.births import INOS_GRANTED
from tests.posix.helpers import names
from tests.support.mount import MountedVolume, mounted_volume, until

FILES = 200
COARSE_NS = 20_000_000  # the clock of inodes may stand still this long


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[MountedVolume]:
    """A mount in which files were born, and more made ahead."""
    with mounted_volume(tmp_path) as volume:
        (volume.path / "d").mkdir()
        for i in range(FILES):
            (volume.path / "d" / str(i)).write_bytes(b"%d" % i)
        if volume.json("status")["mount"]["passthrough"] is False:
            pytest.skip("no passthrough here: the daemon creates every file")
        until(lambda: backing_files(volume) > FILES)
        yield volume


def backing_files(volume: MountedVolume) -> int:
    return sum(path.is_file() for path in (volume.state_dir / "hot_cache").rglob("*"))


def check_all(volume: MountedVolume) -> None:
    assert len(names(volume.path / "d")) == FILES
    assert all((volume.path / "d" / str(i)).read_bytes() == b"%d" % i for i in range(FILES))


def test_what_was_made_ahead_goes_with_the_mount(busy: MountedVolume) -> None:
    busy.umount()
    assert backing_files(busy) == FILES
    busy.remount()
    check_all(busy)


def test_what_was_made_ahead_goes_after_a_crash(busy: MountedVolume) -> None:
    busy.kill()
    assert backing_files(busy) > FILES
    busy.remount()
    until(lambda: backing_files(busy) == FILES)
    check_all(busy)


def test_a_name_that_was_taken_away_is_given_again_by_the_channel(busy: MountedVolume) -> None:
    d = busy.path / "d"
    first_ino = d.stat().st_ino
    (busy.path / "elsewhere").mkdir()
    for i in range(FILES // 2):
        (d / str(i)).unlink()
    for i in range(FILES // 2, FILES):
        (d / str(i)).rename(busy.path / "elsewhere" / str(i))
    busy.json("status")  # folded
    for i in range(FILES):
        fd = os.open(d / str(i), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        with pytest.raises(FileExistsError):
            os.open(d / str(i), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        assert os.fstat(fd).st_ino - first_ino < INOS_GRANTED // 2  # the daemon's own numbers come behind those
        os.write(fd, b"%d" % i)
        os.close(fd)
    check_all(busy)
    assert len(names(busy.path / "elsewhere")) == FILES // 2


def test_a_file_made_ahead_is_as_old_as_its_birth(busy: MountedVolume) -> None:
    time.sleep(2 * COARSE_NS / 1e9)
    before_ns = time.time_ns() - COARSE_NS
    fd = os.open(busy.path / "d" / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    born = os.fstat(fd)
    os.close(fd)
    backing = (busy.state_dir / "hot_cache" / busy.path.name / f"{born.st_ino}.1").stat()
    for st in (born, backing):
        assert min(st.st_mtime_ns, st.st_ctime_ns, st.st_atime_ns) >= before_ns
