"""Times: to the nanosecond, set and kept, and which of them a call moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import AT_SYMLINK_NOFOLLOW, UTIME_NOW, UTIME_OMIT, code, opened, utimensat
from tests.support.mount import MountedVolume

OLD = (1_000_000_000, 123_456_789)
OLD_NS = OLD[0] * 10**9 + OLD[1]


def test_nanoseconds(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "d").mkdir()
    os.symlink("f", folder / "l")
    os.mkfifo(folder / "p")
    for name in ("f", "d", "l", "p"):
        for ns in (1, 999_999_999, OLD_NS, 4_000_000_000 * 10**9 + 7, -5 * 10**9 + 3):
            os.utime(folder / name, ns=(ns, ns + 1), follow_symlinks=False)
            st = os.lstat(folder / name)
            assert (st.st_atime_ns, st.st_mtime_ns) == (ns, ns + 1), name


def test_now_and_omit(folder: Path) -> None:
    path = folder / "f"
    path.touch()
    utimensat(path, OLD, OLD)
    before = time.time_ns()
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_NOW))
    st = path.stat()
    assert st.st_atime_ns == OLD_NS
    assert st.st_mtime_ns > before - 10**9
    utimensat(path, (0, UTIME_NOW), OLD)
    assert path.stat().st_mtime_ns == OLD_NS
    assert path.stat().st_atime_ns > before - 10**9
    ctime = path.stat().st_ctime_ns
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert path.stat().st_ctime_ns == ctime
    os.symlink("f", folder / "l")
    utimensat(folder / "l", OLD, OLD, AT_SYMLINK_NOFOLLOW)
    assert (folder / "l").lstat().st_mtime_ns == OLD_NS
    assert code(utimensat, path, (0, 10**9), OLD) == "EINVAL"


def settle(path: Path) -> os.stat_result:
    """Old times, and a change time that the next one is later than."""
    os.utime(path, ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    st = path.lstat()
    while time.clock_gettime_ns(5) <= st.st_ctime_ns:  # CLOCK_REALTIME_COARSE: what the kernel stamps with
        time.sleep(0.001)
    return st


def moved(before: os.stat_result, path: Path) -> str:
    after = path.lstat()
    return ("m" if after.st_mtime_ns != before.st_mtime_ns else "") + (
        "c" if after.st_ctime_ns > before.st_ctime_ns else ""
    )


def pwrite(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.pwrite(fd, b"x", 0)


def pwrite_nothing(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.pwrite(fd, b"", 0)


def link(path: Path) -> None:
    os.link(path, path.with_name("link"))


def rename(path: Path) -> None:
    os.rename(path, path.with_name("renamed"))
    os.rename(path.with_name("renamed"), path)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (pwrite, "mc"),
    (pwrite_nothing, ""),
    (lambda p: os.truncate(p, 1), "mc"),
    (lambda p: os.truncate(p, 100), "mc"),
    (lambda p: p.write_bytes(b""), "mc"),
    (lambda p: p.chmod(0o600), "c"),
    (lambda p: os.chown(p, 5, 5), "c"),
    (link, "c"),
    (rename, "c"),
    (lambda p: os.setxattr(p, "user.x", b"x"), "c"),
    (lambda p: p.read_bytes(), ""),
    (lambda p: os.close(os.open(p, os.O_RDWR)), ""),
    (lambda p: os.access(p, os.R_OK), ""),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[str(i) for i in range(len(CHANGES))])
def test_what_moves_a_files_times(folder: Path, change: Callable[[Path], object], expected: str) -> None:
    path = folder / "f"
    path.write_bytes(b"0123456789")
    before = settle(path)
    change(path)
    assert moved(before, path) == expected


def test_what_moves_a_directorys_times(folder: Path) -> None:
    top, inside = folder / "d", folder / "d" / "inside"
    top.mkdir()
    (top / "f").touch()

    def moves(change: Callable[[], object]) -> str:
        before = settle(top)
        change()
        return moved(before, top)

    assert moves(inside.touch) == "mc"
    assert moves(lambda: inside.write_text("x")) == ""
    assert moves(lambda: os.rename(inside, top / "g")) == "mc"
    assert moves(lambda: os.rename(top / "g", folder / "g")) == "mc"
    assert moves(lambda: os.rename(folder / "g", top / "g")) == "mc"
    assert moves((top / "g").unlink) == "mc"
    assert moves((top / "e").mkdir) == "mc"
    assert moves((top / "e" / "x").mkdir) == ""
    assert moves((top / "e" / "x").rmdir) == ""
    assert moves((top / "e").rmdir) == "mc"
    assert moves(lambda: os.symlink("x", top / "l")) == "mc"
    assert moves(lambda: os.link(top / "f", top / "h")) == "mc"
    assert moves(lambda: top.chmod(0o700)) == "c"
    assert moves(lambda: os.listdir(top)) == ""
    assert moves(lambda: code((top / "f").mkdir)) == ""


def test_a_failed_call_moves_nothing(folder: Path) -> None:
    path = folder / "f"
    path.touch()
    before = settle(path)
    assert code(os.link, path, folder) == "EEXIST"
    assert code(os.rename, path, folder / "nothing" / "x") == "ENOENT"
    assert moved(before, path) == ""


def test_new_things_are_from_now(folder: Path) -> None:
    before = time.time_ns() - 10**7
    (folder / "f").touch()
    (folder / "d").mkdir()
    os.symlink("x", folder / "l")
    for name in ("f", "d", "l"):
        st = (folder / name).lstat()
        assert before <= min(st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns), name
        assert max(st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns) <= time.time_ns() + 10**9


def test_times_of_an_open_file_are_todays(folder: Path) -> None:
    """Another descriptor, and another name's stat, see size and times of what was just written."""
    path = folder / "f"
    with opened(path) as fd, opened(path, os.O_RDONLY) as other:
        for size in (10, 20, 5000):
            before = path.stat()
            os.pwrite(fd, b"x", size - 1)
            assert os.fstat(fd).st_size == os.fstat(other).st_size == path.stat().st_size == size
            assert path.stat().st_mtime_ns == os.fstat(other).st_mtime_ns >= before.st_mtime_ns


