"""What a journal of `load.py` says must be there after a kill, and the comparison with what is.

Acknowledged operations are there, all of them: only processes were killed, so what the log and the disk's page cache
were given survives. The one operation that was under way may have happened or not; of a write, any part of it.
One exception is POSIX's own: a write to a file that was cold when it was opened is only certain after fsync. Until then
each byte is either what it was at the last fsync or what was written since.
"""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.mount.load import DURABLE, content


@dataclass(eq=False)
class Node:
    kind: str  # f, d or l
    data: bytearray = field(default_factory=bytearray)
    mode: int = 0
    target: str = ""
    note: str = ""
    cold: bool = False
    layers: list[bytes] = field(
        default_factory=list
    )  # what it may also be, byte by byte: earlier or uncertain contents

    def synced(self) -> None:
        self.layers.clear()

    def write(self, offset: int, data: bytes) -> None:
        if self.cold:
            self.layers.append(bytes(self.data))
        self._apply(offset, data)

    def _apply(self, offset: int, data: bytes) -> None:
        if offset > len(self.data):
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def maybe_write(self, offset: int, data: bytes) -> None:
        with_it = Node("f", bytearray(self.data))
        with_it._apply(offset, data)
        self.layers.append(bytes(with_it.data))

    def truncate(self, size: int) -> None:
        if self.cold:
            self.layers.append(bytes(self.data))
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def accepts(self, got: bytes) -> bool:
        if got == self.data:
            return True
        if not self.layers:
            return False
        whole = [bytes(self.data), *self.layers]
        if not min(map(len, whole)) <= len(got) <= max(map(len, whole)):
            return False
        if got in whole:
            return True
        return all(any(byte == (one[i] if i < len(one) else 0) for one in whole) for i, byte in enumerate(got))


@dataclass
class Tree:
    """A writer's directory as its journal tells it."""

    nodes: dict[str, Node] = field(default_factory=dict)
    fds: dict[int, Node] = field(default_factory=dict)

    def apply(self, row: dict) -> None:
        match row["op"]:
            case "create":
                self.fds[row["fd"]] = self.nodes[row["name"]] = Node("f", mode=0o640)
            case "open":
                self.fds[row["fd"]] = self.nodes[row["name"]]
            case "write":
                self.fds[row["fd"]].write(row["off"], content(row["seed"], row["len"]))
            case "truncate":
                self.fds[row["fd"]].truncate(row["size"])
            case "fsync":
                self.fds[row["fd"]].synced()
            case "close":
                del self.fds[row["fd"]]
            case "rename":
                self._rename(row["name"], row["to"])
            case "mkdir":
                self.nodes[row["name"]] = Node("d", mode=0o750)
            case "rmdir" | "unlink":
                del self.nodes[row["name"]]
            case "link":
                self.nodes[row["to"]] = self.nodes[row["name"]]
            case "symlink":
                self.nodes[row["name"]] = Node("l", target=row["target"])
            case "chmod":
                self.nodes[row["name"]].mode = row["mode"]
            case "setxattr":
                self.nodes[row["name"]].note = row["value"]
            case "fsyncdir":
                pass

    def _rename(self, old: str, new: str) -> None:
        moved = {name: node for name, node in self.nodes.items() if name == old or name.startswith(old + "/")}
        for name in moved:
            del self.nodes[name]
        self.nodes |= {new + name[len(old) :]: node for name, node in moved.items()}

    def maybe(self, row: dict) -> list[Tree]:
        """The trees there may be when this operation was not acknowledged."""
        if row["op"] == "write":
            self.fds[row["fd"]].maybe_write(row["off"], content(row["seed"], row["len"]))
            return [self]
        if row["op"] in ("close", "fsync", "fsyncdir", "open"):
            return [self]
        other = copy.deepcopy(self)
        other.apply(row)
        return [self, other]


