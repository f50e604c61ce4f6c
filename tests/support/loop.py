"""A small filesystem of its own, in a file: for tests of a disk that is full, or loses its power. Root only.

Owner: the test that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*args: object) -> None:
    subprocess.run([*map(str, args)], check=True, capture_output=True, timeout=60)


SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
NO_LOG_FLUSH = 2
FOLDER = "other"  # what another user of the disk has


class LoopDisk:
    """ext4 in a file, mounted at `path`."""

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        self._image = image
        self._filled = 0

    def sync(self) -> None:
        _run("sync", "-f", self.path)

    def cut(self) -> None:
        """From here on nothing reaches the image: neither pages nor what the journal has in memory."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def let_go(self) -> bool:
        """Whether it is unmounted."""
        return subprocess.run(["umount", self.path], capture_output=True, timeout=60, check=False).returncode == 0

    def power_up(self) -> None:
        """What the image has, mounted again."""
        _run("mount", "-o", "loop", self._image, self.path)

    def free_inodes(self) -> int:
        return os.statvfs(self.path).f_favail

    def free_bytes(self) -> int:
        space = os.statvfs(self.path)
        return space.f_bfree * space.f_frsize

    def take_inodes(self, *, leave: int = 0) -> None:
        """Somebody else's files, until so many inodes are left."""
        folder = self._folder()
        while self.free_inodes() > leave:
            try:
                self._name(folder).touch()
            except OSError:
                return

    def take_bytes(self, *, leave: int = 0) -> None:
        """Somebody else's bytes, down to the last block that root may have, or until so many are left."""
        folder = self._folder()
        size = 32 << 20
        while size >= 4096:
            if self.free_bytes() - leave < size:
                size //= 2
                continue
            path = self._name(folder)
            fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                os.ftruncate(fd, 0)
                size //= 2
            finally:
                os.close(fd)

    def refuses(self, size_bytes: int) -> bool:
        """Whether so much can be had no more."""
        path = self._name(self._folder())
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            return True
        finally:
            os.close(fd)
            path.unlink()
        return False

    def give_back(self) -> None:
        shutil.rmtree(self.path / FOLDER, ignore_errors=True)

    def _folder(self) -> Path:
        folder = self.path / FOLDER
        folder.mkdir(exist_ok=True)
        return folder

    def _name(self, folder: Path) -> Path:
        self._filled += 1
        return folder / str(self._filled)


@contextlib.contextmanager
def loop_disk(folder: Path, *, size_bytes: int, inodes: int = 0) -> Iterator[LoopDisk]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a loop filesystem takes root and mkfs.ext4")
    image, path = folder / "image", folder / "disk"
    path.mkdir()
    with open(image, "wb") as f:
        f.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", *(["-N", inodes] if inodes else []), image)
    try:
        _run("mount", "-o", "loop", image, path)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no loop devices: {e.stderr.decode().strip()}")
    try:
        yield LoopDisk(path, image)
    finally:
        _run("umount", "-l", path)
        image.unlink()
