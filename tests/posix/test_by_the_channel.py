"""What asks about names is answered by the channel alone, from the catalog and what is not folded yet, and what changes
them is: the daemon stands still meanwhile, so whatever needed it would hang."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.posix.conftest import IS_ROOT
from tests.posix.helpers import RENAME_EXCHANGE, code, renameat2
from tests.support.mount import MountedVolume, mounted_volume

drops_names = pytest.mark.skipif(not IS_ROOT, reason="the kernel's names are dropped")


def drop_names() -> None:
    if IS_ROOT:
        Path("/proc/sys/vm/drop_caches").write_text("2")


@contextmanager
def stopped(volume: MountedVolume, here: Path) -> Iterator[None]:
    """No answer comes from the daemon. The kernel knows the way to the directory, and files may grow: while one is open
    for writing, its tenant has room ahead."""
    pid, way = volume.daemon_pid(), os.open(here, os.O_PATH)
    writer = os.open(volume.path / "writer", os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"x")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        os.close(writer)
        os.close(way)


@contextmanager
def standing_still(volume: MountedVolume, here: Path) -> Iterator[None]:
    """The same, and the kernel knows none of the directory's names."""
    with stopped(volume, here):
        drop_names()
        yield


@drops_names
def test_attributes_and_targets(each_volume: MountedVolume, each_here: Path) -> None:
    file, link, fifo = each_here / "file", each_here / "link", each_here / "fifo"
    file.write_bytes(b"x" * 5000)
    link.symlink_to("a target")
    os.mkfifo(fifo, 0o640)
    os.setxattr(file, "user.colour", b"green")
    os.setxattr(file, "user.shape", b"")
    os.utime(fifo, ns=(-1_500_000_001, 1 << 63))
    before = {p: os.lstat(p) for p in (file, link, fifo, each_here)}
    with standing_still(each_volume, each_here):
        for path, was in before.items():
            now = os.lstat(path)
            fields = (
                "st_ino",
                "st_mode",
                "st_nlink",
                "st_uid",
                "st_gid",
                "st_size",
                "st_blocks",
                "st_mtime_ns",
                "st_atime_ns",
            )
            assert [getattr(now, f) for f in fields] == [getattr(was, f) for f in fields], path
        assert os.readlink(link) == "a target"
        assert os.getxattr(file, "user.colour") == b"green"
        assert os.getxattr(file, "user.shape") == b""
        assert sorted(os.listxattr(file)) == ["user.colour", "user.shape"]
        assert code(os.getxattr, file, "user.none") == "ENODATA"
        assert code(os.stat, each_here / "none") == "ENOENT"
        assert code(os.stat, each_here / ("n" * 255)) == "ENOENT"


@drops_names
def test_listings(each_volume: MountedVolume, each_here: Path) -> None:
    names = {f"name-{i:04}" + "x" * (i % 200) for i in range(1500)}
    for name in names:
        (each_here / name).touch()
    below = each_here / "below"
    below.mkdir()
    with standing_still(each_volume, each_here):
        assert set(os.listdir(each_here)) == names | {"below"}
        assert os.listdir(below) == []
        with os.scandir(each_here) as entries:
            assert all(entry.stat().st_ino == entry.inode() for entry in entries)


@drops_names
def test_what_is_not_folded_is_seen(each_volume: MountedVolume, each_here: Path) -> None:
    """Files that were made, and others that were removed, a moment ago."""
    old = [each_here / f"old-{i}" for i in range(40)]
    for path in old:
        path.write_bytes(b"old")
    os.listdir(each_here)
    for i, path in enumerate(old):
        if i % 2:
            path.unlink()
        else:
            (each_here / f"new-{i}").write_bytes(b"new" * i)
    with standing_still(each_volume, each_here):
        left = {f"old-{i}" for i in range(0, 40, 2)} | {f"new-{i}" for i in range(0, 40, 2)}
        assert set(os.listdir(each_here)) == left
        assert {i for i in range(40) if code(os.stat, old[i]) == ""} == set(range(0, 40, 2))
        assert [os.stat(each_here / f"new-{i}").st_size for i in range(0, 40, 2)] == [3 * i for i in range(0, 40, 2)]
        assert stat.S_ISDIR(os.stat(each_here).st_mode)


