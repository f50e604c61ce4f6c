"""Who may do what: modes, owners, suid and sgid, sticky and setgid directories, other users."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import NOBODY, OTHER, bits, code, code_as, forked, opened
from tests.support.mount import MountedVolume, mounted_volume


def make(path: Path, mode: int, uid: int = NOBODY, gid: int = NOBODY, data: bytes = b"data") -> Path:
    path.write_bytes(data)
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def test_every_mode_comes_back(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "d").mkdir()
    for mode in (0, 0o1, 0o10, 0o400, 0o644, 0o777, 0o1000, 0o2000, 0o4000, 0o7777):
        for name in ("f", "d"):
            os.chmod(folder / name, mode)
            assert bits(folder / name) == mode
    os.symlink("f", folder / "link")
    os.chmod(folder / "link", 0o600)
    assert (bits(folder / "f"), bits(folder / "link")) == (0o600, 0o777)
    assert code(os.chmod, folder / "nothing", 0o600) == "ENOENT"


def test_only_the_owner_changes_the_mode(folder: Path) -> None:
    make(folder / "f", 0o666)
    assert code_as(OTHER, folder, os.chmod, "f", 0o600) == "EPERM"
    assert code_as(NOBODY, folder, os.chmod, "f", 0o600) == ""
    assert code_as(OTHER, folder, os.utime, "f", (1, 1)) == "EPERM"
    assert code_as(OTHER, folder, os.utime, "f") == "EACCES"
    assert code_as(NOBODY, folder, os.utime, "f", (1, 1)) == ""


def test_chown_rules(folder: Path) -> None:
    make(folder / "f", 0o644)
    assert code_as(NOBODY, folder, os.chown, "f", OTHER, -1) == "EPERM"
    assert code_as(NOBODY, folder, os.chown, "f", -1, OTHER) == "EPERM"
    assert code_as(NOBODY, folder, os.chown, "f", -1, OTHER, groups=(OTHER,)) == ""
    assert code_as(OTHER, folder, os.chown, "f", OTHER, OTHER) == "EPERM"
    st = (folder / "f").stat()
    assert (st.st_uid, st.st_gid) == (NOBODY, OTHER)
    os.symlink("f", folder / "link")
    os.lchown(folder / "link", 7, 8)
    assert ((folder / "link").lstat().st_uid, (folder / "f").stat().st_uid) == (7, NOBODY)
    os.chown(folder / "f", 1 << 31, (1 << 32) - 2)
    assert ((folder / "f").stat().st_uid, (folder / "f").stat().st_gid) == (1 << 31, (1 << 32) - 2)


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755, 0o2745, 0o6644])
def test_a_new_owner_inherits_no_suid(folder: Path, mode: int) -> None:
    """sgid without group execute is not a privilege; the kernel leaves it to the file's owner."""
    for uid, gid in ((5, -1), (-1, 5), (5, 5)):
        path = make(folder / "f", mode)
        os.chown(path, uid, gid)
        keeps = mode & stat.S_ISGID if not mode & stat.S_IXGRP else 0
        assert bits(path) == mode & 0o777 | keeps, (uid, gid)


def test_a_directory_keeps_its_bits_when_it_changes_hands(folder: Path) -> None:
    (folder / "d").mkdir()
    os.chmod(folder / "d", 0o6775)
    os.chown(folder / "d", 5, 5)
    assert bits(folder / "d") == 0o6775


def test_setgid_outside_ones_groups_is_dropped(folder: Path) -> None:
    make(folder / "f", 0o755, NOBODY, OTHER)
    forked(lambda: os.chmod("f", 0o2755), uid=NOBODY, cwd=folder)
    assert bits(folder / "f") == 0o755
    forked(lambda: os.chmod("f", 0o2755), uid=NOBODY, groups=(OTHER,), cwd=folder)
    assert bits(folder / "f") == 0o2755


def write(path: str) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.pwrite(fd, b"x", 1)


def append(path: str) -> None:
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"x")


def truncate(path: str) -> None:
    os.truncate(path, 2)


def ftruncate(path: str) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.ftruncate(fd, 1)


def open_truncate(path: str) -> None:
    with opened(path, os.O_WRONLY | os.O_TRUNC):
        pass


