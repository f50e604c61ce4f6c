"""Looking at every file of a directory after the kernel forgot them: much of it is answered ahead, and is right all the
same, whatever changes on the way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import code

FILES = 130
Change = Callable[[Path, Path], object]


def make(folder: Path) -> tuple[Path, Path]:
    """A directory of files with a second name each in another one, all of them closed and sealed."""
    walked, beside = folder / "walked", folder / "beside"
    walked.mkdir()
    beside.mkdir()
    for i in range(FILES):
        (walked / f"f{i:03}").write_bytes(b"x" * i)
        os.link(walked / f"f{i:03}", beside / f"f{i:03}")
    return walked, beside


def forget() -> None:
    """The kernel knows no names any more."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("2")


def look(path: Path) -> tuple[int, ...]:
    st = os.lstat(path)
    return (st.st_ino, st.st_mode, st.st_nlink, st.st_uid, st.st_size, st.st_blocks, st.st_mtime_ns, st.st_ctime_ns)


@pytest.fixture
def walked(volume: object, here: Path) -> tuple[Path, Path]:
    made = make(here)
    volume.done("wait", here)  # type: ignore[attr-defined]
    return made


def test_a_walk_sees_what_is_there(walked: tuple[Path, Path]) -> None:
    names = sorted(os.listdir(walked[0]))
    before = {name: look(walked[0] / name) for name in names}
    for order in (names, names, names[::-1], names[::7]):
        forget()
        assert {name: look(walked[0] / name) for name in order} == {name: before[name] for name in order}


def test_names_that_are_not_there(walked: tuple[Path, Path]) -> None:
    forget()
    for i in range(FILES):
        assert look(walked[0] / f"f{i:03}")[4] == i
        assert code(os.lstat, walked[0] / f"f{i:03}+") == "ENOENT"


CHANGES: dict[str, tuple[Change, Callable[[os.stat_result], object]]] = {
    "unlink": (lambda a, b: os.unlink(b), lambda st: st.st_nlink == 1),
    "link": (lambda a, b: os.link(b, f"{b}+"), lambda st: st.st_nlink == 3),
    "chmod": (lambda a, b: os.chmod(b, 0o640), lambda st: st.st_mode & 0o777 == 0o640),
    "truncate": (lambda a, b: os.truncate(b, 7777), lambda st: st.st_size == 7777),
    "write": (lambda a, b: b.write_bytes(b"y" * 8888), lambda st: st.st_size == 8888),
    "utime": (lambda a, b: os.utime(b, ns=(5, 5)), lambda st: st.st_mtime_ns == 5),
    "replace": (lambda a, b: os.replace(b, a.parent.parent / "else"), lambda st: st.st_nlink == 2),
    "rename": (lambda a, b: (b.write_bytes(b"z" * 99), os.rename(b, a)), lambda st: st.st_size == 99),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_on_the_way_is_seen(walked: tuple[Path, Path], name: str) -> None:
    """By the file's other name: the kernel does not know that it is about to look at the same."""
    change, is_so = CHANGES[name]
    forget()
    for i in range(FILES):
        path = walked[0] / f"f{i:03}"
        if i > 20 and i % 40 in (10, 13):
            change(path, walked[1] / path.name)
            assert is_so(os.lstat(path)), (name, i)
        else:
            assert os.lstat(path).st_size == i
