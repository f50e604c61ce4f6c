"""Everyday tools on the mount: right bytes and attributes at once, after `aof2 evict`, and after umount and mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.portrait import differences, portrait
from tests.mount.world import World, world

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One mount for all: each test has a directory of its own."""
    with world(tmp_path_factory.mktemp("tools")) as made:
        made.mount()
        yield made
        made.umount()
        made.verify("--remote")
        assert made.complaints() == []


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def evict(w: World, top: Path) -> None:
    """Nothing of it is on this disk any more."""
    w.ok("evict", top)
    for path in [top, *top.rglob("*")]:
        if stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size:
            assert os.getxattr(path, "user.aof2.residency") == b"0.000", path


def stays(w: World, top: Path, expected: dict[str, dict[str, object]] | None = None) -> None:
    """The tree is what it was (or `expected`): now, fetched back, and after a restart, cold and warm."""
    expected = expected or portrait(top)
    assert differences(expected, portrait(top)) == []
    evict(w, top)
    assert differences(expected, portrait(top)) == []
    w.umount()
    w.mount()
    assert differences(expected, portrait(top)) == []
    evict(w, top)
    assert differences(expected, portrait(top)) == []


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file there is, on a local disk."""
    top = tmp_path_factory.mktemp("zoo") / "zoo"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "empty").write_bytes(b"")
    (top / "text").write_text("some text\n")
    (top / "deep" / "large").write_bytes(os.urandom(3_000_001))
    os.link(top / "text", top / "deep" / "hard")
    os.link(top / "text", top / "deep" / "er" / "harder")
    os.symlink("../text", top / "deep" / "soft")
    os.symlink("/nowhere/at/all", top / "dangling")
    os.symlink("x" * 4000, top / "long link")
    os.mkfifo(top / "fifo", 0o620)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as s:
        here = os.getcwd()
        os.chdir(top)  # a socket path has 107 bytes at most
        s.bind("socket")
        os.chdir(here)
    if os.getuid() == 0:
        os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(top / "block", stat.S_IFBLK | 0o600, os.makedev(7, 200))
        os.chown(top / "text", 1234, 4321)
        os.chown(top / "dangling", 77, 78, follow_symlinks=False)
    with open(top / "sparse", "wb") as f:
        f.truncate(20_000_000)
        f.seek(7_000_000)
        f.write(b"island")
    for name in (
        b"with space",
        b"new\nline",
        b"-dash",
        b"\xff\xfe not utf-8",
        "ünï¢ödé \U0001f40e".encode(),
        b"a" * 255,
    ):
        with open(os.path.join(os.fsencode(top), name), "wb") as f:
            f.write(name)
    os.chmod(top / "empty", 0o000)
    os.chmod(top / "-dash", 0o4755)
    os.chmod(top / "deep", 0o2775)
    os.chmod(top / "deep" / "er", 0o1777)
    os.setxattr(top / "text", "user.short", b"v")
    os.setxattr(top / "text", "user.empty", b"")
    os.setxattr(top / "deep", "user.binary", bytes(range(256)) * 8)
    os.utime(top / "text", ns=(1, 1_234_567_890_123_456_789))
    os.utime(top / "dangling", ns=(5, 987_654_321), follow_symlinks=False)
    os.utime(top / "deep" / "er", ns=(0, 999_999_999))
    os.utime(top / "deep" / "large", ns=(1, -1_000_000_001))  # before 1970
    return top


@pytest.mark.parametrize("tool", ["cp", "tar", "rsync"])
def test_a_copy_of_every_kind_of_file(w: World, zoo: Path, tool: str) -> None:
    to = w.files / f"copy-{tool}"
    if tool == "cp":
        run("cp", "-a", "--sparse=always", zoo, to)
    elif tool == "tar":
        to.mkdir()
        archive = w.files / "zoo.tar"
        run(
            "tar",
            "--create",
            "--sparse",
            "--xattrs",
            "--xattrs-include=*",
            "--format=posix",
            f"--file={archive}",
            "--exclude=socket",
            ".",
            cwd=zoo,
        )
        run("tar", "--extract", "--xattrs", "--xattrs-include=*", "--same-permissions", f"--file={archive}", cwd=to)
    else:
        if not shutil.which("rsync"):
            pytest.skip("rsync is not installed")
        run("rsync", "-aHXS", "--devices", "--specials", "--checksum", f"{zoo}/", f"{to}/")
        assert (
            run("rsync", "-aHXS", "--devices", "--specials", "--checksum", "--itemize-changes", f"{zoo}/", f"{to}/")
            == ""
        )
    expected, got = portrait(zoo), portrait(to)
    if tool == "tar":
        expected.pop("socket")
        expected["."]["mtime_ns"] = got["."]["mtime_ns"]
    assert differences(expected, got) == []
    evict(w, to / "deep")
    assert os.getxattr(to / "deep" / "large", "user.aof2.sha256").decode() == got["deep/large"]["sha256"]
    stays(w, to, got)


# -- programs ------------------------------------------------------------------------------------------------------


def test_git(w: World, tmp_path: Path) -> None:
    """This project's own tree, cloned, changed, packed."""
    to = w.files / "clone"
    run("git", "clone", "--no-hardlinks", "--depth=50", f"file://{PROJECT}", to)
    run("git", "fsck", "--full", cwd=to)
    run("git", "checkout", "-q", "-b", "work", cwd=to)
    (to / "new.txt").write_text("new\n")
    os.rename(to / "README.md", to / "READYOU.md")
    run("git", "add", "--all", cwd=to)
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "change", cwd=to)
    run("git", "gc", "-q", cwd=to)
    assert run("git", "status", "--porcelain", cwd=to) == ""
    stays(w, to / ".git" / "objects")
    run("git", "fsck", "--full", cwd=to)
    assert run("git", "status", "--porcelain", cwd=to) == ""


