"""Whether names, link counts and inodes agree: a count that is too low loses a file with one of its names.

An inode's row says one of its names. A file with one name has no LINKS rows; one with more has a row for each of them.
A directory counts itself, its name and its subdirectories. Without a name there is a NAMELESS row while a process has
it open (after a crash: had), or a tombstone.

Invariants: each row is looked up in the others, nothing is gathered, so a million files take no memory.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from itertools import groupby

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, ObjectState
from aof2.engine.verify.context import OneStream
from aof2.engine.verify.findings import Finding, Kind, Severity

_Problem = tuple[Severity, int, str]


def check_names(s: OneStream) -> Iterator[Finding]:
    """Every name, link and inode of one tenant against each other; every file's inode has its content."""
    for check in (_entries, _inodes, _links, _nameless):
        for severity, ino, problem in check(s):
            yield s.say(Kind.OBJECT, severity, f"{s.tenant}: {problem}", object=str(ino))
    for ino, row in s.scan(t.INODES):
        if stat.S_ISREG(row.mode) and row.generation and s.get(t.OBJECTS, (ino, row.generation)) is None:
            message = f"{s.tenant}: inode {ino} has content {row.generation}, which is missing"
            yield s.say(Kind.OBJECT, Severity.ERROR, message, object=f"{ino}.{row.generation}")


def _entries(s: OneStream) -> Iterator[_Problem]:
    for (parent, name), entry in s.scan(t.DENTRIES):
        row = s.get(t.INODES, entry.ino)
        shown = f"name {_shown(name)} in inode {parent}"
        if row is None:
            yield Severity.ERROR, entry.ino, f"{shown} names inode {entry.ino}, which is missing"
            continue
        if s.get(t.INODES, parent) is None:
            yield Severity.ERROR, entry.ino, f"{shown} is in directory {parent}, which is missing"
        if stat.S_IFMT(entry.mode) != stat.S_IFMT(row.mode):
            yield Severity.ERROR, row.ino, f"{shown} says another type than inode {row.ino} has"
        if not row.nlink:
            yield Severity.ERROR, row.ino, f"{shown} names inode {row.ino}, whose link count is 0"
        elif _has_links(row):
            if s.get(t.LINKS, (row.ino, parent, name)) is None:
                yield Severity.ERROR, row.ino, f"{shown} is no link of inode {row.ino}, which has {row.nlink}"
        elif row.last_name and (row.parent, row.last_name) != (parent, name):
            yield Severity.ERROR, row.ino, f"{shown} is one name too many of inode {row.ino}"


def _inodes(s: OneStream) -> Iterator[_Problem]:
    for ino, row in s.scan(t.INODES):
        if not row.nlink:
            if not _is_kept(s, row):
                yield Severity.WARNING, ino, f"inode {ino} has no name, and nothing that keeps it"
            continue
        if row.last_name:
            entry = s.get(t.DENTRIES, (row.parent, row.last_name))
            if entry is None or entry.ino != ino:
                yield Severity.ERROR, ino, f"inode {ino} is not where it says, {_shown(row.last_name)} in {row.parent}"
        right = _link_count(s, row)
        if right != row.nlink:
            yield Severity.ERROR, ino, f"inode {ino} has a link count of {row.nlink}, {right} is right"


def _link_count(s: OneStream, row: InodeRow) -> int:
    """As the other rows have it. A single name was looked at already."""
    prefix = row.ino.to_bytes(8, "big")
    if stat.S_ISDIR(row.mode):
        return 2 + sum(stat.S_ISDIR(entry.mode) for _, entry in s.scan(t.DENTRIES, prefix=prefix))
    return sum(1 for _ in s.scan(t.LINKS, prefix=prefix)) if _has_links(row) else row.nlink


def _links(s: OneStream) -> Iterator[_Problem]:
    for ino, rows in groupby((key for key, _ in s.scan(t.LINKS)), key=lambda key: key[0]):
        row = s.get(t.INODES, ino)
        if row is None or not _has_links(row):
            yield Severity.WARNING, ino, f"inode {ino} has rows of further names, and " + _nlink(row)
        for _, parent, name in rows:
            entry = s.get(t.DENTRIES, (parent, name))
            if row is not None and (entry is None or entry.ino != ino):
                yield Severity.ERROR, ino, f"inode {ino} is said to be {_shown(name)} in inode {parent}, and is not"


def _nameless(s: OneStream) -> Iterator[_Problem]:
    for ino, _ in s.scan(t.NAMELESS):
        row = s.get(t.INODES, ino)
        if row is None:
            yield Severity.WARNING, ino, f"inode {ino} is said to be open without a name, and is missing"
        elif row.nlink:  # the next start would drop it
            yield Severity.ERROR, ino, f"inode {ino} is said to be without a name, and " + _nlink(row)


def _has_links(row: InodeRow) -> bool:
    return row.nlink > 1 and not stat.S_ISDIR(row.mode)


def _is_kept(s: OneStream, row: InodeRow) -> bool:
    if s.get(t.NAMELESS, row.ino) is not None:
        return True
    content = s.get(t.OBJECTS, (row.ino, row.generation))
    return content is not None and content.state == ObjectState.TOMBSTONED


def _nlink(row: InodeRow | None) -> str:
    return "is missing" if row is None else f"has a link count of {row.nlink}"


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))