def test_a_listing_goes_on_where_it_was(each_volume: MountedVolume, each_here: Path) -> None:
    """What is there all the time is told once, whatever changes meanwhile."""
    names = [f"{i:05}" for i in range(3000)]
    for name in names:
        (each_here / name).touch()
    seen = []
    with os.scandir(each_here) as entries:
        for i, entry in enumerate(entries):
            seen.append(entry.name)
            if i % 100 == 0:
                (each_here / f"{i:05}-more").touch()
                (each_here / f"{2999 - i:05}").unlink(missing_ok=True)
    gone = {f"{2999 - i:05}" for i in range(0, 3000, 100)}
    assert len(seen) == len(set(seen))
    assert set(names) - gone <= set(seen) <= set(names) | {f"{i:05}-more" for i in range(0, 3100, 100)}


def portrait(top: Path) -> dict[str, tuple[object, ...]]:
    """Every name below, with what a change may change."""
    found = {}
    for folder, dirs, files in os.walk(top):
        for name in (*dirs, *files):
            st = os.lstat(Path(folder, name))
            found[os.path.relpath(Path(folder, name), top)] = (
                st.st_ino,
                st.st_mode,
                st.st_nlink,
                st.st_uid,
                st.st_gid,
                st.st_mtime_ns,
                xattrs_of(Path(folder, name)),
            )
    return found


def xattrs_of(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path, follow_symlinks=False)}


# What is made anew while the channel is alone: where only the daemon makes files they are there before.
NEW = {"fresh": "new", "over/born": "born", "over/born again": "born again"}
OWNERS = ((5, 6), (7, -1), (8, 9)) if IS_ROOT else ((os.getuid(), os.getgid()),) * 3


def new_file(here: Path, name: str) -> Path:
    path = here / name
    if not path.exists():
        path.write_text(NEW[name])
    return path


def change_everything(here: Path) -> None:
    """Every change that the channel makes, some on top of others."""
    for i in range(10):
        (here / f"new-{i}").mkdir(0o750)
        (here / f"file-{i}").rename(here / f"new-{i}" / "moved")
        os.link(here / f"new-{i}" / "moved", here / f"link-{i}")
        os.utime(here / f"link-{i}", ns=(10**18 + i, 10**18 + 2 * i))
        os.chmod(here / f"link-{i}", 0o600 + i % 8)
    for i in range(0, 10, 2):
        (here / f"link-{i}").unlink()
        (here / f"new-{i}" / "moved").unlink()
        (here / f"new-{i}").rmdir()
    (here / "new-1").rename(here / "new-3" / "below")
    (here / "new-3").rename(here / "top")
    (here / "target").unlink()
    replace_some(here)
    os.chmod(here / "top", 0o700)
    (here / "points").symlink_to("x" * 500)
    os.chown(here / "points", *OWNERS[0], follow_symlinks=False)
    os.chown(here / "top", *OWNERS[1])
    fresh = new_file(here, "fresh")  # as tar does
    os.chown(fresh, *OWNERS[2])
    os.chmod(fresh, 0o640)
    os.utime(fresh, ns=(10**18 + 7, 10**18 + 8))
    mark_some(here)


def mark_some(here: Path) -> None:
    """xattrs: of what is new, of what is not; some were there before."""
    for path in (here / "fresh", here / "link-1", here / "top"):
        os.setxattr(path, "user.colour", b"red")
        os.setxattr(path, "user.colour", b"dark green", os.XATTR_REPLACE)
        os.setxattr(path, "user.shape", b"", os.XATTR_CREATE)
        os.setxattr(path, "user.gone", b"soon")
        os.removexattr(path, "user.gone")
    os.setxattr(here / "over" / "d", "user.old", bytes(range(256)) * 16)
    os.removexattr(here / "over" / "d", "user.older")


def replace_some(here: Path) -> None:
    """Names over names, and in exchange for others."""
    over = here / "over"
    os.rename(over / "a", over / "b")
    os.rename(over / "linked", over / "d")  # which has another name
    os.rename(over / "dir-1", over / "dir-2")
    os.rename(over / "dir-2", over / "below" / "empty")
    os.rename(over / "points", over / "b")
    for name in ("over/born", "over/born again"):
        os.rename(new_file(here, name), over / "e")
    renameat2(over / "e", over / "below" / "f", RENAME_EXCHANGE)
    renameat2(over / "below", over / "g", RENAME_EXCHANGE)
    renameat2(over / "g" / "empty", over / "h", RENAME_EXCHANGE)