CHANGES = [write, append, truncate, ftruncate, open_truncate]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [0o4777, 0o2777, 0o6777])
def test_another_users_change_takes_suid_away(folder: Path, change: Callable[[str], None], mode: int) -> None:
    make(folder / "f", mode, uid=5, gid=5)
    forked(lambda: change("f"), uid=NOBODY, cwd=folder)
    assert bits(folder / "f") == 0o777
    assert (folder / "f").stat().st_uid == 5


def test_another_users_write_after_the_owner_set_it(folder: Path) -> None:
    """The file is open, and passed through, before it becomes suid."""
    path = make(folder / "f", 0o777, uid=5, gid=5)

    def work() -> int:
        with opened("f", os.O_WRONLY) as fd:
            os.write(fd, b"a")
            os.write(writer, b"x")
            os.read(reader2, 1)
            os.write(fd, b"b")
        return 0

    reader, writer = os.pipe()
    reader2, writer2 = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        finally:
            os._exit(0)
    os.read(reader, 1)
    path.chmod(0o4777)
    os.write(writer2, b"x")
    os.waitpid(pid, 0)
    for fd in (reader, writer, reader2, writer2):
        os.close(fd)
    assert path.read_bytes() == b"abta"
    assert bits(path) == 0o777


def test_roots_write_leaves_suid(folder: Path) -> None:
    path = make(folder / "f", 0o6777)
    write(str(path))
    truncate(str(path))
    assert bits(path) == 0o6777


def test_a_read_takes_nothing_away(folder: Path) -> None:
    make(folder / "f", 0o6777)
    assert forked(lambda: Path("f").read_bytes(), uid=OTHER, cwd=folder) == b"data"
    assert bits(folder / "f") == 0o6777


def test_others_permissions(folder: Path) -> None:
    (folder / "closed").mkdir()
    make(folder / "closed" / "f", 0o666)
    (folder / "closed").chmod(0o700)
    (folder / "listed").mkdir()
    make(folder / "listed" / "f", 0o666)
    (folder / "listed").chmod(0o744)
    (folder / "passed").mkdir()
    make(folder / "passed" / "f", 0o640, uid=0, gid=OTHER)
    (folder / "passed").chmod(0o711)
    assert code_as(NOBODY, folder, os.stat, "closed/f") == "EACCES"
    assert code_as(NOBODY, folder, os.listdir, "closed") == "EACCES"
    assert code_as(NOBODY, folder, os.listdir, "listed") == ""
    assert code_as(NOBODY, folder, os.stat, "listed/f") == "EACCES"
    assert code_as(NOBODY, folder, os.listdir, "passed") == "EACCES"
    assert code_as(NOBODY, folder, os.stat, "passed/f") == ""
    assert code_as(NOBODY, folder, os.open, "passed/f", os.O_RDONLY) == "EACCES"
    assert code_as(OTHER, folder, os.open, "passed/f", os.O_RDONLY) == ""
    assert code_as(NOBODY, folder, os.open, "passed/f", os.O_RDONLY, groups=(OTHER,)) == ""
    assert code_as(OTHER, folder, os.open, "passed/f", os.O_WRONLY) == "EACCES"
    assert code_as(NOBODY, folder, os.unlink, "passed/f") == "EACCES"
    assert code_as(NOBODY, folder, os.mkdir, "passed/d") == "EACCES"
    assert code_as(NOBODY, folder, os.rename, "passed/f", "passed/g") == "EACCES"


def test_access_says_what_open_does(folder: Path) -> None:
    for mode in (0o400, 0o200, 0o100, 0o040, 0o004, 0o007, 0o777):
        make(folder / "f", mode)
        for uid in (NOBODY, OTHER):
            for want, flag in ((os.R_OK, os.O_RDONLY), (os.W_OK, os.O_WRONLY), (os.R_OK | os.W_OK, os.O_RDWR)):
                says = forked(lambda want=want: os.access("f", want), uid=uid, cwd=folder)
                does = code_as(uid, folder, os.open, "f", flag) == ""
                assert says == does, (oct(mode), uid, flag)