def replay(start: Tree, journal: Path) -> tuple[list[Tree], int]:
    """The trees that may be there, and how many operations were acknowledged."""
    trees, acknowledged = [start], 0
    begun: dict | None = None
    for line in [*journal.read_text().splitlines(), '{"n": 0, "errno": -1}']:
        row = json.loads(line)
        if "op" in row:
            begun = row
        elif begun is not None:
            if row["errno"] == 0:
                acknowledged += 1
                for tree in trees:
                    tree.apply(begun)
            else:
                trees = [another for tree in trees for another in tree.maybe(begun)]
            begun = None
    return trees, acknowledged


def load_tree(top: Path, *, cold: bool = False) -> Tree:
    """What is there now, as the beginning of a journal."""
    tree, by_ino = Tree(), {}
    for path in walk(top):
        name, st = str(path.relative_to(top)), path.lstat()
        if stat.S_ISDIR(st.st_mode):
            tree.nodes[name] = Node("d", mode=stat.S_IMODE(st.st_mode))
        elif stat.S_ISLNK(st.st_mode):
            tree.nodes[name] = Node("l", target=os.readlink(path))
        elif st.st_ino in by_ino:
            tree.nodes[name] = by_ino[st.st_ino]
        else:
            node = Node("f", bytearray(path.read_bytes()), stat.S_IMODE(st.st_mode), note=note_of(path), cold=cold)
            tree.nodes[name] = by_ino[st.st_ino] = node
    return tree


def walk(top: Path) -> Iterable[Path]:
    for folder, dirs, files in os.walk(top):
        for name in sorted(dirs + files):
            yield Path(folder, name)


def note_of(path: Path) -> str:
    try:
        return os.getxattr(path, DURABLE).decode()
    except OSError:
        return ""


def differences(tree: Tree, top: Path) -> list[str]:
    """What is not as this tree has it; nothing is changed."""
    there = {str(path.relative_to(top)): path for path in walk(top)}
    out = [f"{name}: missing" for name in sorted(tree.nodes.keys() - there.keys())]
    out += [f"{name}: should not be there" for name in sorted(there.keys() - tree.nodes.keys())]
    inos: dict[int, Node] = {}
    for name in sorted(tree.nodes.keys() & there.keys()):
        node, path = tree.nodes[name], there[name]
        st = path.lstat()
        kind = "d" if stat.S_ISDIR(st.st_mode) else "l" if stat.S_ISLNK(st.st_mode) else "f"
        if kind != node.kind:
            out.append(f"{name}: is {kind}, was {node.kind}")
            continue
        if kind == "l" and os.readlink(path) != node.target:
            out.append(f"{name}: points to {os.readlink(path)}, was {node.target}")
        if kind != "f":
            continue
        if stat.S_IMODE(st.st_mode) != node.mode:
            out.append(f"{name}: mode {stat.S_IMODE(st.st_mode):o}, was {node.mode:o}")
        if note_of(path) != node.note:
            out.append(f"{name}: xattr {note_of(path)!r}, was {node.note!r}")
        if inos.setdefault(st.st_ino, node) is not node:
            out.append(f"{name}: one inode with another file")
        links = sum(other is node for other in tree.nodes.values())
        if st.st_nlink != links:
            out.append(f"{name}: nlink {st.st_nlink}, was {links}")
        got = path.read_bytes()
        if st.st_size != len(got):
            out.append(f"{name}: stat says {st.st_size} bytes, read gave {len(got)}")
        if not node.accepts(got):
            out.append(f"{name}: {describe(got, node)}")
    return out


def describe(got: bytes, node: Node) -> str:
    want = bytes(node.data)
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    zeros = " (zeros)" if not any(got[at : at + 64]) else ""
    sizes = sorted({len(one) for one in node.layers})
    return (
        f"{len(got)} bytes, expected {len(want)}{' or ' + str(sizes) if sizes else ''}; differs from byte {at}{zeros}"
    )


def check(trees: list[Tree], top: Path) -> None:
    """AssertionError unless one of the trees is what is there."""
    found = [differences(tree, top) for tree in trees]
    if all(found):
        best = min(found, key=len)
        raise AssertionError(
            f"{top}: {len(best)} difference(s) from what was acknowledged:\n  " + "\n  ".join(best[:20])
        )