def made_to_change(here: Path, *, bears: bool = True) -> None:
    over = here / "over"
    for name in ("dir-1/inside", "dir-2", "below/empty"):
        (over / name).mkdir(parents=True)
    for name in ("a", "b", "linked", "d", "e", "below/f", "g", "h"):
        (over / name).write_bytes(name.encode())
    os.link(over / "d", over / "more")
    os.setxattr(over / "linked", "user.old", b"old")
    os.setxattr(over / "linked", "user.older", b"older")
    (over / "points").symlink_to("anywhere")
    for i in range(10):
        (here / f"file-{i}").write_bytes(b"x" * i)
    (here / "target").symlink_to("somewhere")
    for name in () if bears else NEW:
        new_file(here, name)


OVER = {"b", "d", "more", "e", "below", "g", "g/f", "g/empty", "h", "h/inside"}
EXPECTED = {"over", *(f"over/{name}" for name in OVER)}
EXPECTED |= {"points", "fresh", "top", "top/moved", "top/below", "top/below/moved"}
EXPECTED |= (
    {f"link-{i}" for i in range(1, 10, 2)} | {f"new-{i}" for i in (5, 7, 9)} | {f"new-{i}/moved" for i in (5, 7, 9)}
)


@pytest.fixture
def sealed(each_volume: MountedVolume, each_here: Path) -> Path:
    """A directory to change, whose files are not written any more."""
    made_to_change(each_here, bears=each_volume.json("status")["mount"]["passthrough"])
    each_volume.done("wait", each_here)
    return each_here


def test_changes(each_volume: MountedVolume, sealed: Path) -> None:
    with standing_still(each_volume, sealed):
        change_everything(sealed)
        before = portrait(sealed)
        assert before.keys() == EXPECTED
        assert stat.S_IMODE((sealed / "top").stat().st_mode) == 0o700
        for name in ("fresh", "link-1", "top"):
            assert before[name][-1] == {"user.colour": b"dark green", "user.shape": b""}
        assert before["over/d"][-1] == {"user.old": bytes(range(256)) * 16}
        assert sealed.stat().st_nlink == 2 + 5
        assert [(sealed / "over" / name).stat().st_nlink for name in ("", "g", "h", "more")] == [2 + 2, 2, 3, 1]
        assert (sealed / "top").stat().st_nlink == 3
        assert before["fresh"][1:-1] == (stat.S_IFREG | 0o640, 1, *OWNERS[2], 10**18 + 8)
    assert (sealed / "top").exists()
    assert portrait(sealed) == before
    os.symlink("x", sealed / "by-the-daemon")  # before which all of it is folded
    (sealed / "by-the-daemon").unlink()
    drop_names()
    assert portrait(sealed) == before
    assert (sealed / "link-9").read_bytes() == b"x" * 9
    assert os.readlink(sealed / "points") == "x" * 500
    over = sealed / "over"
    texts = {name: (over / name).read_text() for name in ("d", "more", "e", "below", "g/f", "g/empty")}
    assert texts == {"d": "linked", "more": "d", "e": "below/f", "below": "g", "g/f": "born again", "g/empty": "h"}
    assert os.readlink(over / "b") == "anywhere"
    each_volume.done("wait", sealed)
    assert portrait(sealed) == before


def test_xattrs_that_are_refused(here: Path) -> None:
    path = here / "file"
    path.touch()
    os.setxattr(path, "user.a", b"1")
    assert code(os.setxattr, path, "user.a", b"2", os.XATTR_CREATE) == "EEXIST"
    assert code(os.setxattr, path, "user.b", b"2", os.XATTR_REPLACE) == "ENODATA"
    assert code(os.removexattr, path, "user.b") == "ENODATA"
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    for i in range(60):  # of short ones, and of long ones, which the daemon sets
        os.setxattr(path, f"user.{i}", bytes(4000 + 10 * i))
    left = (256 << 10) - sum(len(name) + len(value) for name, value in xattrs_of(path).items()) - len("user.more")
    assert code(os.setxattr, path, "user.more", bytes(left + 1)) == "ENOSPC"
    os.setxattr(path, "user.more", bytes(left))
    assert code(os.setxattr, path, "user.x", b"") == "ENOSPC"
    assert os.getxattr(path, "user.a") == b"3"
    assert len(os.listxattr(path)) == 62


def test_more_xattrs_than_one_look_has_room_for(here: Path) -> None:
    (here / "file").touch()
    for i in range(400):
        os.setxattr(here / "file", f"user.{i}", b"%d" % i)
    for i in range(0, 400, 2):
        os.removexattr(here / "file", f"user.{i}")
    assert xattrs_of(here / "file") == {f"user.{i}": b"%d" % i for i in range(1, 400, 2)}


