"""Extended attributes: users', root's, capabilities, limits, and the facts AOF2 tells."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path

import pytest

from tests.posix.helpers import NOBODY, bits, code, code_as, forked, opened
from tests.support.mount import MountedVolume, until

# cap_net_raw=ep, version 2, as setcap(8) writes it.
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


def test_set_get_list_remove(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "d").mkdir()
    for path in (folder / "f", folder / "d"):
        assert os.listxattr(path) == []
        os.setxattr(path, "user.a", b"1")
        os.setxattr(path, "user.empty", b"")
        os.setxattr(path, b"user.\xff\n", bytes(range(256)))
        os.setxattr(path, "trusted.t", b"root's")
        assert set(map(os.fsencode, os.listxattr(path))) == {b"user.a", b"user.empty", b"user.\xff\n", b"trusted.t"}
        assert os.getxattr(path, "user.a") == b"1"
        assert os.getxattr(path, "user.empty") == b""
        assert os.getxattr(path, b"user.\xff\n") == bytes(range(256))
        os.setxattr(path, "user.a", b"22")
        assert os.getxattr(path, "user.a") == b"22"
        os.removexattr(path, "user.a")
        assert code(os.getxattr, path, "user.a") == code(os.removexattr, path, "user.a") == "ENODATA"


def test_create_and_replace(folder: Path) -> None:
    path = folder / "f"
    path.touch()
    assert code(os.setxattr, path, "user.a", b"", os.XATTR_REPLACE) == "ENODATA"
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    assert code(os.setxattr, path, "user.a", b"2", os.XATTR_CREATE) == "EEXIST"
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"3"


def test_limits(each_here: Path) -> None:
    """64 KiB a value, which is all Linux has; 256 KiB an inode."""
    path = each_here / "f"
    path.touch()
    big = os.urandom(65536)
    os.setxattr(path, "user.big", big)
    assert os.getxattr(path, "user.big") == big
    assert code(os.setxattr, path, "user.big", big + b"x") == "E2BIG"
    assert code(os.setxattr, path, "user." + "n" * 251, b"") == "ERANGE"
    os.setxattr(path, "user." + "n" * 250, b"longest")
    assert os.getxattr(path, "user." + "n" * 250) == b"longest"
    os.setxattr(path, "user.two", big)
    os.setxattr(path, "user.three", big)
    assert code(os.setxattr, path, "user.four", big) == "ENOSPC"
    assert os.getxattr(path, "user.three") == big


def test_hundreds(each_here: Path) -> None:
    path = each_here / "f"
    path.touch()
    for i in range(200):
        os.setxattr(path, f"user.{i}", b"%d" % i)
    assert sorted(os.listxattr(path)) == sorted(f"user.{i}" for i in range(200))
    assert all(os.getxattr(path, f"user.{i}") == b"%d" % i for i in range(200))


def test_who_may(folder: Path) -> None:
    path = folder / "f"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o600)
    os.setxattr(path, "trusted.secret", b"x")
    assert code_as(NOBODY, folder, os.setxattr, "f", "user.mine", b"x") == ""
    assert code_as(NOBODY, folder, os.setxattr, "f", "trusted.mine", b"x") == "EPERM"
    assert code_as(NOBODY, folder, os.getxattr, "f", "trusted.secret") in ("ENODATA", "EPERM")
    assert code_as(NOBODY - 7, folder, os.getxattr, "f", "user.mine") == "EACCES"
    assert code_as(NOBODY - 7, folder, os.setxattr, "f", "user.x", b"x") == "EACCES"
    os.symlink("f", folder / "l")
    os.mkfifo(folder / "p")
    assert code(os.setxattr, folder / "l", "user.x", b"x", follow_symlinks=False) == "EPERM"
    assert code(os.setxattr, folder / "p", "user.x", b"x") == "EPERM"
    assert code(os.setxattr, folder / "nothing", "user.x", b"x") == "ENOENT"


def test_unknown_kinds(each_here: Path) -> None:
    path = each_here / "f"
    path.touch()
    assert code(os.setxattr, path, "nonsense", b"x") == "EOPNOTSUPP"
    assert code(os.setxattr, path, "system.posix_acl_access", b"x") in ("EOPNOTSUPP", "EINVAL")
    assert code(os.getxattr, path, "system.posix_acl_access") in ("EOPNOTSUPP", "ENODATA")


def test_they_move_with_the_file(folder: Path) -> None:
    (folder / "a").touch()
    os.setxattr(folder / "a", "user.x", b"1")
    os.link(folder / "a", folder / "b")
    os.rename(folder / "a", folder / "c")
    assert os.getxattr(folder / "b", "user.x") == os.getxattr(folder / "c", "user.x") == b"1"
    with opened(folder / "c") as fd:
        os.unlink(folder / "b")
        os.unlink(folder / "c")
        assert os.getxattr(fd, "user.x") == b"1"
    (folder / "c").touch()
    assert os.listxattr(folder / "c") == []


def test_capabilities(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"program")
    os.setxattr(path, "security.capability", CAPABILITY)
    assert os.getxattr(path, "security.capability") == CAPABILITY
    assert "security.capability" in os.listxattr(path)
    os.chown(path, 5, 5)
    assert code(os.getxattr, path, "security.capability") == "ENODATA"


@pytest.mark.parametrize("how", ["write", "truncate", "open"])
def test_another_users_change_takes_capabilities_away(folder: Path, how: str) -> None:
    path = folder / "f"
    path.write_bytes(b"program")
    path.chmod(0o777)
    os.setxattr(path, "security.capability", CAPABILITY)

    def work() -> None:
        if how == "truncate":
            os.truncate("f", 1)
            return
        with opened("f", os.O_WRONLY | (os.O_TRUNC if how == "open" else 0)) as fd:
            if how == "write":
                os.write(fd, b"x")

    forked(work, uid=NOBODY, cwd=folder)
    assert code(os.getxattr, path, "security.capability") == "ENODATA"
    assert bits(path) == 0o777


def test_facts(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    path.write_bytes(b"facts" * 1000)

    def value(name: str) -> bytes:
        return os.getxattr(path, f"user.aof2.{name}")

    each_volume.done("wait", path)
    assert value("durable") == b"1"
    assert value("sha256") == hashlib.sha256(b"facts" * 1000).hexdigest().encode()
    assert value("generation") == b"1"
    assert value("residency") == b"1.000"
    each_volume.evict(path)
    assert value("residency") == b"0.000"
    assert path.read_bytes() == b"facts" * 1000
    until(lambda: value("residency") == b"1.000")  # said once the block is synced
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        os.write(fd, b"more")
        assert value("durable") == b"0"
        assert value("generation") == b"2"
        assert code(value, "sha256") == "ENODATA"
    each_volume.done("wait", path)
    assert value("durable") == b"1"
    assert value("sha256") == hashlib.sha256(b"facts" * 1000 + b"more").hexdigest().encode()
    assert os.listxattr(path) == []
    assert code(os.setxattr, path, "user.aof2.sha256", b"x") == "EPERM"
    assert code(os.setxattr, path, "user.aof2.new", b"x") == "EPERM"
    assert code(os.removexattr, path, "user.aof2.durable") == "EPERM"
    os.setxattr(path, "user.aof2.cold_scan", b"1")
    os.removexattr(path, "user.aof2.cold_scan")
    assert code(os.getxattr, each_here, "user.aof2.sha256") == "ENODATA"


def test_short_buffers(folder: Path) -> None:
    from tests.posix.helpers import libc

    path = os.fsencode(folder / "f")
    Path(os.fsdecode(path)).touch()
    os.setxattr(path, "user.a", b"12345678")
    import ctypes

    buffer = ctypes.create_string_buffer(4)
    assert libc.getxattr(path, b"user.a", buffer, 4) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert libc.getxattr(path, b"user.a", None, 0) == 8
    assert libc.listxattr(path, buffer, 4) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert libc.listxattr(path, None, 0) == 7
