"""`manifest disable` and `enable`: a mounted volume that is read-only for a while, and its log that stands still."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mount import MountedVolume, mounted_volume

MODES = {"passthrough": [], "ranged": ["nopassthrough"]}


@pytest.fixture(params=list(MODES))
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MountedVolume]:
    with mounted_volume(tmp_path, options=MODES[request.param]) as volume:
        yield volume


def log_of(volume: MountedVolume) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (volume.state_dir / "manifest" / "1").glob("*.mlog*")}


def code(what: Callable[[], object]) -> int:
    try:
        what()
    except OSError as e:
        return e.errno or 0
    return 0


def test_off_and_on(volume: MountedVolume) -> None:
    nest = volume.path / "nest"
    nest.mkdir()
    for i in range(40):  # the channel makes them by itself by now
        (nest / f"f{i}").write_bytes(b"x" * i)
    old = volume.path / "old"
    old.write_bytes(b"old")
    cold = volume.path / "cold"
    cold.write_bytes(b"c" * 3_000_000)
    volume.evict(cold)
    assert volume.json("manifest", "disable") == {"enabled": False, "changed": True}
    assert volume.json("manifest", "disable") == {"enabled": False, "changed": False}
    before = log_of(volume)
    changes: list[Callable[[], object]] = [
        lambda: (nest / "new").write_bytes(b"x"),
        lambda: (nest / "folder").mkdir(),
        lambda: (nest / "f1").unlink(),
        lambda: (nest / "f2").rename(nest / "moved"),
        lambda: os.link(old, nest / "link"),
        lambda: os.symlink("x", nest / "symlink"),
        lambda: old.chmod(0o600),
        lambda: os.truncate(old, 1),
        lambda: os.setxattr(old, "user.x", b"y"),
        lambda: open(old, "r+b").close(),
        lambda: open(old, "ab").close(),
    ]
    assert [code(change) for change in changes] == [errno.EROFS] * len(changes)
    assert old.read_bytes() == b"old"
    assert cold.read_bytes() == b"c" * 3_000_000  # fetched, and served
    assert sorted(os.listdir(nest)) == sorted(f"f{i}" for i in range(40))
    assert log_of(volume) == before, "the log did not stand still"
    mount = volume.json("status")["mount"]
    assert mount["read_only"] and "turned off" in mount["read_only_why"]
    assert volume.json("manifest", "enable") == {"enabled": True, "changed": True}
    assert volume.json("manifest", "enable") == {"enabled": True, "changed": False}
    assert not volume.json("status")["mount"]["read_only"]
    assert [code(change) for change in changes] == [0] * len(changes)
    for i in range(40):
        (nest / f"again{i}").write_bytes(b"y" * i)
    volume.done("wait", volume.path)
    volume.evict(cold)
    assert cold.read_bytes() == b"c" * 3_000_000
    volume.umount()
    assert not volume.aof2("verify", "--remote").returncode
    volume.remount()
    assert (nest / "again7").read_bytes() == b"y" * 7
    assert not volume.complaints()


def test_an_open_writer_is_in_the_way(volume: MountedVolume) -> None:
    path = volume.path / "file"
    with open(path, "wb") as f:
        f.write(b"first")
        f.flush()
        ran = volume.aof2("manifest", "disable")
        assert ran.returncode == 1 and "1 file(s) are open for writing" in ran.stderr
        f.write(b" and second")  # it stayed on
        (volume.path / "other").write_bytes(b"taken")
    volume.done("manifest", "disable")
    assert path.read_bytes() == b"first and second"
    assert code(lambda: path.write_bytes(b"")) == errno.EROFS


def test_unmounted_while_it_is_off(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        (volume.path / "file").write_bytes(b"kept")
        volume.done("manifest", "disable")
        volume.umount()
        volume.remount()
        assert (volume.path / "file").read_bytes() == b"kept"
        (volume.path / "file").write_bytes(b"the conf says on")


def test_a_volume_mounted_without_its_log_is_not_turned_on(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, mount=False) as volume:
        volume.mount()
        volume.umount()
        volume.conf.write_text(volume.conf.read_text() + "\n[manifest]\nenabled = false\n")
        volume.mount()
        ran = volume.aof2("manifest", "enable")
        assert ran.returncode == 1 and "enabled = false" in ran.stderr