def test_a_file_that_is_open_keeps_its_bytes(volume: MountedVolume, here: Path) -> None:
    for closes in (False, True):
        path = here / f"open-{closes}"
        with path.open("w+b") as f:
            f.write(b"before")
            f.flush()
            if closes:
                volume.done("status")
            path.unlink()
            assert os.fstat(f.fileno()).st_nlink == 0
            f.write(b" and after")
            f.seek(0)
            assert f.read() == b"before and after"
        assert not path.exists()


def test_a_replaced_file_that_is_open_keeps_its_bytes(volume: MountedVolume, here: Path) -> None:
    """Sealed, dirty, or made a moment ago, so that the daemon does not know it."""
    for state in ("sealed", "dirty", "new"):
        old, new = here / f"old-{state}", here / f"new-{state}"
        with old.open("w+b") as f:
            f.write(b"before")
            f.flush()
            if state != "new":
                volume.done("status")
            if state == "sealed":
                f.close()
                volume.done("wait", old)
        new.write_bytes(b"new")
        with old.open("rb" if state == "sealed" else "r+b") as f:
            os.rename(new, old)
            assert os.fstat(f.fileno()).st_nlink == 0
            assert f.read() == b"before"
            if state != "sealed":
                f.write(b" and after")
                f.seek(0)
                assert f.read() == b"before and after"
        assert old.read_bytes() == b"new"


def test_a_replaced_file_can_be_undeleted(volume: MountedVolume, here: Path) -> None:
    path = here / "current"
    for content in (b"first", b"second"):
        (here / "next").write_bytes(content)
        with standing_still(volume, here):
            os.rename(here / "next", path)
        volume.done("wait", path)
    path.rename(here / "second")
    volume.done("undelete", path)
    assert (path.read_bytes(), (here / "second").read_bytes()) == (b"first", b"second")


def test_errors_are_those_of_the_daemon(here: Path) -> None:
    (here / "file").touch()
    (here / "full" / "below").mkdir(parents=True)
    assert code(os.mkdir, here / "file") == "EEXIST"
    assert code(os.rmdir, here / "full") == "ENOTEMPTY"
    assert code(os.rmdir, here / "file") == "ENOTDIR"
    assert code(os.unlink, here / "full") == "EISDIR"
    assert code(os.unlink, here / "none") == "ENOENT"
    assert code(os.rename, here / "full", here / "full" / "below" / "deep") == "EINVAL"
    assert code(os.rename, here / "none", here / "other") == "ENOENT"
    (here / "empty").mkdir()
    assert code(os.rename, here / "empty", here / "full") == "ENOTEMPTY"
    assert code(os.rename, here / "empty", here / "file") == "ENOTDIR"
    assert code(os.rename, here / "file", here / "empty") == "EISDIR"
    assert code(os.rename, here / "full" / "below", here / "full") == "ENOTEMPTY"
    assert code(renameat2, here / "file", here / "none", RENAME_EXCHANGE) == "ENOENT"
    assert code(renameat2, here / "full", here / "full" / "below", RENAME_EXCHANGE) == "EINVAL"
    assert code(os.link, here / "full", here / "other") == "EPERM"


def test_files_are_replaced_as_git_does(tmp_path: Path) -> None:
    """Taken away and made again under the same names, in a directory that cannot go. In a mount of its own: one that
    other tests use may be about to call its daemon."""
    with mounted_volume(tmp_path) as volume:
        replaced_as_git_does(volume)


def replaced_as_git_does(volume: MountedVolume) -> None:
    d = volume.path / "d"
    d.mkdir()
    if volume.json("status")["mount"]["passthrough"] is False:
        pytest.skip("no passthrough here: the daemon creates every file")
    for i in range(20):
        (d / str(i)).write_bytes(b"old")
    volume.json("status")  # folded
    with stopped(volume, d):
        for i in range(20):
            (d / str(i)).unlink()
            assert code(d.rmdir) == ("ENOTEMPTY" if i < 19 else "")
            if i == 19:
                d.mkdir()
        for i in range(10):
            fd = os.open(d / str(i), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(fd, b"%d" % i)
            os.close(fd)
            (d / str(i)).unlink()
            fd = os.open(d / str(i), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(fd, b"%d" % i)
            os.close(fd)
    assert {path.name: path.read_bytes() for path in d.iterdir()} == {str(i): b"%d" % i for i in range(10)}