def test_a_build(w: World) -> None:
    to = w.files / "build"
    to.mkdir()
    (to / "part.c").write_text('#include <stdio.h>\nvoid part(void) { puts("built on the mount"); }\n')
    (to / "main.c").write_text("void part(void);\nint main(void) { part(); return 0; }\n")
    (to / "Makefile").write_text(
        "prog: main.o libpart.a\n\t$(CC) -o $@ main.o -L. -lpart\nlibpart.a: part.o\n\t$(AR) rcs $@ $^\n"
    )
    run("make", "-j2", cwd=to)
    assert run(to / "prog") == "built on the mount\n"
    assert "up to date" in run("make", cwd=to)
    stays(w, to)
    assert "up to date" in run("make", cwd=to)
    assert run(to / "prog") == "built on the mount\n"
    (to / "part.c").write_text('#include <stdio.h>\nvoid part(void) { puts("again"); }\n')
    run("make", cwd=to)
    assert run(to / "prog") == "again\n"


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_sqlite(w: World, journal: str) -> None:
    to = w.files / f"sqlite-{journal}"
    to.mkdir()

    def connect() -> contextlib.closing[sqlite3.Connection]:
        db = sqlite3.connect(to / "data.db", isolation_level=None)
        assert db.execute(f"pragma journal_mode={journal}").fetchone() == (journal,)
        return contextlib.closing(db)

    def check(rows: int) -> None:
        with connect() as db:
            assert db.execute("pragma integrity_check").fetchone() == ("ok",)
            assert db.execute("select count(*), sum(length(v)) from t").fetchone() == (rows, rows * 1000)

    with connect() as db, connect() as other:
        db.execute("create table t (k integer primary key, v blob)")
        for base in range(0, 1000, 100):
            db.execute("begin")
            db.executemany("insert into t values (?, ?)", [(base + i, os.urandom(1000)) for i in range(100)])
            db.execute("commit")
            assert other.execute("select count(*) from t").fetchone() == (base + 100,)
        db.execute("begin")
        db.execute("delete from t")
        db.execute("rollback")
    check(1000)
    evict(w, to)
    check(1000)
    w.umount()
    w.mount()
    check(1000)
    evict(w, to)
    with connect() as db:
        db.execute("update t set v = randomblob(1000) where k % 7 = 0")
        db.execute("delete from t where k >= 900")
        db.execute("vacuum")
    check(900)
    evict(w, to)
    check(900)


# -- ways of writing -----------------------------------------------------------------------------------------------


def test_saved_as_editors_do(w: World) -> None:
    """Write a temporary, keep the old as a backup, rename into place: many times, and a reader never sees a half."""
    to = w.files / "edit"
    to.mkdir()
    path = to / "doc.txt"
    path.write_text("0\n" * 1000)
    for n in range(1, 20):
        with open(path) as reader:
            temporary = to / f".doc.txt.{n}.swp"
            with open(temporary, "x") as f:
                f.write(f"{n}\n" * 1000)
                f.flush()
                os.fsync(f.fileno())
            shutil.copymode(path, temporary)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(to / "doc.txt~")
            os.link(path, to / "doc.txt~")
            os.rename(temporary, path)
            assert reader.read() == f"{n - 1}\n" * 1000
        assert path.read_text() == f"{n}\n" * 1000
        assert (to / "doc.txt~").read_text() == f"{n - 1}\n" * 1000
        if n % 7 == 0:
            evict(w, to)
    assert sorted(os.listdir(to)) == ["doc.txt", "doc.txt~"]
    stays(w, to)


def test_followed_while_it_grows(w: World) -> None:
    """tail -f: what one process appends another reads at once, across an eviction of what was there before."""
    path = w.files / "grows.log"
    path.write_text("first\n")
    evict(w, path)
    with open(path, "a") as writer, open(path) as reader:
        assert reader.read() == "first\n"
        for n in range(200):
            writer.write(f"line {n}\n")
            writer.flush()
            assert reader.read() == f"line {n}\n"
    with open(path, "a") as one, open(path, "a") as two:
        for n in range(50):
            for f in (one, two):
                f.write(f"both {n}\n")
                f.flush()
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 200 + 100 and lines[-2:] == ["both 49", "both 49"]
    evict(w, path)
    assert path.read_text().splitlines() == lines


def test_a_tree_is_moved_and_removed(w: World) -> None:
    to = w.files / "tree"
    shutil.copytree(PROJECT / "engine", to, ignore=shutil.ignore_patterns("__pycache__"))
    before = portrait(to)
    os.rename(to, w.files / "moved")
    assert differences(before, portrait(w.files / "moved"), but=("mtime_ns",)) == []
    evict(w, w.files / "moved")
    run("cp", "-a", "--reflink=auto", w.files / "moved", to)
    assert differences(portrait(w.files / "moved"), portrait(to)) == []
    run("rm", "-rf", w.files / "moved", to)
    assert not to.exists() and not (w.files / "moved").exists()