def test_set_times_stay_after_close_and_evict(each_volume: MountedVolume, each_here: Path) -> None:
    """`cp -p`, `tar x`, `rsync -t`: written, closed, and the time is what was set, for good."""
    path = each_here / "f"
    with opened(path) as fd:
        os.write(fd, b"data")
        os.utime(fd, ns=(OLD_NS, OLD_NS + 1))
    assert path.stat().st_mtime_ns == OLD_NS + 1
    each_volume.evict(path)
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (OLD_NS, OLD_NS + 1)
    assert path.read_bytes() == b"data"
    with opened(path, os.O_RDWR):
        pass
    os.utime(path, ns=(1, 2))
    each_volume.evict(path)
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (1, 2)


def test_reading_is_not_recorded(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    path.write_bytes(b"data")
    os.utime(path, ns=(OLD_NS, OLD_NS + 10**9))
    each_volume.done("wait", path)
    assert path.read_bytes() == b"data"
    assert path.stat().st_atime_ns == OLD_NS
    each_volume.evict(path)
    assert path.read_bytes() == b"data"
    assert path.stat().st_atime_ns == OLD_NS


def test_a_directory_that_others_look_at_is_up_to_date(folder: Path) -> None:
    """Its own attributes change though only its name, or an xattr, is spoken of."""
    (folder / "d").mkdir()
    with opened(folder / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        before = settle(folder / "d")
        os.setxattr(fd, "user.x", b"x")
        assert os.fstat(fd).st_ctime_ns > before.st_ctime_ns
        before = settle(folder / "d")
        os.rename(folder / "d", folder / "e")
        assert os.fstat(fd).st_ctime_ns > before.st_ctime_ns
        before = settle(folder / "e")
        (folder / "f").mkdir()
        os.rename(folder / "f", folder / "e")
        assert os.fstat(fd).st_nlink == 0
        assert os.fstat(fd).st_ctime_ns > before.st_ctime_ns
