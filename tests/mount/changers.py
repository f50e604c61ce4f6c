"""Processes that change names at once, each with a model of what it was told.

    python -m tests.mount.changers TOP NUMBER SEED JOURNAL [sync]     until the mount is gone; on stdout a line for
                                                                      every ten changes that were answered; sync:
                                                                      now and then one is made durable

The journal has a line for each change that is asked for, and one for each that was answered, flushed before the next
is asked for: `Told` reads from it what may be there.

All of them work in the same directories, each with names of its own, so that a model is exact whatever the others do.
One name, CURRENT, is everybody's: they put file after file in its place. When the mount goes, one change is uncertain a
process: it was made or not.

Owner: the process itself.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.posix.helpers import RENAME_EXCHANGE, renameat2

GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.EIO, errno.ESTALE, errno.EROFS)
SHARED = ("s0", "s1", "s2")
CURRENT = "s0/current"
XATTRS = ("user.a", "user.bb", "user.long")
Node = dict[str, Any]  # kind, mode, ino, xattrs, target, text: of one inode; None: not known
Nodes = dict[str, Node]  # by path


class GoneError(Exception):
    """The mount is."""


def below(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


def moved(nodes: Nodes, old: str, new: str) -> Nodes:
    return {new + path[len(old) :]: node for path, node in nodes.items() if below(path, old)}


def made(nodes: Nodes, change: list[Any]) -> Nodes:
    """The nodes after a change."""
    what, path, *args = change
    nodes = dict(nodes)
    if what == "new":
        nodes[path] = args[0]
    elif what == "remove":
        del nodes[path]
    elif what == "link":
        nodes[args[0]] = nodes[path]
    elif what in ("rename", "exchange"):
        moves = moved(nodes, path, args[0])
        if what == "exchange":
            moves |= moved(nodes, args[0], path)
        nodes = {
            name: node for name, node in nodes.items() if not below(name, path) and not below(name, args[0])
        } | moves
    elif what == "set":
        nodes[path].update(args[0])
    elif what == "xattr":
        name, value = args
        nodes[path]["xattrs"].pop(name, None)
        if value is not None:
            nodes[path]["xattrs"][name] = value
    return nodes


class Changer:
    def __init__(self, top: Path, number: int, seed: int, journal: Path) -> None:
        self.top = top
        self.own = f"w{number}-"
        self.rng = random.Random(seed)
        self.nodes: Nodes = {}
        self.count = 0
        self.answered = 0
        self.journal = journal.open("a")
        self.note("own", self.own)

    def note(self, what: str, value: Any = None) -> None:
        """In the journal before anything else happens."""
        self.journal.write(json.dumps([what, value]) + "\n")
        self.journal.flush()

    # -- what is there -----------------------------------------------------------------------------------------

    def at(self, path: str) -> str:
        return f"{self.top}/{path}"

    def some(self, *kinds: str) -> str | None:
        found = [path for path, node in self.nodes.items() if node["kind"] in kinds]
        return self.rng.choice(found) if found else None

    def is_empty(self, path: str) -> bool:
        return not any(other != path and below(other, path) for other in self.nodes)

    def free(self) -> str:
        dirs = [path for path, node in self.nodes.items() if node["kind"] == "d" and path.count("/") < 5]
        self.count += 1
        return f"{self.rng.choice([*SHARED, *dirs])}/{self.own}{self.count}"

    # -- changing ----------------------------------------------------------------------------------------------

    def do(self, call: Callable[[], object], *change: Any) -> None:
        """The call, then the change in the model. Where the mount goes meanwhile, either may be so."""
        self.note("asked", change)
        try:
            call()
        except OSError as e:
            if e.errno in GONE or not os.path.isdir(self.top):
                raise GoneError from e
            raise
        self.note("answered")
        self.nodes = made(self.nodes, list(change))
        self.answered += 1
        if self.answered % 10 == 0:
            print(self.answered, flush=True)

    def new(self, kind: str, call: Callable[[str], object], **fields: Any) -> str:
        path = self.free()
        node: Node = {"kind": kind, "mode": None, "ino": None, "xattrs": {}, "target": None, "text": None}
        self.do(lambda: call(self.at(path)), "new", path, node)
        self.know(path, fields)
        try:
            self.know(path, {"ino": os.lstat(self.at(path)).st_ino})
        except OSError as e:
            raise GoneError from e
        return path

    def know(self, path: str, fields: Node) -> None:
        self.note("known", [path, fields])
        self.nodes[path].update(fields)

    def create(self) -> str:
        text = f"{self.own}{self.count}"

        def call(path: str) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)

        return self.new("f", call, mode=0o640, text=text)

    def mkdir(self) -> None:
        if sum(node["kind"] == "d" for node in self.nodes.values()) < 12:
            self.new("d", lambda path: os.mkdir(path, 0o750), mode=0o750)

    def symlink(self) -> None:
        self.new("l", lambda path: os.symlink("nowhere", path), target="nowhere")

    def link(self) -> None:
        old, new = self.some("f"), self.free()
        if old:
            self.do(lambda: os.link(self.at(old), self.at(new)), "link", old, new)

    def unlink(self) -> None:
        path = self.some("f", "l")
        if path and len(self.nodes) > 25:
            self.do(lambda: os.unlink(self.at(path)), "remove", path)

    def rmdir(self) -> None:
        path = self.some("d")
        if path and self.is_empty(path):
            self.do(lambda: os.rmdir(self.at(path)), "remove", path)

    def rename(self) -> None:
        old, new = self.some("f", "l", "d"), self.free()
        if old and not below(new, old):
            self.do(lambda: os.rename(self.at(old), self.at(new)), "rename", old, new)

    def replace(self) -> None:
        old = self.some("f", "l", "d")
        kinds = ("d",) if old and self.nodes[old]["kind"] == "d" else ("f", "l")
        new = self.some(*kinds)
        if not old or not new or self.nodes[old] is self.nodes[new] or below(new, old) or below(old, new):
            return
        if kinds == ("d",) and not self.is_empty(new):
            return
        self.do(lambda: os.rename(self.at(old), self.at(new)), "rename", old, new)

    def exchange(self) -> None:
        one, other = self.some("f", "l", "d"), self.some("f", "l", "d")
        if not one or not other or self.nodes[one] is self.nodes[other] or below(one, other) or below(other, one):
            return
        self.do(lambda: renameat2(self.at(one), self.at(other), RENAME_EXCHANGE), "exchange", one, other)

    def put_current(self) -> None:
        """Everybody's name: the model has only when this was asked for and answered."""
        path = self.create()
        self.note("current asked", [self.nodes[path]["ino"], time.monotonic()])
        self.do(lambda: os.rename(self.at(path), self.at(CURRENT)), "remove", path)
        self.note("current answered", time.monotonic())

    def chmod(self) -> None:
        path, mode = self.some("f", "d"), self.rng.choice((0o700, 0o750, 0o644))
        if path:
            self.do(lambda: os.chmod(self.at(path), mode), "set", path, {"mode": mode})

    def set_xattr(self) -> None:
        path, name = self.some("f", "d"), self.rng.choice(XATTRS)
        value = str(self.rng.random()) * (100 if name == "user.long" else 1)
        if path:
            self.do(lambda: os.setxattr(self.at(path), name, value.encode()), "xattr", path, name, value)

    def remove_xattr(self) -> None:
        path = self.some("f", "d")
        if path and self.nodes[path]["xattrs"]:
            name = self.rng.choice(sorted(self.nodes[path]["xattrs"]))
            self.do(lambda: os.removexattr(self.at(path), name), "xattr", path, name, None)

    # -- syncing -----------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """fsync of a file or a directory: every change before it survives power loss, of a file its bytes."""
        path = self.some("f", "d")
        if not path:
            return
        try:
            fd = os.open(self.at(path), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            raise GoneError from e
        self.note("synced", path)

    def run(self, *, syncing: bool) -> None:
        weights = {
            self.create: 8, self.mkdir: 2, self.symlink: 1, self.link: 3, self.unlink: 3, self.rmdir: 1, self.rename: 4,
            self.replace: 6, self.exchange: 3, self.put_current: 2, self.chmod: 2, self.set_xattr: 4,
            self.remove_xattr: 1, self.sync: 1 if syncing else 0,
        }  # fmt: skip
        try:
            while True:
                self.rng.choices(list(weights), list(weights.values()))[0]()
        except GoneError:
            pass


# -- what is left --------------------------------------------------------------------------------------------------


class Told:
    """What a process was told, by its journal."""

    def __init__(self, journal: Path) -> None:
        self.own = ""
        self.nodes: Nodes = {}
        self.pending: list[Any] = []
        self.answered = 0
        self.since_sync: list[Nodes] = [{}]  # as it was at the last sync, and after each change since
        self.replaced: list[list[float]] = []  # of CURRENT: inode, when it was asked for, when answered
        for what, value in map(json.loads, journal.read_text().splitlines()):
            self._read(what, value)

    def _read(self, what: str, value: Any) -> None:
        if what == "own":
            self.own = value
        elif what == "asked":
            self.pending = value
        elif what == "answered":
            self.nodes, self.pending = made(self.nodes, self.pending), []
            self.answered += 1
            self.since_sync.append(copy.deepcopy(self.nodes))
        elif what == "known":
            self.nodes[value[0]].update(value[1])
            self.since_sync[-1:] = [copy.deepcopy(self.nodes)]
        elif what == "synced":
            self.nodes[value]["synced"] = True
            self.since_sync = [copy.deepcopy(self.nodes)]
        elif what == "current asked":
            self.replaced.append([*value, float("inf")])
        else:
            self.replaced[-1][2] = value

    def allowed(self) -> list[Nodes]:
        """What may be there: without the change that was not answered, and with it."""
        return [self.nodes, made(copy.deepcopy(self.nodes), self.pending)] if self.pending else [self.nodes]

    def allowed_after_power_loss(self) -> list[Nodes]:
        """As it was at the last sync, or after a later change; of files that were not synced, any bytes."""
        found = copy.deepcopy([*self.since_sync, *self.allowed()[1:]])
        for node in [node for nodes in found for node in nodes.values()]:
            node["text"] = node["text"] if node.get("synced") else None
        return found


def own_paths(top: Path, own: str) -> dict[str, os.stat_result]:
    found = {}
    for folder, dirs, files in os.walk(top):
        for name in (*dirs, *files):
            path = os.path.relpath(os.path.join(folder, name), top)
            if path.split("/")[1:] and path.split("/")[1].startswith(own):
                found[path] = os.lstat(top / path)
    return found


def differences(nodes: Nodes, top: Path, own: str) -> list[str]:
    return differences_from(nodes, top, own_paths(top, own))


def differences_from(nodes: Nodes, top: Path, there: dict[str, os.stat_result]) -> list[str]:
    out = [f"{path}: missing" for path in nodes.keys() - there.keys()]
    out += [f"{path}: should not be there" for path in there.keys() - nodes.keys()]
    for path in nodes.keys() & there.keys():
        node, st = nodes[path], there[path]
        kind = {stat.S_IFDIR: "d", stat.S_IFLNK: "l"}.get(stat.S_IFMT(st.st_mode), "f")
        names = [other for other, one in nodes.items() if one is node]
        subdirs = sum(os.path.dirname(other) == path and one["kind"] == "d" for other, one in nodes.items())
        found: Node = {"kind": kind, "ino": st.st_ino, "nlink": st.st_nlink, "mode": stat.S_IMODE(st.st_mode)}
        wanted: Node = {**node, "nlink": 2 + subdirs if kind == "d" else len(names)}
        if kind == "l":
            found["target"] = os.readlink(top / path)
        else:
            found["xattrs"] = {name: os.getxattr(top / path, name).decode() for name in os.listxattr(top / path)}
        if kind == "f":
            found["text"] = (top / path).read_text()
        wrong = {key: (value, wanted[key]) for key, value in found.items() if wanted[key] not in (value, None)}
        out += [f"{path}: {key} is {is_!r}, was {was!r}" for key, (is_, was) in wrong.items()]
    return out


def may_be_current(ino: int, replaced: list[list[float]]) -> bool:
    """Whether no other is known to have been put there after this one was."""
    asked_s = [asked for _, asked, answered in replaced if answered < float("inf")]
    return any(one == ino and max(asked_s, default=0) <= answered for one, _, answered in replaced)


if __name__ == "__main__":
    Changer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])).run(syncing=len(sys.argv) > 5)
