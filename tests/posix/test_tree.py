"""Random operations on a tree in the mount and on a plain one: the same errno each time, the same tree at the end.

Both trees are alike from the start, names are few, so calls meet each other: renames over open files, links to what is
replaced, directories moved below others. Run as root and as a user.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import NOBODY, RENAME_EXCHANGE, RENAME_NOREPLACE, code, forked, renameat2

NAMES = ("a", "b", "c", "d", "long" * 10)
DEPTH = 3


class Machine:
    """Does everything in both trees."""

    def __init__(self, seed: int, tops: tuple[Path, Path]) -> None:
        self.random = random.Random(seed)
        self.tops = tops
        self.said = [f"seed {seed}"]
        self.open: list[tuple[int, int]] = []

    def path(self) -> str:
        return "/".join(self.random.choice(NAMES) for _ in range(self.random.randint(1, DEPTH)))

    def both(self, text: str, what: Callable[[Path], object]) -> None:
        results = []
        for top in self.tops:
            try:
                results.append(what(top))
            except OSError as e:
                results.append(os.strerror(e.errno or 0))
        self.said.append(f"{text}: {results[1]}")
        assert results[0] == results[1], f"{text}: {results[0]!r}, on the disk {results[1]!r}"

    def run(self, steps: int, *, compare: bool = True) -> None:
        kinds = [
            *[self.create] * 4, *[self.mkdir] * 4, *[self.rename] * 6, *[self.link] * 3, *[self.unlink] * 3,
            *[self.rmdir] * 2, self.symlink, self.fifo, self.chmod, self.chown, self.truncate, self.utime, self.read,
            self.write, self.list, self.hold, self.let_go, self.exchange, self.noreplace, self.xattr, self.stat,
        ]  # fmt: skip
        try:
            for _ in range(steps):
                self.random.choice(kinds)()
            if compare:
                self.compare()
        except BaseException as e:
            e.add_note("\n".join(self.said[:1] + self.said[-25:]))
            raise
        finally:
            while self.open:
                self.let_go()

    # -- what is done ------------------------------------------------------------------------------------------

    def create(self) -> None:
        path, flags = self.path(), self.random.choice((0, os.O_EXCL, os.O_TRUNC, os.O_NOFOLLOW))
        mode = self.random.choice((0o644, 0o600, 0o777))
        self.both(
            f"create {path} {flags}", lambda top: os.close(os.open(top / path, os.O_CREAT | os.O_RDWR | flags, mode))
        )

    def write(self) -> None:
        path, data = self.path(), self.random.randbytes(self.random.randint(0, 9000))

        def work(top: Path) -> int:
            fd = os.open(top / path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            try:
                return os.write(fd, data)
            finally:
                os.close(fd)

        self.both(f"append {path} {len(data)}", work)

    def read(self) -> None:
        path = self.path()
        self.both(f"read {path}", lambda top: _read(top / path))

    def mkdir(self) -> None:
        path, mode = self.path(), self.random.choice((0o755, 0o777, 0o700, 0o2775))
        self.both(f"mkdir {path}", lambda top: os.mkdir(top / path, mode))

    def rmdir(self) -> None:
        path = self.path()
        self.both(f"rmdir {path}", lambda top: os.rmdir(top / path))

    def unlink(self) -> None:
        path = self.path()
        self.both(f"unlink {path}", lambda top: os.unlink(top / path))

    def rename(self) -> None:
        old, new = self.path(), self.path()
        self.both(f"rename {old} {new}", lambda top: os.rename(top / old, top / new))

    def exchange(self) -> None:
        old, new = self.path(), self.path()
        self.both(f"exchange {old} {new}", lambda top: renameat2(top / old, top / new, RENAME_EXCHANGE))

    def noreplace(self) -> None:
        old, new = self.path(), self.path()
        self.both(f"noreplace {old} {new}", lambda top: renameat2(top / old, top / new, RENAME_NOREPLACE))

    def link(self) -> None:
        old, new = self.path(), self.path()
        self.both(f"link {old} {new}", lambda top: os.link(top / old, top / new, follow_symlinks=False))

    def symlink(self) -> None:
        path, target = self.path(), self.random.choice(("a", "../b", "c/d", "."))
        self.both(f"symlink {path} {target}", lambda top: os.symlink(target, top / path))

    def fifo(self) -> None:
        path = self.path()
        self.both(f"mkfifo {path}", lambda top: os.mkfifo(top / path))

    def chmod(self) -> None:
        path, mode = self.path(), self.random.choice((0o755, 0o700, 0o4755, 0o2775, 0o1777, 0o000))
        if "/" not in path or os.geteuid() == 0:
            self.both(f"chmod {path} {mode:o}", lambda top: os.chmod(top / path, mode))

    def chown(self) -> None:
        path, owner = self.path(), self.random.choice(((0, 0), (-1, NOBODY), (NOBODY, -1)))
        self.both(f"chown {path} {owner}", lambda top: os.lchown(top / path, *owner))

    def truncate(self) -> None:
        path, size = self.path(), self.random.choice((0, 1, 5000, 100_000))
        self.both(f"truncate {path} {size}", lambda top: os.truncate(top / path, size))

    def utime(self) -> None:
        path, ns = self.path(), self.random.randrange(10**18)
        self.both(f"utime {path}", lambda top: os.utime(top / path, ns=(ns, ns + 1), follow_symlinks=False))

    def xattr(self) -> None:
        path, value = self.path(), self.random.randbytes(self.random.randint(0, 50))
        if self.random.random() < 0.7:
            self.both(f"setxattr {path}", lambda top: os.setxattr(top / path, "user.x", value))
        else:
            self.both(f"removexattr {path}", lambda top: os.removexattr(top / path, "user.x"))

    def list(self) -> None:
        path = self.path()
        self.both(f"list {path}", lambda top: sorted(os.listdir(top / path)))

    def stat(self) -> None:
        path = self.path()
        self.both(f"stat {path}", lambda top: _facts(os.lstat(top / path)))

    def hold(self) -> None:
        """Opened, and what becomes of it looked at later."""
        path = self.path()
        fds = []
        for top in self.tops:
            try:
                fds.append(os.open(top / path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW))
            except OSError as e:
                fds.append(-(e.errno or 0))
        self.said.append(f"hold {path}: {fds}")
        assert (fds[0] < 0) == (fds[1] < 0), self.said[-1]
        if fds[0] < 0:
            assert fds[0] == fds[1], self.said[-1]
        else:
            self.open.append((fds[0], fds[1]))

    def let_go(self) -> None:
        if self.open:
            fds = self.open.pop(self.random.randrange(len(self.open)))
            facts = [_facts(os.fstat(fd)) for fd in fds]
            for fd in fds:
                os.close(fd)
            self.said.append("let go")
            assert facts[0] == facts[1]

    # -- what is compared --------------------------------------------------------------------------------------

    def compare(self) -> None:
        mine, plain = (dict(_walk(top)) for top in self.tops)
        assert mine.keys() == plain.keys()
        for path, fact in plain.items():
            assert mine[path] == fact, path
        inos = [{path: os.lstat(top / path).st_ino for path in plain} for top in self.tops]
        same = [{frozenset(p for p in i if i[p] == ino) for ino in i.values()} for i in inos]
        assert same[0] == same[1], "hard links"


def _facts(st: os.stat_result) -> tuple[int, ...]:
    size = 0 if stat.S_ISDIR(st.st_mode) else st.st_size
    set_ns = st.st_mtime_ns if st.st_mtime_ns < 10**18 + 2 else -1  # set by us, or some time now
    return st.st_mode, st.st_uid, st.st_gid, st.st_nlink, size, set_ns


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def _walk(top: Path) -> list[tuple[str, tuple[object, ...]]]:
    out: list[tuple[str, tuple[object, ...]]] = []
    todo = [""]
    while todo:
        below = todo.pop()
        for name in sorted(os.listdir(top / below)):
            path = f"{below}/{name}" if below else name
            st = os.lstat(top / path)
            more: object = None
            if stat.S_ISREG(st.st_mode):
                more = code(os.getxattr, top / path, "user.x") or os.getxattr(top / path, "user.x"), _read(top / path)
            elif stat.S_ISLNK(st.st_mode):
                more = os.readlink(top / path)
            out.append((path, (*_facts(st), more)))
            if stat.S_ISDIR(st.st_mode):
                todo.append(path)
    return sorted(out)


def tops_in(mine: Path, plain: Path) -> tuple[Path, Path]:
    """Symlinks lead up to one level out: there is nothing in either."""
    for above in (mine, plain):
        (above / "top").mkdir()
        above.chmod(0o755)
    return mine / "top", plain / "top"


@pytest.mark.parametrize("seed", range(3))
def test_as_root(each_here: Path, tmp_path: Path, seed: int) -> None:
    Machine(seed, tops_in(each_here, tmp_path)).run(400)


@pytest.mark.parametrize("seed", range(10, 12))
def test_as_a_user(each_here: Path, tmp_path: Path, seed: int) -> None:
    """Permissions come in: what root left behind is in the way."""
    tops = tops_in(each_here, tmp_path)
    for top in tops:
        os.chown(top, NOBODY, NOBODY)
    Machine(seed, tops).run(100)
    mine, plain = (os.open(top, os.O_RDONLY) for top in tops)

    def work() -> None:
        seen = Path(f"/proc/self/fd/{mine}"), Path(f"/proc/self/fd/{plain}")
        Machine(seed, seen).run(300, compare=False)  # there may be what it cannot read

    try:
        forked(work, uid=NOBODY)
    finally:
        os.close(mine)
        os.close(plain)
    Machine(seed, tops).compare()
