"""Random use of the tree beside a model of what POSIX says: structure, counts, parents, errors, and the log."""

from __future__ import annotations

import errno
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aof2.engine import namespace as ns
from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow, ObjectState
from aof2.engine.tiering.hashing import ObjectDigest
from tests.catalog.helpers import every_row, open_volume

ROOT = ns.root_ino(1)
PICK = st.integers(0, 119)  # from a small range all are as likely
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
KINDS = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}


class Node:
    """An inode as POSIX sees it."""

    def __init__(self, ino: int, kind: str, parent: Node | None = None) -> None:
        self.ino = ino
        self.kind = kind
        self.parent = parent or self  # of directories
        self.children: dict[bytes, Node] = {}
        self.links = 1
        self.last = (0, b"")  # where it was when it had a name
        self.open = False
        self.published = False
        self.there = True  # has a row, and may be reached by a name or a descriptor

    @property
    def is_dir(self) -> bool:
        return self.kind == "dir"

    @property
    def nlink(self) -> int:
        if not self.is_dir:
            return self.links
        return 2 + sum(child.is_dir for child in self.children.values()) if self.links else 0

    def above(self) -> Iterator[Node]:
        at = self
        while True:
            yield at
            if at.parent is at:
                return
            at = at.parent


class Refused(Exception):  # noqa: N818
    def __init__(self, code: int) -> None:
        self.code = code


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="aof2-tree-"))
        self.v = open_volume(self.path)
        self.v.writer.call(1, ns.make_root)
        self.root = Node(ROOT, "dir")
        self.nodes = [self.root]
        self.deleted: dict[int, Node] = {}  # tombstones
        self.plant()

    def plant(self) -> None:
        """Something to work on: directories in directories, a file with names here and there."""
        top = self.root
        for name in (b"a", b"b"):
            self.enter("dir", top, name, lambda b, n=name: ns.mkdir(b, ROOT, n))
        a = top.children[b"a"]
        for name in (b"a", b"b"):
            self.enter("dir", a, name, lambda b, n=name: ns.mkdir(b, a.ino, n))
        self.enter("file", a, b"c", lambda b: ns.create(b, a.ino, b"c", chunk_bytes=1))
        for parent in (top, a.children[b"a"], top.children[b"b"]):
            self.link_to(a.children[b"c"], parent, b"d")

    def teardown(self) -> None:
        self.rebuild()
        self.v.close()
        shutil.rmtree(self.path)

    # -- choosing ------------------------------------------------------------------------------------------------

    def directory(self, pick: int) -> Node:
        """Of all that ever were: those that are gone must be refused."""
        dirs = [node for node in self.nodes if node.is_dir and (node.links or pick % 8 == 7)]
        return dirs[pick // 8 % len(dirs)]

    def place(self, pick: int, name: bytes) -> tuple[Node, bytes]:
        """Mostly one that is taken."""
        taken = [(node, n) for node in self.nodes for n in node.children]
        return taken[pick // 8 % len(taken)] if taken and pick % 8 < 5 else (self.directory(pick), name)

    def node(self, pick: int) -> Node:
        return self.nodes[pick % len(self.nodes)]

    def both(self, real: Callable[[Batch], object], model: Callable[[], Callable[[], None]]) -> object:
        """The model says how it must end before the tree is asked; what it changes, it changes after."""
        try:
            effect = model()
        except Refused as refused:
            with pytest.raises(OSError, match=r"\[Errno") as e:
                self.v.writer.call(1, real)
            assert errno.errorcode[e.value.errno or 0] == errno.errorcode[refused.code]
            return None
        value = self.v.writer.call(1, real)
        effect()
        return value

    # -- the model's rules ---------------------------------------------------------------------------------------

    @staticmethod
    def free(parent: Node, name: bytes) -> None:
        if not parent.links:
            raise Refused(errno.ENOENT)
        if name in parent.children:
            raise Refused(errno.EEXIST)

    @staticmethod
    def child(parent: Node, name: bytes) -> Node:
        if not parent.links or name not in parent.children:
            raise Refused(errno.ENOENT)
        return parent.children[name]

    def drop_name(self, parent: Node, name: bytes) -> None:
        node = parent.children.pop(name)
        node.links -= 1
        node.last = (parent.ino, name)
        if node.links == 0 and not node.open:
            self.gone(node)

    def gone(self, node: Node) -> None:
        node.there = False
        if node.published:
            self.deleted[node.ino] = node
        elif not node.is_dir:
            self.nodes.remove(node)

    def is_open(self, ino: int) -> bool:
        return any(node.ino == ino and node.open for node in self.nodes)

    # -- steps ---------------------------------------------------------------------------------------------------

    def enter(self, kind: str, parent: Node, name: bytes, make: Callable[[Batch], InodeRow]) -> None:
        def model() -> Callable[[], None]:
            self.free(parent, name)
            return lambda: None

        row = self.both(make, model)
        if isinstance(row, InodeRow):
            node = Node(row.ino, kind, parent)
            parent.children[name] = node
            self.nodes.append(node)

    @rule(d=PICK, name=NAMES)
    def create(self, d: int, name: bytes) -> None:
        parent = self.directory(d)
        self.enter("file", parent, name, lambda b: ns.create(b, parent.ino, name, chunk_bytes=1))

    @rule(d=PICK, name=NAMES)
    def mkdir(self, d: int, name: bytes) -> None:
        parent = self.directory(d)
        self.enter("dir", parent, name, lambda b: ns.mkdir(b, parent.ino, name))

    @rule(d=PICK, name=NAMES, kind=st.sampled_from(["symlink", *KINDS]))
    def other(self, d: int, name: bytes, kind: str) -> None:
        parent = self.directory(d)
        if kind == "symlink":
            self.enter(kind, parent, name, lambda b: ns.symlink(b, parent.ino, name, target=b"../x"))
        else:
            self.enter(kind, parent, name, lambda b: ns.make_node(b, parent.ino, name, mode=KINDS[kind] | 0o600))

    @rule(d=PICK)
    def create_unnamed(self, d: int) -> None:
        parent = self.directory(d)

        def model() -> Callable[[], None]:
            if not parent.links:
                raise Refused(errno.ENOENT)
            return lambda: None

        row = self.both(lambda b: ns.create_unnamed(b, parent.ino, chunk_bytes=1), model)
        if isinstance(row, InodeRow):
            node = Node(row.ino, "file")
            node.links, node.open = 0, True
            node.last = (parent.ino, b"")
            self.nodes.append(node)

    @rule(n=PICK, d=PICK, name=NAMES)
    def link(self, n: int, d: int, name: bytes) -> None:
        files = [node for node in self.nodes if not node.is_dir]
        node = files[n // 8 % len(files)] if files and n % 8 < 7 else self.node(n)
        self.link_to(node, self.directory(d), name)

    def link_to(self, node: Node, parent: Node, name: bytes) -> None:
        def model() -> Callable[[], None]:
            if not node.there:
                raise Refused(errno.ENOENT)
            if node.is_dir:
                raise Refused(errno.EPERM)
            self.free(parent, name)

            def effect() -> None:
                parent.children[name] = node
                node.links += 1

            return effect

        self.both(lambda b: ns.link(b, node.ino, parent.ino, name), model)

    @rule(d=PICK, name=NAMES)
    def unlink(self, d: int, name: bytes) -> None:
        parent, name = self.place(d, name)

        def model() -> Callable[[], None]:
            if self.child(parent, name).is_dir:
                raise Refused(errno.EISDIR)
            return lambda: self.drop_name(parent, name)

        self.both(lambda b: ns.unlink(b, parent.ino, name, is_open=self.is_open), model)

    @rule(d=PICK, name=NAMES)
    def rmdir(self, d: int, name: bytes) -> None:
        parent, name = self.place(d, name)

        def model() -> Callable[[], None]:
            node = self.child(parent, name)
            if not node.is_dir:
                raise Refused(errno.ENOTDIR)
            if node.children:
                raise Refused(errno.ENOTEMPTY)
            return lambda: self.drop_name(parent, name)

        self.both(lambda b: ns.rmdir(b, parent.ino, name, is_open=self.is_open), model)

    @rule(d=PICK, name=NAMES, e=PICK, new=NAMES, how=st.sampled_from(["", "", "", "noreplace", "exchange", "exchange"]))
    def rename(self, d: int, name: bytes, e: int, new: bytes, how: str) -> None:
        (here, name), (there, new) = self.place(d, name), self.place(e, new)

        def model() -> Callable[[], None]:
            if not there.links:
                raise Refused(errno.ENOENT)
            node = self.child(here, name)
            old = there.children.get(new)
            if how == "exchange" and old is None:
                raise Refused(errno.ENOENT)
            if how == "noreplace" and old is not None:
                raise Refused(errno.EEXIST)
            if old is node:
                return lambda: None
            if node in there.above() or (how == "exchange" and old in here.above()):
                raise Refused(errno.EINVAL)
            if old is not None and how != "exchange":
                if node.is_dir != old.is_dir:
                    raise Refused(errno.ENOTDIR if node.is_dir else errno.EISDIR)
                if old.children:
                    raise Refused(errno.ENOTEMPTY)
            return lambda: self.move(here, name, there, new, exchange=how == "exchange")

        self.both(
            lambda b: ns.rename(
                b,
                here.ino,
                name,
                there.ino,
                new,
                replace=how != "noreplace",
                exchange=how == "exchange",
                is_open=self.is_open,
            ),
            model,
        )

    def move(self, here: Node, name: bytes, there: Node, new: bytes, *, exchange: bool) -> None:
        node = here.children.pop(name)
        if exchange:
            other = there.children[new]
            here.children[name] = other
            other.parent = here
        elif new in there.children:
            self.drop_name(there, new)
        there.children[new] = node
        node.parent = there

    @rule(n=PICK)
    def open(self, n: int) -> None:
        node = self.node(n)
        node.open = node.open or bool(node.links)

    @rule(n=PICK)
    def close(self, n: int) -> None:
        """The last close; also of what is no orphan, which does nothing."""
        node = self.node(n)
        is_orphan = node.open and not node.links
        row = self.v.writer.call(1, lambda b: ns.drop_nameless(b, node.ino))
        assert (row is not None) == is_orphan
        node.open = False
        if is_orphan:
            self.gone(node)

    @rule(n=PICK)
    def publish(self, n: int) -> None:
        node = self.node(n)
        if node.kind != "file" or node.published:
            return
        node.published = True

        def work(b: Batch) -> None:
            objects.seal(b, node.ino, 1, ObjectDigest(0, b"", ()), (0, 0, 0), block_bytes=1)
            objects.published(b, node.ino, 1, 1, [])

        self.v.writer.call(1, work)

    @rule(n=PICK, there=st.booleans(), d=PICK, name=NAMES)
    def undelete(self, n: int, there: bool, d: int, name: bytes) -> None:
        if not self.deleted:
            return
        node = list(self.deleted.values())[n % len(self.deleted)]
        parent = self.directory(d)
        if there:
            at, name = node.last
            if not name:
                return  # it never had one
            parent = next(p for p in self.nodes if p.ino == at)

        def model() -> Callable[[], None]:
            self.free(parent, name)

            def effect() -> None:
                node.links, node.there = 1, True
                parent.children[name] = node
                del self.deleted[node.ino]

            return effect

        if there:
            self.both(lambda b: ns.undelete(b, node.ino), model)
        else:
            self.both(lambda b: ns.undelete(b, node.ino, parent.ino, name), model)

    @rule(n=PICK)
    def mark(self, n: int) -> None:
        """An extended attribute, which must go with the inode and not before."""
        node = self.node(n)
        if node.there:
            self.v.writer.call(1, lambda b: ns.set_xattr(b, node.ino, b"user.ino", b"%d" % node.ino))

    @rule()
    def rebuild(self) -> None:
        """LMDB is only an index: without it, the log gives the same rows."""
        with self.v.catalog.view() as view:
            before = every_row(view)
        self.v.close()
        shutil.rmtree(self.path / "catalog")
        self.v = open_volume(self.path)
        with self.v.catalog.view() as view:
            assert every_row(view) == before

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def rows_are_the_models(self) -> None:
        alive = {node.ino: node for node in self.nodes if node.there}
        names = {(d.ino, name): child for d in self.nodes if d.is_dir and d.links for name, child in d.children.items()}
        with self.v.catalog.view() as view:
            dentries = dict(view.scan(1, t.DENTRIES))
            inodes = dict(view.scan(1, t.INODES))
            links = {(ino, (parent, name)) for (ino, parent, name), _ in view.scan(1, t.LINKS)}
            tombs = {ino for (_, ino), _ in view.scan(1, t.TOMBSTONES)}
            marked = {ino for (ino, _), _ in view.scan(1, t.XATTRS)}
            objs = {ino: row.state for (ino, _), row in view.scan(1, t.OBJECTS)}
            assert ns.nameless(view, 1) == sorted(node.ino for node in alive.values() if not node.links)
            for node in alive.values():
                if node.links:
                    assert ns.resolve(view, 1, ns.path_of(view, 1, node.ino)).ino == node.ino
            for node in self.deleted.values():
                assert node.ino in {row.ino for row in ns.deleted(view, 1, *node.last)}
        assert {key: entry.ino for key, entry in dentries.items()} == {key: node.ino for key, node in names.items()}
        assert set(inodes) == set(alive) | set(self.deleted)
        assert {ino: row.nlink for ino, row in inodes.items() if ino in alive} == {
            ino: node.nlink for ino, node in alive.items()
        }
        for key, entry in dentries.items():
            assert entry.mode == stat.S_IFMT(inodes[entry.ino].mode)
            if names[key].is_dir:
                assert (inodes[entry.ino].parent, inodes[entry.ino].last_name) == key
        for ino, node in alive.items():
            if node.links and ino != ROOT:
                assert dentries[inodes[ino].parent, inodes[ino].last_name].ino == ino
        assert links == {(node.ino, key) for key, node in names.items() if not node.is_dir and node.links > 1}
        assert tombs == set(self.deleted)
        assert marked <= set(inodes)
        assert set(objs) == {n.ino for n in alive.values() if n.kind == "file"} | tombs
        assert {ino for ino, state in objs.items() if state == ObjectState.TOMBSTONED} == tombs


def test_the_tree_is_as_posix_says() -> None:
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=60, stateful_step_count=50))
