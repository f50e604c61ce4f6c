"""What each change of the tree does and refuses, one rule at a time."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from aof2.engine import namespace as ns
from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DentryRow, InodeRow, ObjectState
from aof2.engine.env import Env
from aof2.engine.namespace import nodes
from aof2.engine.tiering.hashing import ObjectDigest
from tests.catalog.helpers import Volume, volume

T = TypeVar("T")
ROOT = ns.root_ino(1)
MS = 1_000_000


class Tree:
    """A catalog with a root, and a clock that goes on by one a change."""

    def __init__(self, v: Volume, clock: list[int]) -> None:
        self.v = v
        self.clock = clock
        self.do(ns.make_root)

    @property
    def now_ns(self) -> int:
        return self.clock[0] * MS

    def do(self, work: Callable[[Batch], T]) -> T:
        self.clock[0] += 1
        return self.v.writer.call(1, work)

    def fails(self, code: int, work: Callable[[Batch], object]) -> None:
        before = self.rows()
        with pytest.raises(OSError, match=r"\[Errno") as e:
            self.do(work)
        assert e.value.errno == code
        assert self.rows() == before

    def rows(self) -> list[tuple[bytes, bytes]]:
        with self.v.catalog.view() as view:
            return list(view.raw_scan("namespace", b""))

    def file(self, name: bytes, parent: int = ROOT) -> int:
        return self.do(lambda b: ns.create(b, parent, name, chunk_bytes=1)).ino

    def dir(self, name: bytes, parent: int = ROOT, mode: int = 0o755, gid: int = 0) -> int:
        return self.do(lambda b: ns.mkdir(b, parent, name, mode=mode, gid=gid)).ino

    def publish(self, ino: int) -> None:
        def work(b: Batch) -> None:
            objects.seal(b, ino, 1, ObjectDigest(0, b"", ()), (0, 0, 0), block_bytes=1)
            objects.published(b, ino, 1, 1, [])

        self.do(work)

    def row(self, ino: int) -> InodeRow:
        found = self.look(ino)
        assert found is not None
        return found

    def look(self, ino: int) -> InodeRow | None:
        with self.v.catalog.view() as view:
            return ns.inode(view, 1, ino)

    def names(self, parent: int = ROOT) -> dict[bytes, int]:
        with self.v.catalog.view() as view:
            return {name: row.ino for name, row in ns.list_dir(view, 1, parent, None, 1000)}

    def nameless(self) -> list[int]:
        with self.v.catalog.view() as view:
            return ns.nameless(view, 1)

    def xattrs(self, ino: int) -> list[bytes]:
        with self.v.catalog.view() as view:
            return ns.list_xattrs(view, 1, ino)

    def path(self, ino: int) -> bytes:
        with self.v.catalog.view() as view:
            return ns.path_of(view, 1, ino)

    def count(self, table: t.Table[object, object]) -> int:
        with self.v.catalog.view() as view:
            return len(list(view.scan(1, table)))


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    clock = [1000]
    with volume(tmp_path, env=Env(now_ms=lambda: clock[0])) as v:
        yield Tree(v, clock)


# -- making ----------------------------------------------------------------------------------------------------------


def test_the_default_clock_is_that_of_the_files_of_the_kernel(tmp_path: Path) -> None:
    env = Env()
    before = env.now_ns()
    (tmp_path / "f").touch()
    # The kernel may use its fine clock for a file that was looked at: never behind the coarse one, never ahead of now.
    assert before <= (tmp_path / "f").stat().st_mtime_ns <= time.time_ns()


def test_a_new_file_is_the_given_users_and_dirty(tree: Tree) -> None:
    row = tree.do(lambda b: ns.create(b, ROOT, b"f", mode=0o4751, uid=7, gid=8, chunk_bytes=64))
    assert (row.mode, row.uid, row.gid, row.nlink, row.generation) == (stat.S_IFREG | 0o4751, 7, 8, 1, 1)
    assert {row.mtime_ns, row.ctime_ns, row.atime_ns, tree.row(ROOT).mtime_ns, tree.row(ROOT).ctime_ns} == {tree.now_ns}
    with tree.v.catalog.view() as view:
        obj = view.get(1, t.OBJECTS, (row.ino, 1))
    assert obj is not None
    assert (obj.state, obj.chunk_bytes) == (ObjectState.DIRTY, 64)


@pytest.mark.parametrize(
    ("kind", "rdev"), [(stat.S_IFIFO, 0), (stat.S_IFSOCK, 0), (stat.S_IFCHR, 0x103), (stat.S_IFBLK, 0x801)]
)
def test_nodes(tree: Tree, kind: int, rdev: int) -> None:
    row = tree.do(lambda b: ns.make_node(b, ROOT, b"n", mode=kind | 0o640, rdev=rdev or 5, uid=1, gid=2))
    assert (row.mode, row.rdev, row.uid, row.gid, row.generation) == (kind | 0o640, rdev, 1, 2, 0)
    tree.do(lambda b: ns.unlink(b, ROOT, b"n"))
    assert tree.look(row.ino) is None


@pytest.mark.parametrize("kind", [0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK])
def test_what_is_no_node_is_refused(tree: Tree, kind: int) -> None:
    tree.fails(errno.EINVAL, lambda b: ns.make_node(b, ROOT, b"n", mode=kind | 0o600))


def test_symlinks(tree: Tree) -> None:
    row = tree.do(lambda b: ns.symlink(b, ROOT, b"l", target=b"x" * 4095, uid=3, gid=4))
    assert (row.mode, row.size, row.uid, row.gid) == (stat.S_IFLNK | 0o777, 4095, 3, 4)
    assert tree.row(row.ino).target == b"x" * 4095
    tree.fails(errno.ENAMETOOLONG, lambda b: ns.symlink(b, ROOT, b"m", target=b"x" * 4096))
    tree.fails(errno.ENOENT, lambda b: ns.symlink(b, ROOT, b"m", target=b""))
    tree.fails(errno.EEXIST, lambda b: ns.symlink(b, ROOT, b"l", target=b"x"))


def test_a_setgid_directory_gives_its_group(tree: Tree) -> None:
    shared = tree.dir(b"shared", mode=0o2775, gid=50)
    below = tree.do(lambda b: ns.mkdir(b, shared, b"d", mode=0o700, gid=9))
    assert (below.gid, below.mode) == (50, stat.S_IFDIR | 0o2700)
    made = [
        tree.do(lambda b: ns.create(b, shared, b"f", gid=9, chunk_bytes=1)),
        tree.do(lambda b: ns.symlink(b, shared, b"l", target=b"x", gid=9)),
        tree.do(lambda b: ns.make_node(b, shared, b"p", mode=stat.S_IFIFO, gid=9)),
        tree.do(lambda b: ns.create_unnamed(b, shared, gid=9, chunk_bytes=1)),
    ]
    assert [row.gid for row in made] == [50] * 4
    assert not any(row.mode & stat.S_ISGID for row in made)


def test_nothing_is_made_in_what_is_no_directory_or_gone(tree: Tree) -> None:
    f, d = tree.file(b"f"), tree.dir(b"d")
    tree.do(lambda b: ns.rmdir(b, ROOT, b"d", is_open=lambda _: True))
    gone = tree.dir(b"e")
    tree.do(lambda b: ns.rmdir(b, ROOT, b"e"))
    for parent, code in ((f, errno.ENOTDIR), (d, errno.ENOENT), (gone, errno.ENOENT)):
        tree.fails(code, lambda b, p=parent: ns.create(b, p, b"x", chunk_bytes=1))
        tree.fails(code, lambda b, p=parent: ns.mkdir(b, p, b"x"))
        tree.fails(code, lambda b, p=parent: ns.symlink(b, p, b"x", target=b"y"))
        tree.fails(code, lambda b, p=parent: ns.make_node(b, p, b"x", mode=stat.S_IFIFO))
        tree.fails(code, lambda b, p=parent: ns.create_unnamed(b, p, chunk_bytes=1))
        tree.fails(code, lambda b, p=parent: ns.link(b, f, p, b"x"))
        tree.fails(code, lambda b, p=parent: ns.rename(b, ROOT, b"f", p, b"x"))
        tree.fails(code, lambda b, p=parent: ns.unlink(b, p, b"x"))
        tree.fails(code, lambda b, p=parent: ns.rmdir(b, p, b"x"))


def test_long_names_are_refused_not_looked_up(tree: Tree) -> None:
    long = b"n" * 600
    tree.file(b"n" * 255)
    for work in (
        lambda b: ns.lookup(b, ROOT, long),
        lambda b: ns.unlink(b, ROOT, long),
        lambda b: ns.rmdir(b, ROOT, long),
        lambda b: ns.rename(b, ROOT, long, ROOT, b"x"),
        lambda b: ns.rename(b, ROOT, b"n" * 255, ROOT, long),
        lambda b: ns.mkdir(b, ROOT, long),
    ):
        tree.fails(errno.ENAMETOOLONG, work)
    with tree.v.catalog.view() as view, pytest.raises(OSError, match="name too long"):
        ns.entry(view, 1, ROOT, long)


# -- links -----------------------------------------------------------------------------------------------------------


def test_links_are_counted_and_the_row_knows_a_name(tree: Tree) -> None:
    d, e = tree.dir(b"d"), tree.dir(b"e")
    f = tree.file(b"f", d)
    row = tree.do(lambda b: ns.link(b, f, e, b"g"))
    assert (row.nlink, row.ctime_ns, row.mtime_ns) == (2, tree.now_ns, tree.now_ns - MS)
    assert tree.row(e).mtime_ns == tree.now_ns
    tree.do(lambda b: ns.link(b, f, ROOT, b"h"))
    assert tree.path(f) == b"d/f"
    row = tree.do(lambda b: ns.unlink(b, d, b"f"))
    assert (row.nlink, row.ctime_ns) == (2, tree.now_ns)
    assert tree.path(f) in (b"e/g", b"h")
    tree.do(lambda b: ns.rename(b, e, b"g", d, b"i"))
    tree.do(lambda b: ns.unlink(b, ROOT, b"h"))
    assert tree.path(f) == b"d/i"
    assert tree.row(f).parent == d
    assert tree.count(t.LINKS) == 0  # type: ignore[arg-type]


def test_links_are_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    d, f = tree.dir(b"d"), tree.file(b"f")
    tree.fails(errno.EPERM, lambda b: ns.link(b, d, ROOT, b"x"))
    tree.fails(errno.EEXIST, lambda b: ns.link(b, f, ROOT, b"d"))
    tree.fails(errno.ENOENT, lambda b: ns.link(b, 999, ROOT, b"x"))
    monkeypatch.setattr(nodes, "LINKS_MAX", 2)
    monkeypatch.setattr(nodes, "DIRECTORY_LINKS_MAX", 3)
    tree.do(lambda b: ns.link(b, f, ROOT, b"g"))
    tree.fails(errno.EMLINK, lambda b: ns.link(b, f, ROOT, b"h"))
    tree.fails(errno.EMLINK, lambda b: ns.mkdir(b, ROOT, b"e"))
    below = tree.dir(b"e", d)
    tree.fails(errno.EMLINK, lambda b: ns.rename(b, d, b"e", ROOT, b"e"))
    tree.do(lambda b: ns.rename(b, d, b"e", d, b"same parent"))
    assert tree.row(below).parent == d


def test_what_is_deleted_is_not_linked(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.publish(f)
    tree.do(lambda b: ns.unlink(b, ROOT, b"f"))
    tree.fails(errno.ENOENT, lambda b: ns.link(b, f, ROOT, b"back"))


def test_a_row_from_before_names_were_kept_is_linked_and_found(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.do(lambda b: b.put(t.INODES, f, InodeRow(f, stat.S_IFREG | 0o644, generation=1, parent=ROOT)))
    assert tree.path(f) == b"f"
    tree.do(lambda b: ns.link(b, f, ROOT, b"g"))
    tree.do(lambda b: ns.unlink(b, ROOT, b"f"))
    assert tree.path(f) == b"g"


# -- orphans ---------------------------------------------------------------------------------------------------------


def test_an_open_file_outlives_its_name(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.do(lambda b: ns.set_xattr(b, f, b"user.a", b"1"))
    row = tree.do(lambda b: ns.unlink(b, ROOT, b"f", is_open=lambda ino: ino == f))
    assert (row.nlink, row.ctime_ns) == (0, tree.now_ns)
    assert tree.nameless() == [f]
    assert tree.names() == {}
    assert (tree.count(t.OBJECTS), tree.xattrs(f)) == (1, [b"user.a"])  # type: ignore[arg-type]
    assert tree.do(lambda b: ns.set_attributes(b, f, size=9)).size == 9
    with pytest.raises(OSError, match="No such file"):
        tree.path(f)
    dropped = tree.do(lambda b: ns.drop_nameless(b, f))
    assert dropped is not None
    assert (dropped.ino, dropped.generation) == (f, 1)
    assert tree.do(lambda b: ns.drop_nameless(b, f)) is None
    assert (tree.look(f), tree.nameless(), tree.xattrs(f)) == (None, [], [])
    assert tree.count(t.OBJECTS) == tree.count(t.TOMBSTONES) == 0  # type: ignore[arg-type]


def test_a_published_orphan_becomes_a_tombstone(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.publish(f)
    tree.do(lambda b: ns.unlink(b, ROOT, b"f", is_open=lambda _: True))
    assert tree.count(t.TOMBSTONES) == 0  # type: ignore[arg-type]
    tree.do(lambda b: ns.drop_nameless(b, f))
    assert tree.count(t.TOMBSTONES) == 1  # type: ignore[arg-type]
    assert tree.do(lambda b: ns.undelete(b, f)).nlink == 1
    assert tree.names() == {b"f": f}


def test_other_inodes_are_orphans_while_open(tree: Tree) -> None:
    row = tree.do(lambda b: ns.symlink(b, ROOT, b"l", target=b"x"))
    pipe = tree.do(lambda b: ns.make_node(b, ROOT, b"p", mode=stat.S_IFIFO))
    d = tree.dir(b"d")
    for name in (b"l", b"p"):
        tree.do(lambda b, n=name: ns.unlink(b, ROOT, n, is_open=lambda _: True))
    tree.do(lambda b: ns.rmdir(b, ROOT, b"d", is_open=lambda _: True))
    inos = [row.ino, pipe.ino, d]
    assert tree.nameless() == inos
    assert [tree.row(ino).nlink for ino in inos] == [0, 0, 0]
    assert tree.row(ROOT).nlink == 2
    for ino in inos:
        tree.do(lambda b, i=ino: ns.drop_nameless(b, i))
    assert [tree.look(ino) for ino in inos] == [None] * 3


def test_unnamed_files_get_a_name_or_go(tree: Tree) -> None:
    rows = [tree.do(lambda b: ns.create_unnamed(b, ROOT, mode=0o640, uid=5, chunk_bytes=1)) for _ in range(2)]
    assert tree.nameless() == [row.ino for row in rows]
    assert (rows[0].nlink, rows[0].mode, rows[0].uid) == (0, stat.S_IFREG | 0o640, 5)
    row = tree.do(lambda b: ns.link(b, rows[0].ino, ROOT, b"named"))
    assert (row.nlink, tree.path(row.ino)) == (1, b"named")
    tree.do(lambda b: ns.link(b, rows[0].ino, ROOT, b"again"))
    assert tree.do(lambda b: ns.drop_nameless(b, rows[0].ino)) is None
    assert tree.row(rows[0].ino).nlink == 2
    tree.do(lambda b: ns.drop_nameless(b, rows[1].ino))
    assert tree.look(rows[1].ino) is None
    assert tree.nameless() == []


def test_every_unpublished_generation_goes_with_the_last_name(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.publish(f)

    def again(b: Batch) -> None:
        for generation in (2, 3):
            objects.create(b, f, generation, chunk_bytes=1)
        objects.seal(b, f, 2, ObjectDigest(0, b"", ()), (0, 0, 0), block_bytes=1)
        b.put(t.INODES, f, InodeRow(f, stat.S_IFREG, generation=3, size=77, parent=ROOT, last_name=b"f"))

    tree.do(again)
    assert tree.do(lambda b: ns.unlink(b, ROOT, b"f")).generation == 3
    with tree.v.catalog.view() as view:
        assert [(key, row.state) for key, row in view.scan(1, t.OBJECTS)] == [((f, 1), ObjectState.TOMBSTONED)]
        assert list(view.scan(1, t.UNPUBLISHED)) == []
    assert (tree.row(f).generation, tree.row(f).size) == (1, 0)


# -- rename ----------------------------------------------------------------------------------------------------------


def test_a_rename_sets_the_times_it_should(tree: Tree) -> None:
    d, f = tree.dir(b"d"), tree.file(b"f")
    born = tree.row(f).mtime_ns
    renamed = tree.do(lambda b: ns.rename(b, ROOT, b"f", d, b"g"))
    assert renamed.moved == tree.row(f)
    assert (renamed.replaced, renamed.exchanged) == (None, None)
    assert (renamed.moved.ctime_ns, renamed.moved.mtime_ns, renamed.moved.parent) == (tree.now_ns, born, d)
    for ino in (ROOT, d):
        assert (tree.row(ino).mtime_ns, tree.row(ino).ctime_ns) == (tree.now_ns, tree.now_ns)


def test_a_replaced_file_loses_a_link_or_stays_open(tree: Tree) -> None:
    a, z = tree.file(b"a"), tree.file(b"z")
    tree.do(lambda b: ns.link(b, z, ROOT, b"other"))
    replaced = tree.do(lambda b: ns.rename(b, ROOT, b"a", ROOT, b"z")).replaced
    assert replaced == tree.row(z)
    assert (replaced.nlink, replaced.ctime_ns, tree.path(z)) == (1, tree.now_ns, b"other")
    replaced = tree.do(lambda b: ns.rename(b, ROOT, b"z", ROOT, b"other", is_open=lambda ino: ino == z)).replaced
    assert replaced is not None
    assert (replaced.ino, replaced.nlink, tree.nameless()) == (z, 0, [z])
    assert tree.names() == {b"other": a}


def test_a_directory_replaces_an_empty_one(tree: Tree) -> None:
    d, e, f = tree.dir(b"d"), tree.dir(b"e"), tree.dir(b"f")
    x = tree.dir(b"x", d)
    tree.fails(errno.ENOTEMPTY, lambda b: ns.rename(b, ROOT, b"e", ROOT, b"d"))
    tree.fails(errno.ENOTEMPTY, lambda b: ns.rename(b, d, b"x", ROOT, b"d"))
    replaced = tree.do(lambda b: ns.rename(b, d, b"x", ROOT, b"e")).replaced
    assert replaced is not None
    assert (replaced.ino, replaced.nlink, tree.look(e)) == (e, 0, None)
    assert [tree.row(i).nlink for i in (ROOT, d, f)] == [5, 2, 2]
    assert (tree.row(x).parent, tree.path(x)) == (ROOT, b"e")
    tree.do(lambda b: ns.rename(b, ROOT, b"e", ROOT, b"f", is_open=lambda _: True))
    assert tree.nameless() == [f]
    assert tree.row(ROOT).nlink == 4


def test_two_names_of_one_inode_stay(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.do(lambda b: ns.link(b, f, ROOT, b"g"))
    before = tree.rows()
    for new in (b"g", b"f"):
        renamed = tree.do(lambda b, n=new: ns.rename(b, ROOT, b"f", ROOT, n))
        assert (renamed.moved.ino, renamed.replaced) == (f, None)
        tree.do(lambda b, n=new: ns.rename(b, ROOT, b"f", ROOT, n, exchange=True))
        tree.fails(errno.EEXIST, lambda b, n=new: ns.rename(b, ROOT, b"f", ROOT, n, replace=False))
    assert tree.rows() == before


def test_exchange_of_a_file_and_a_directory(tree: Tree) -> None:
    d, e = tree.dir(b"d"), tree.dir(b"e")
    x, f = tree.dir(b"x", d), tree.file(b"f", e)
    tree.do(lambda b: ns.link(b, f, e, b"second"))
    renamed = tree.do(lambda b: ns.rename(b, d, b"x", e, b"f", exchange=True))
    assert (renamed.moved, renamed.replaced, renamed.exchanged) == (tree.row(x), None, tree.row(f))
    assert [tree.row(i).nlink for i in (d, e, f)] == [2, 3, 2]
    assert (tree.path(x), tree.path(f)) == (b"e/f", b"d/x")
    assert {tree.row(i).ctime_ns for i in (d, e, x, f)} == {tree.now_ns}
    tree.do(lambda b: ns.unlink(b, e, b"second"))
    assert tree.path(f) == b"d/x"


def test_exchange_is_refused(tree: Tree) -> None:
    d, f = tree.dir(b"d"), tree.file(b"f")
    below = tree.dir(b"below", d)
    tree.file(b"g", below)
    tree.fails(errno.ENOENT, lambda b: ns.rename(b, ROOT, b"f", ROOT, b"no", exchange=True))
    tree.fails(errno.ENOENT, lambda b: ns.rename(b, ROOT, b"no", ROOT, b"f", exchange=True))
    tree.fails(errno.EINVAL, lambda b: ns.rename(b, ROOT, b"d", below, b"g", exchange=True))
    tree.fails(errno.EINVAL, lambda b: ns.rename(b, below, b"g", ROOT, b"d", exchange=True))
    tree.fails(errno.EINVAL, lambda b: ns.rename(b, ROOT, b"f", ROOT, b"d", exchange=True, replace=False))
    assert tree.names() == {b"d": d, b"f": f}


# -- attributes ------------------------------------------------------------------------------------------------------


def test_attributes_change_alone(tree: Tree) -> None:
    f = tree.file(b"f")
    born = tree.row(f)
    row = tree.do(lambda b: ns.set_attributes(b, f, mode=stat.S_IFDIR | 0o4700))
    assert (row.mode, row.ctime_ns) == (stat.S_IFREG | 0o4700, tree.now_ns)
    row = tree.do(lambda b: ns.set_attributes(b, f, uid=1, gid=2, size=3, atime_ns=4, mtime_ns=-5))
    assert row == tree.row(f)
    assert (row.uid, row.gid, row.size, row.atime_ns, row.mtime_ns) == (1, 2, 3, 4, -5)
    assert (row.mode, row.nlink, row.parent, row.generation) == (stat.S_IFREG | 0o4700, 1, ROOT, born.generation)
    assert tree.do(lambda b: ns.set_attributes(b, f, ctime_ns=6)).ctime_ns == 6
    assert tree.do(lambda b: ns.set_attributes(b, f, uid=0, gid=0, size=0)).size == 0
    tree.fails(errno.ENOENT, lambda b: ns.set_attributes(b, 999, uid=1))


def test_xattrs(tree: Tree) -> None:
    f, g = tree.file(b"f"), tree.file(b"g")
    row = tree.do(lambda b: ns.set_xattr(b, f, b"user.b", b"1"))
    assert row.ctime_ns == tree.row(f).ctime_ns == tree.now_ns
    tree.do(lambda b: ns.set_xattr(b, f, b"user.a", b"", create=True))
    tree.do(lambda b: ns.set_xattr(b, f, b"user.b", b"2", replace=True))
    assert (tree.xattrs(f), tree.xattrs(g)) == ([b"user.a", b"user.b"], [])
    with tree.v.catalog.view() as view:
        got = [ns.get_xattr(view, 1, f, n) for n in (b"user.a", b"user.b", b"user.c", b"n" * 600)]
    assert got == [b"", b"2", None, None]
    tree.fails(errno.EEXIST, lambda b: ns.set_xattr(b, f, b"user.b", b"", create=True))
    tree.fails(errno.ENODATA, lambda b: ns.set_xattr(b, f, b"user.c", b"", replace=True))
    tree.fails(errno.ENODATA, lambda b: ns.remove_xattr(b, f, b"user.c"))
    tree.fails(errno.ENODATA, lambda b: ns.remove_xattr(b, f, b"n" * 600))
    tree.fails(errno.ERANGE, lambda b: ns.set_xattr(b, f, b"n" * 256, b""))
    tree.fails(errno.ERANGE, lambda b: ns.set_xattr(b, f, b"", b""))
    assert tree.do(lambda b: ns.remove_xattr(b, f, b"user.b")).ctime_ns == tree.now_ns
    assert tree.xattrs(f) == [b"user.a"]


def test_xattrs_have_limits(tree: Tree) -> None:
    f = tree.file(b"f")
    tree.fails(errno.E2BIG, lambda b: ns.set_xattr(b, f, b"user.a", bytes((64 << 10) + 1)))
    for n in range(3):
        tree.do(lambda b, n=n: ns.set_xattr(b, f, b"user.%d" % n, bytes(64 << 10)))
    tree.fails(errno.ENOSPC, lambda b: ns.set_xattr(b, f, b"user.3", bytes(64 << 10)))
    left = (64 << 10) - 4 * len(b"user.n")
    tree.do(lambda b: ns.set_xattr(b, f, b"user.3", bytes(left)))
    tree.do(lambda b: ns.set_xattr(b, f, b"user.3", b"\1" * left))
    tree.fails(errno.ENOSPC, lambda b: ns.set_xattr(b, f, b"user.3", bytes(left + 1)))


def test_xattrs_go_with_their_inode(tree: Tree) -> None:
    f, d = tree.file(b"f"), tree.dir(b"d")
    pipe = tree.do(lambda b: ns.make_node(b, ROOT, b"p", mode=stat.S_IFIFO)).ino
    for ino in (f, d, pipe):
        tree.do(lambda b, i=ino: ns.set_xattr(b, i, b"trusted.a", b"1"))
    tree.do(lambda b: ns.unlink(b, ROOT, b"f"))
    tree.do(lambda b: ns.unlink(b, ROOT, b"p"))
    tree.do(lambda b: ns.rmdir(b, ROOT, b"d"))
    assert tree.count(t.XATTRS) == 0  # type: ignore[arg-type]


# -- undelete --------------------------------------------------------------------------------------------------------


def test_undelete_puts_a_file_back_where_it_was(tree: Tree) -> None:
    d = tree.dir(b"d")
    inos = []
    for _ in range(3):
        ino = tree.file(b"f", d)
        tree.publish(ino)
        tree.do(lambda b, i=ino: ns.set_xattr(b, i, b"user.a", b"1"))
        tree.do(lambda b: ns.unlink(b, d, b"f"))
        inos.append(ino)
    other = tree.file(b"f")
    tree.publish(other)
    tree.do(lambda b: ns.unlink(b, ROOT, b"f"))
    with tree.v.catalog.view() as view:
        assert [row.ino for row in ns.deleted(view, 1, d, b"f")] == inos[::-1]
        assert [row.ino for row in ns.deleted(view, 1, ROOT, b"f")] == [other]
        assert ns.deleted(view, 1, d, b"g") == []
    row = tree.do(lambda b: ns.undelete(b, inos[1]))
    assert (row.nlink, row.ctime_ns, tree.path(row.ino)) == (1, tree.now_ns, b"d/f")
    assert tree.row(d).mtime_ns == tree.now_ns
    assert tree.xattrs(inos[1]) == [b"user.a"]
    tree.fails(errno.EEXIST, lambda b: ns.undelete(b, inos[0]))
    tree.fails(errno.ENOENT, lambda b: ns.undelete(b, inos[1], d, b"h"))
    tree.do(lambda b: ns.undelete(b, inos[0], name=b"g"))
    tree.do(lambda b: ns.undelete(b, inos[2], ROOT, b"h"))
    assert [tree.path(i) for i in inos] == [b"d/g", b"d/f", b"h"]
    with tree.v.catalog.view() as view:
        assert ns.deleted(view, 1, d, b"f") == []


def test_undelete_needs_a_directory(tree: Tree) -> None:
    d = tree.dir(b"d")
    f = tree.file(b"f", d)
    tree.publish(f)
    tree.do(lambda b: ns.unlink(b, d, b"f"))
    tree.do(lambda b: ns.rmdir(b, ROOT, b"d"))
    tree.fails(errno.ENOENT, lambda b: ns.undelete(b, f))
    tree.do(lambda b: ns.undelete(b, f, ROOT))
    assert tree.names() == {b"f": f}


def test_what_was_replaced_can_be_undeleted(tree: Tree) -> None:
    d, f = tree.dir(b"d"), tree.file(b"f")
    old = tree.file(b"g", d)
    tree.publish(old)
    tree.do(lambda b: ns.rename(b, ROOT, b"f", d, b"g"))
    with tree.v.catalog.view() as view:
        assert [row.ino for row in ns.deleted(view, 1, d, b"g")] == [old]
    assert tree.path(f) == b"d/g"


# -- reading ---------------------------------------------------------------------------------------------------------


def test_paths_there_and_back(tree: Tree) -> None:
    d = tree.dir(b"d")
    e = tree.dir(b"\xff", d)
    f = tree.file(b"f", e)
    with tree.v.catalog.view() as view:
        assert [ns.path_of(view, 1, i) for i in (ROOT, d, e, f)] == [b"", b"d", b"d/\xff", b"d/\xff/f"]
        for path in (b"d/\xff/f", b"/d//\xff/./f", b"d/../d/\xff/f", b"../d/\xff/f"):
            assert ns.resolve(view, 1, path).ino == f
        for root in (b"", b"/", b"."):
            assert ns.resolve(view, 1, root).ino == ROOT
        for path, code in ((b"d/no", errno.ENOENT), (b"d/\xff/f/x", errno.ENOTDIR), (b"x" * 256, errno.ENAMETOOLONG)):
            with pytest.raises(OSError, match=r"\[Errno") as error:
                ns.resolve(view, 1, path)
            assert error.value.errno == code
        with pytest.raises(OSError, match="No such file"):
            ns.path_of(view, 1, 999)


def test_a_listing_goes_on_behind_a_name(tree: Tree) -> None:
    d = tree.dir(b"d")
    for n in range(9):
        tree.file(b"%d" % n, d)
    tree.dir(b"e")
    tree.do(lambda b: ns.unlink(b, d, b"4"))
    with tree.v.catalog.view() as view:

        def names(after: bytes | None, limit: int) -> bytes:
            return b"".join(name for name, _ in ns.list_dir(view, 1, d, after, limit))

        assert names(None, 3) == b"012"
        assert names(b"2", 3) == b"356"
        assert names(b"4", 9) == b"5678"
        assert names(b"8", 9) == names(None, 0) == b""
        assert ns.entry(view, 1, d, b"5") == ns.list_dir(view, 1, d, b"4", 1)[0][1]
        assert ns.entry(view, 1, d, b"4") is None


def test_a_large_directory_is_read_by_the_page(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in rows looked at: a page of ten in 100,000 names looks at eleven at most."""

    def fill(b: Batch) -> None:
        for n in range(100_000):
            b.put(t.DENTRIES, (ROOT, b"%06d" % n), DentryRow(n, stat.S_IFREG))

    tree.do(fill)
    seen = [0]
    decode = t.DENTRIES.decode

    def counted(data: bytes) -> DentryRow:
        seen[0] += 1
        return decode(data)

    with tree.v.catalog.view() as view, monkeypatch.context() as patch:
        patch.setattr(t.DENTRIES, "decode", counted)
        page = ns.list_dir(view, 1, ROOT, b"050000", 10)
        found = ns.entry(view, 1, ROOT, b"099999")
    assert [name for name, _ in page] == [b"%06d" % n for n in range(50_001, 50_011)]
    assert found is not None
    assert seen[0] <= 12
