"""rename(2) and renameat2(2): one step for everybody, and every way in which it must be refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.posix.helpers import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, code, names, renameat2
from tests.support.mount import MountedVolume


def make(path: Path, kind: str) -> None:
    match kind:
        case "file":
            path.write_text(path.name)
        case "dir":
            path.mkdir()
        case "full":
            path.mkdir()
            (path / "inside").write_text("inside")
        case "symlink":
            path.symlink_to("anywhere")
        case "fifo":
            os.mkfifo(path)


KINDS = ["file", "dir", "full", "symlink", "fifo"]


@pytest.mark.parametrize("kind", KINDS)
def test_to_a_new_name(folder: Path, kind: str) -> None:
    (folder / "to").mkdir()
    make(folder / "a", kind)
    before = (folder / "a").lstat()
    os.rename(folder / "a", folder / "b")
    os.rename(folder / "b", folder / "to" / "c")
    after = (folder / "to" / "c").lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert after.st_ctime_ns >= before.st_ctime_ns
    assert names(folder) == ["to"]
    assert code(os.rename, folder / "a", folder / "b") == "ENOENT"


def test_over_something(folder: Path) -> None:
    """Every kind over every kind."""
    expected = {}
    for source in KINDS:
        for target in KINDS:
            want = ""
            if source in ("dir", "full"):
                want = {"dir": "", "full": "ENOTEMPTY"}.get(target, "ENOTDIR")
            elif target in ("dir", "full"):
                want = "EISDIR"
            expected[source, target] = want
    for (source, target), want in expected.items():
        make(folder / "s", source)
        make(folder / "t", target)
        moved = (folder / "s").lstat().st_ino
        assert code(os.rename, folder / "s", folder / "t") == want, (source, target)
        if want:
            subprocess.run(["rm", "-rf", folder / "s"], check=True)
        else:
            assert (folder / "t").lstat().st_ino == moved
        assert names(folder) == ["t"]
        subprocess.run(["rm", "-rf", folder / "t"], check=True)


def test_noreplace(folder: Path) -> None:
    make(folder / "a", "file")
    make(folder / "b", "file")
    assert code(renameat2, folder / "a", folder / "b", RENAME_NOREPLACE) == "EEXIST"
    renameat2(folder / "a", folder / "c", RENAME_NOREPLACE)
    assert {name: (folder / name).read_text() for name in names(folder)} == {"b": "b", "c": "a"}


def test_exchange(folder: Path) -> None:
    (folder / "sub").mkdir()
    for kind in KINDS:
        make(folder / "a", kind)
        make(folder / "sub" / "b", "full")
        inos = [(folder / "a").lstat().st_ino, (folder / "sub" / "b").lstat().st_ino]
        links = (folder.stat().st_nlink + (folder / "sub").stat().st_nlink,)
        renameat2(folder / "a", folder / "sub" / "b", RENAME_EXCHANGE)
        assert [(folder / "sub" / "b").lstat().st_ino, (folder / "a").lstat().st_ino] == inos
        assert links == (folder.stat().st_nlink + (folder / "sub").stat().st_nlink,)
        assert (folder / "a" / "inside").read_text() == "inside"
        assert folder.stat().st_nlink == 4
        subprocess.run(["rm", "-rf", folder / "a", folder / "sub" / "b"], check=True)
    assert code(renameat2, folder / "sub", folder / "nothing", RENAME_EXCHANGE) == "ENOENT"
    assert code(renameat2, folder / "sub", folder / "sub", RENAME_EXCHANGE | RENAME_NOREPLACE) == "EINVAL"


def test_exchange_with_what_is_above_or_below(folder: Path) -> None:
    (folder / "d" / "e").mkdir(parents=True)
    assert code(renameat2, folder / "d", folder / "d" / "e", RENAME_EXCHANGE) == "EINVAL"
    assert code(renameat2, folder / "d" / "e", folder / "d", RENAME_EXCHANGE) == "EINVAL"


def test_unknown_flags(here: Path) -> None:
    make(here / "a", "file")
    assert code(renameat2, here / "a", here / "b", 1 << 10) == "EINVAL"
    assert code(renameat2, here / "a", here / "b", RENAME_WHITEOUT) == "EINVAL"
    assert names(here) == ["a"]


def test_into_itself(folder: Path) -> None:
    (folder / "a" / "b" / "c").mkdir(parents=True)
    assert code(os.rename, folder / "a", folder / "a" / "x") == "EINVAL"
    assert code(os.rename, folder / "a", folder / "a" / "b" / "c" / "x") == "EINVAL"
    assert code(os.rename, folder / "a", folder / "a") == ""
    assert code(os.rename, folder / "a" / "b", folder / "a") == "ENOTEMPTY"


def test_two_names_of_one_file(folder: Path) -> None:
    make(folder / "a", "file")
    os.link(folder / "a", folder / "b")
    os.rename(folder / "a", folder / "b")
    assert names(folder) == ["a", "b"]
    assert (folder / "a").stat().st_nlink == 2


def test_replaced_file_loses_a_link(folder: Path) -> None:
    make(folder / "a", "file")
    make(folder / "b", "file")
    os.link(folder / "b", folder / "c")
    os.rename(folder / "a", folder / "b")
    assert (folder / "c").stat().st_nlink == 1
    assert (folder / "c").read_text() == "b"


def test_a_directory_keeps_its_way_up(folder: Path) -> None:
    (folder / "a" / "d").mkdir(parents=True)
    (folder / "b").mkdir()
    os.rename(folder / "a" / "d", folder / "b" / "d")
    assert os.stat(f"{folder}/b/d/..").st_ino == (folder / "b").stat().st_ino
    fd = os.open(folder / "b" / "d", os.O_RDONLY | os.O_DIRECTORY)
    os.rename(folder / "b" / "d", folder / "d")
    assert os.stat("..", dir_fd=fd).st_ino == folder.stat().st_ino
    os.close(fd)


def test_an_open_file_is_still_it(folder: Path) -> None:
    make(folder / "a", "file")
    with open(folder / "a", "r+b") as f:
        os.rename(folder / "a", folder / "b")
        f.write(b"changed")
    assert (folder / "b").read_bytes() == b"changed"


def test_never_a_moment_without_the_name(each_here: Path) -> None:
    """Who reads a name that is replaced over and over finds the old file or the new one, whole."""
    path = each_here / "current"
    path.write_bytes(b"0" * 5000)
    script = (
        "import os, sys\nos.chdir(sys.argv[1])\nfor i in range(300):\n"
        "  with open('next', 'wb') as f: f.write(b'%d' % (i % 10) * 5000)\n  os.rename('next', 'current')\n"
    )
    looks = 0
    with subprocess.Popen(["python3", "-c", script, each_here]) as writer:
        try:
            while writer.poll() is None or looks < 10:
                data = path.read_bytes()
                assert data == data[:1] * 5000
                looks += 1
        finally:
            writer.kill()
    assert writer.returncode == 0


# -- what is AOF2's own --------------------------------------------------------------------------------------------


def test_between_tenants(each_volume: MountedVolume) -> None:
    one, other = each_volume.path, each_volume.mountpoint / "other"
    make(one / "crossing", "file")
    make(one / "crossing-dir", "dir")
    assert code(os.rename, one / "crossing", other / "crossing") == "EXDEV"
    assert code(os.rename, one / "crossing-dir", other / "crossing-dir") == "EXDEV"
    assert code(os.link, one / "crossing", other / "crossing") == "EXDEV"
    subprocess.run(["mv", one / "crossing", other / "crossing"], check=True)  # which copies then
    assert (other / "crossing").read_text() == "crossing"
    os.unlink(other / "crossing")
    os.rmdir(one / "crossing-dir")


def test_the_root_stays_as_it_is(volume: MountedVolume) -> None:
    top = volume.mountpoint
    assert code((top / "file").touch) == "EPERM"
    assert code(os.mkdir, top / "dir") == "EPERM"
    assert code(os.symlink, "x", top / "link") == "EPERM"
    assert code(os.mkfifo, top / "fifo") == "EPERM"
    assert code(os.rmdir, top / "other") == "EPERM"
    assert code(os.rename, top / "other", top / "renamed") == "EPERM"
    assert code(os.chmod, top, 0o777) == "EPERM"
    make(volume.path / "for-the-root", "file")
    assert code(os.rename, volume.path / "for-the-root", top / "x") in ("EPERM", "EXDEV")
    assert code(os.link, volume.path / "for-the-root", top / "x") in ("EPERM", "EXDEV")
    os.unlink(volume.path / "for-the-root")
    assert names(top) == [".aof2", "default", "other"]
