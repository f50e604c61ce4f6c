"""Hard links and symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

from tests.posix.helpers import code, names, opened
from tests.support.mount import MountedVolume


def test_every_name_is_the_file(folder: Path) -> None:
    (folder / "d").mkdir()
    first = folder / "f"
    first.write_bytes(b"content")
    others = [folder / "g", folder / "d" / "h", folder / "d" / "i"]
    for number, path in enumerate(others, 2):
        os.link(first, path)
        assert {p.stat().st_nlink for p in [first, *others[: number - 1]]} == {number}
    paths = [first, *others]
    assert len({p.stat().st_ino for p in paths}) == 1
    others[1].write_bytes(b"changed through one")
    os.chmod(others[2], 0o604)
    os.utime(others[0], ns=(11, 22))
    assert {(p.read_bytes(), p.stat().st_mode & 0o7777, p.stat().st_mtime_ns) for p in paths} == {
        (b"changed through one", 0o604, 22)
    }
    for left, path in zip((3, 2, 1), paths, strict=False):
        before = paths[-1].stat().st_ctime_ns
        os.unlink(path)
        assert paths[-1].stat().st_nlink == left
        assert paths[-1].stat().st_ctime_ns >= before
    assert others[2].read_bytes() == b"changed through one"


def test_link_counts_are_fresh_where_another_name_is_known(folder: Path) -> None:
    """The kernel remembers attributes by inode: what one name does shows through the other at once."""
    a, b = folder / "a", folder / "b"
    a.touch()
    for _ in range(10):
        os.link(a, b)
        assert (a.stat().st_nlink, b.stat().st_nlink) == (2, 2)
        os.unlink(b)
        assert a.stat().st_nlink == 1
    (folder / "c").touch()
    os.link(a, b)
    os.rename(folder / "c", b)
    assert (a.stat().st_nlink, b.stat().st_nlink) == (1, 1)


def test_what_cannot_be_linked(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "d").mkdir()
    assert code(os.link, folder / "d", folder / "x") == "EPERM"
    assert code(os.link, folder / "f", folder / "d") == "EEXIST"
    assert code(os.link, folder / "f", folder / "f") == "EEXIST"
    assert code(os.link, folder / "nothing", folder / "x") == "ENOENT"
    assert code(os.link, folder / "f", folder / "nothing" / "x") == "ENOENT"


def test_other_kinds_have_links_too(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    os.symlink("target", folder / "link")
    os.link(folder / "fifo", folder / "fifo2")
    os.link(folder / "link", folder / "link2", follow_symlinks=False)
    assert (folder / "fifo2").stat().st_nlink == (folder / "link2").lstat().st_nlink == 2
    assert os.readlink(folder / "link2") == "target"


def test_a_name_while_it_is_written(folder: Path) -> None:
    with opened(folder / "a") as fd:
        os.write(fd, b"one")
        os.link(folder / "a", folder / "b")
        os.unlink(folder / "a")
        os.write(fd, b"two")
        assert (folder / "b").read_bytes() == b"onetwo"
        assert os.fstat(fd).st_nlink == 1


def test_symlinks_keep_their_target_as_it_is(folder: Path) -> None:
    targets = [b"x", b"../..", b"/absolute/path", b"with space\nand newline", b"\xff\xfe", b"a/" * 2000, b"z" * 4095]
    top = os.fsencode(folder)
    for number, target in enumerate(targets):
        path = top + b"/%d" % number
        os.symlink(target, path)
        assert os.readlink(path) == target
        st = os.lstat(path)
        assert (st.st_size, st.st_mode & 0o7777, st.st_nlink) == (len(target), 0o777, 1)
    assert code(os.symlink, b"z" * 4096, top + b"/long") == "ENAMETOOLONG"
    assert code(os.symlink, b"", top + b"/empty") == "ENOENT"
    assert code(os.symlink, b"x", top + b"/0") == "EEXIST"
    assert code(os.readlink, folder) == "EINVAL"


def test_symlinks_are_followed(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "f").write_text("found")
    os.symlink("d", folder / "dir")
    os.symlink("dir/f", folder / "file")
    os.symlink(folder / "d" / "new", folder / "dangling")
    assert (folder / "file").read_text() == "found"
    assert (folder / "dir" / "f").read_text() == "found"
    assert code(os.stat, folder / "dangling") == "ENOENT"
    (folder / "dangling").write_text("made through it")
    assert (folder / "d" / "new").read_text() == "made through it"
    os.unlink(folder / "file")
    assert names(folder / "d") == ["f", "new"]
    os.rename(folder / "dir", folder / "moved")
    assert os.readlink(folder / "moved") == "d"


def test_too_many_symlinks(folder: Path) -> None:
    os.symlink("b", folder / "a")
    os.symlink("a", folder / "b")
    assert code(os.stat, folder / "a") == code(os.listdir, folder / "b") == "ELOOP"
    (folder / "0").write_text("end")
    for i in range(40):
        os.symlink(str(i), folder / str(i + 1))
    assert (folder / "40").read_text() == "end"
    os.symlink("40", folder / "41")
    assert code(os.stat, folder / "41") == "ELOOP"


def test_out_of_the_mount_and_back(here: Path, tmp_path: Path, volume: MountedVolume) -> None:
    (tmp_path / "outside").write_text("outside")
    os.symlink(tmp_path / "outside", here / "out")
    os.symlink(here, tmp_path / "in")
    assert (tmp_path / "in" / "out").read_text() == "outside"
    os.symlink(volume.mountpoint / "other", here / "tenant")
    assert names(here / "tenant") == names(volume.mountpoint / "other")
