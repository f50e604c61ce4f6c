"""Mounts that the tests of this folder share, and the plain directory they are held against.

Most tests take `folder` and run three times: in a plain directory of this machine, which proves the test, and in the
mount with files passed through and with files in ranged mode. What is AOF2's own is tested in `here`, in the mount
only. At the end of the session nothing must have been logged that somebody would have to read, and the volume, once
unmounted, must verify clean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.mount import MountedVolume, mounted_volume

_count = itertools.count(1)
MODES = {"passthrough": (), "ranged": ("nopassthrough",)}


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MountedVolume]]:
    """One mount a mode. suid and devices are allowed, as on a disk that root mounts."""
    root = tmp_path_factory.mktemp("posix")
    root.chmod(0o755)

    def mounted(mode: str) -> AbstractContextManager[MountedVolume]:
        return mounted_volume(root / mode, options=["allow_other,suid,dev", *MODES[mode]], timeout_s=0)

    with mounted("passthrough") as passthrough, mounted("ranged") as ranged:
        yield {"passthrough": passthrough, "ranged": ranged}
        for volume in (passthrough, ranged):
            if volume.pids():
                with volume.deadline():
                    assert not volume.complaints()
                    volume.umount()
                    verified = volume.aof2("verify", "--remote")
                    assert not verified.returncode, verified.stdout + verified.stderr
                    assert not volume.complaints()


@pytest.fixture
def volume(volumes: dict[str, MountedVolume]) -> Iterator[MountedVolume]:
    """The mount with passthrough, if the kernel has it."""
    with volumes["passthrough"].deadline():
        yield volumes["passthrough"]


@pytest.fixture(params=list(MODES))
def each_volume(request: pytest.FixtureRequest, volumes: dict[str, MountedVolume]) -> Iterator[MountedVolume]:
    with volumes[request.param].deadline():
        yield volumes[request.param]


def _fresh(above: Path) -> Path:
    path = above / f"t{next(_count)}"
    path.mkdir()
    path.chmod(0o755)
    return path


@pytest.fixture
def here(volume: MountedVolume) -> Path:
    """A new directory in the mount."""
    return _fresh(volume.path)


@pytest.fixture
def each_here(each_volume: MountedVolume) -> Path:
    return _fresh(each_volume.path)


@pytest.fixture(params=["plain", *MODES])
def folder(
    request: pytest.FixtureRequest, volumes: dict[str, MountedVolume], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A new directory: of this machine's disk, then in each mount."""
    if request.param == "plain":
        yield _fresh(tmp_path_factory.getbasetemp())
        return
    with volumes[request.param].deadline():
        yield _fresh(volumes[request.param].path)