def test_sticky(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    make(shared / "f", 0o666, uid=NOBODY)
    (shared / "d").mkdir()
    os.chown(shared / "d", NOBODY, NOBODY)
    assert code_as(OTHER, shared, os.unlink, "f") == "EPERM"
    assert code_as(OTHER, shared, os.rmdir, "d") == "EPERM"
    assert code_as(OTHER, shared, os.rename, "f", "g") == "EPERM"
    forked(lambda: Path("mine").touch(), uid=OTHER, cwd=shared)
    assert code_as(OTHER, shared, os.rename, "mine", "f") == "EPERM"
    assert code_as(OTHER, shared, os.unlink, "mine") == ""
    assert code_as(NOBODY, shared, os.unlink, "f") == ""
    assert code_as(NOBODY, shared, os.rmdir, "d") == ""


def test_setgid_directory_hands_its_group_down(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    os.chown(shared, 0, OTHER)
    shared.chmod(0o2777)

    def work() -> None:
        Path("f").touch()
        Path("d").mkdir()
        Path("d/e").mkdir()
        os.symlink("f", "l")
        os.mkfifo("p")

    forked(work, uid=NOBODY, gid=NOBODY, cwd=shared)
    for name in ("f", "d", "d/e", "l", "p"):
        st = (shared / name).lstat()
        assert (st.st_uid, st.st_gid) == (NOBODY, OTHER), name
    assert bits(shared / "d") & stat.S_ISGID
    assert bits(shared / "d" / "e") & stat.S_ISGID
    assert not bits(shared / "f") & stat.S_ISGID


def test_suid_works_when_asked_for(here: Path) -> None:
    """The shared mounts are with -o suid."""
    program = here / "id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    said = forked(lambda: subprocess.check_output(["./id", "-u"], text=True), uid=NOBODY, cwd=here)
    assert said.strip() == "0"


def test_programs_run_from_the_mount(each_here: Path) -> None:
    script = each_here / "hello"
    script.write_text("#!/bin/sh\necho hello $1\n")
    assert code(subprocess.run, [script]) == "EACCES"
    script.chmod(0o755)
    assert subprocess.check_output([script, "you"], text=True) == "hello you\n"
    shutil.copy("/bin/true", each_here / "true")
    assert subprocess.run([each_here / "true"], check=False).returncode == 0
    with subprocess.Popen(["/bin/sleep", "100"]) as _sleeper:
        shutil.copy("/bin/sleep", each_here / "sleep")
        with subprocess.Popen([each_here / "sleep", "100"]) as running:
            assert code(os.open, each_here / "sleep", os.O_WRONLY) == "ETXTBSY"
            running.kill()
        _sleeper.kill()


# -- how it is mounted ---------------------------------------------------------------------------------------------


def test_options(tmp_path: Path) -> None:
    """By default the mount is its owner's alone, without suid and devices; the rest is asked for."""
    with mounted_volume(tmp_path, options=["allow_other"]) as volume:
        shutil.copy("/usr/bin/id", volume.path / "id")
        (volume.path / "id").chmod(0o4755)
        os.mknod(volume.path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        said = forked(lambda: subprocess.check_output(["./id", "-u"], text=True), uid=NOBODY, cwd=volume.path)
        assert said.strip() == str(NOBODY)
        assert code(os.open, volume.path / "null", os.O_RDONLY) == "EACCES"
        assert code_as(NOBODY, volume.path, os.stat, "id") == ""
        volume.umount()
        volume.options = []
        volume.remount()
        assert code_as(NOBODY, volume.path, os.stat, "id") == "EACCES"
        assert (volume.path / "id").stat().st_mode & 0o7777 == 0o4755
        volume.umount()
        volume.options = ["ro", "noexec", f"uid={OTHER}", "umask=027"]
        volume.remount()
        assert code((volume.path / "new").touch) == "EROFS"
        assert code(os.unlink, volume.path / "id") == "EROFS"
        assert code(os.open, volume.path / "id", os.O_RDWR) == "EROFS"
        assert code(os.chmod, volume.path / "id", 0o600) == "EROFS"
        assert code(os.setxattr, volume.path / "id", "user.x", b"") == "EROFS"
        assert code(subprocess.run, [volume.path / "id"]) == "EACCES"
        assert (volume.path / "id").stat().st_uid == OTHER
        assert bits(volume.path / "id") & 0o777 == 0o750
        assert not volume.complaints()


def test_dot_aof2_is_the_owners(volume: MountedVolume) -> None:
    dot = volume.mountpoint / ".aof2"
    assert bits(dot) == 0o500
    assert code_as(NOBODY, volume.mountpoint, os.listdir, ".aof2") == "EACCES"
    assert code_as(NOBODY, volume.mountpoint, os.stat, ".aof2/status.json") == "EACCES"
