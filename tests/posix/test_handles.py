"""File handles: what name_to_handle_at gives, open_by_handle_at opens, also after the kernel forgot the inode and after
a remount. That is what an NFS server does with the files it exports."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.posix.helpers import AT_FDCWD, check, code, libc
from tests.support.mount import MountedVolume, mounted_volume, until

HANDLE_MAX = 128


class _FileHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * HANDLE_MAX))


class Handle(NamedTuple):
    type: int
    data: bytes


def handle_of(path: Path) -> Handle:
    found, mount_id = _FileHandle(bytes=HANDLE_MAX), ctypes.c_int()
    check(libc.name_to_handle_at(AT_FDCWD, os.fsencode(path), ctypes.byref(found), ctypes.byref(mount_id), 0))
    return Handle(found.type, bytes(found.handle[: found.bytes]))


def open_handle(mountpoint: Path, handle: Handle, flags: int = os.O_RDONLY) -> int:
    wanted = _FileHandle(bytes=len(handle.data), type=handle.type)
    ctypes.memmove(wanted.handle, handle.data, len(handle.data))
    mount_fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return check(libc.open_by_handle_at(mount_fd, ctypes.byref(wanted), flags))
    finally:
        os.close(mount_fd)


def forget_inodes() -> None:
    """The kernel lets go of every dentry and inode that is not in use."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("2")


def content(mountpoint: Path, handle: Handle) -> bytes:
    fd = open_handle(mountpoint, handle)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def _may_drop_caches() -> None:
    if not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        pytest.skip("the kernel's caches are not ours to drop")


def test_a_forgotten_file_is_opened_by_its_handle(each_volume: MountedVolume, each_here: Path) -> None:
    deep = each_here / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"by handle")
    (each_here / ".hidden").write_bytes(b"dot")
    file, hidden, folder = handle_of(deep / "file"), handle_of(each_here / ".hidden"), handle_of(deep)
    forget_inodes()
    assert content(each_volume.mountpoint, file) == b"by handle"
    assert content(each_volume.mountpoint, hidden) == b"dot"
    forget_inodes()
    fd = open_handle(each_volume.mountpoint, folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["file"]
        # Its way up was looked up as well: the kernel knows where the directory is.
        assert os.readlink(f"/proc/self/fd/{fd}") == str(deep)
        assert os.stat("..", dir_fd=fd).st_ino == (each_here / "a").stat().st_ino
    finally:
        os.close(fd)


def test_a_handle_writes_and_links_like_a_name(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "file"
    path.write_bytes(b"old")
    handle = handle_of(path)
    path.rename(each_here / "moved")
    forget_inodes()
    fd = open_handle(each_volume.mountpoint, handle, os.O_RDWR | os.O_APPEND)
    try:
        os.write(fd, b" and new")
    finally:
        os.close(fd)
    assert (each_here / "moved").read_bytes() == b"old and new"


def test_a_removed_file_is_stale(each_volume: MountedVolume, each_here: Path) -> None:
    """Also one that was in the remote and could be undeleted; a directory; a file that another took the place of."""
    for name in ("fresh", "published", "replaced"):
        (each_here / name).write_bytes(b"x")
    (each_here / "folder").mkdir()
    each_volume.done("wait", each_here / "published")
    handles = [handle_of(each_here / name) for name in ("fresh", "published", "replaced", "folder")]
    (each_here / "fresh").unlink()
    (each_here / "published").unlink()
    (each_here / "other").write_bytes(b"y")
    (each_here / "other").rename(each_here / "replaced")
    (each_here / "folder").rmdir()
    for handle in handles:
        forget_inodes()
        assert code(open_handle, each_volume.mountpoint, handle) == "ESTALE"


def test_an_unlinked_file_that_is_open_is_found_until_it_is_closed(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "open"
    path.write_bytes(b"still here")
    handle = handle_of(path)
    with open(path, "rb"):
        path.unlink()
        forget_inodes()
        assert content(each_volume.mountpoint, handle) == b"still here"

    def stale() -> bool:
        forget_inodes()
        return code(open_handle, each_volume.mountpoint, handle) == "ESTALE"

    until(stale, "a removed file is opened by its handle")


def test_handles_of_what_is_not_in_a_tenant(each_volume: MountedVolume) -> None:
    tops = [each_volume.mountpoint, each_volume.path, each_volume.mountpoint / ".aof2" / "manifest"]
    handles = [handle_of(path) for path in tops]
    inos = [path.stat().st_ino for path in tops]
    for handle, ino in zip(handles, inos, strict=True):
        forget_inodes()
        fd = open_handle(each_volume.mountpoint, handle, os.O_RDONLY | os.O_DIRECTORY)
        assert os.fstat(fd).st_ino == ino
        os.close(fd)


def test_a_made_up_handle_is_stale(each_volume: MountedVolume, each_here: Path) -> None:
    (each_here / "file").write_bytes(b"x")
    known = handle_of(each_here / "file")
    forget_inodes()
    ino = int.from_bytes(known.data[:4], "little") << 32 | int.from_bytes(known.data[4:8], "little")
    for wrong in (ino + (1 << 30), 0, (1 << 62) + 1):
        made_up = (wrong >> 32).to_bytes(4, "little") + (wrong & 0xFFFFFFFF).to_bytes(4, "little") + known.data[8:]
        assert code(open_handle, each_volume.mountpoint, Handle(known.type, made_up)) == "ESTALE"


def test_handles_outlive_a_remount(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        (volume.path / "clean").write_bytes(b"clean")
        (volume.path / "gone").write_bytes(b"gone")
        clean, gone = handle_of(volume.path / "clean"), handle_of(volume.path / "gone")
        (volume.path / "gone").unlink()
        volume.umount()
        volume.remount()
        assert content(volume.mountpoint, clean) == b"clean"
        assert code(open_handle, volume.mountpoint, gone) == "ESTALE"
        (volume.path / "dirty").write_bytes(b"dirty")
        dirty = handle_of(volume.path / "dirty")
        volume.kill()
        volume.remount()
        assert content(volume.mountpoint, dirty) == b"dirty"
        assert content(volume.mountpoint, clean) == b"clean"
