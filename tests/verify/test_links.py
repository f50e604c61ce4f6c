"""Names, link counts, LINKS and NAMELESS rows that do not agree: each is found, and only that."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DentryRow
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Kind, Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import run_volume
from tests.verify.build import CHUNK, TENANT, commit, damage_of

TOP = namespace.root_ino(TENANT)


def build(b: Batch) -> None:
    """A directory with two others in it, files with one, two and three names, a symlink, a fifo."""
    above = namespace.mkdir(b, TOP, b"d")
    for name in (b"d1", b"d2"):
        namespace.mkdir(b, above.ino, name)
    for name, links in ((b"one", 0), (b"two", 1), (b"three", 2)):
        row = namespace.create(b, above.ino, name, chunk_bytes=CHUNK)
        b.delete(t.DIRTY, row.ino)  # no bytes: it is about names
        b.delete(t.OBJECTS, (row.ino, 1))
        b.put(t.INODES, row.ino, msgspec.structs.replace(row, generation=0))
        for i in range(links):
            namespace.link(b, row.ino, TOP if i else above.ino, name + b"%d" % i)
    namespace.symlink(b, TOP, b"s", target=b"nowhere")
    namespace.make_node(b, TOP, b"p", mode=stat.S_IFIFO | 0o600)


def inode(b: Batch, *path: bytes) -> Any:
    row = b.get(t.INODES, TOP)
    for name in path:
        assert row is not None
        entry = b.get(t.DENTRIES, (row.ino, name))
        assert entry is not None
        row = b.get(t.INODES, entry.ino)
    return row


def change(b: Batch, row: Any, **fields: object) -> None:
    b.put(t.INODES, row.ino, msgspec.structs.replace(row, **fields))


def test_what_operations_do_agrees(settings: Settings) -> None:
    commit(settings, build)

    with_d: list[Callable[[Batch, int], object]] = [
        lambda b, d: namespace.rename(b, d, b"two0", TOP, b"moved"),
        lambda b, d: namespace.rename(b, d, b"d2", TOP, b"d3"),
        lambda b, d: namespace.unlink(b, d, b"three"),
        lambda b, d: namespace.rename(b, TOP, b"s", d, b"one", exchange=True),
        lambda b, d: namespace.unlink(b, TOP, b"here"),  # published: a tombstone
        lambda b, d: namespace.unlink(b, d, b"two"),
        lambda b, d: namespace.unlink(b, TOP, b"moved", is_open=lambda _: True),  # as a crash leaves it
    ]

    async def one_by_one(v: Volume) -> None:
        for work in with_d:
            await result_of(v.writer.submit(TENANT, lambda b, work=work: work(b, inode(b, b"d").ino)))

    run_volume(settings, one_by_one, parts=())
    assert damage_of(verify(settings)) == []


def dentry_too_many(b: Batch) -> None:
    b.put(t.DENTRIES, (TOP, b"again"), DentryRow(inode(b, b"d", b"one").ino, stat.S_IFREG))


def dentry_lost(b: Batch) -> None:
    b.delete(t.DENTRIES, (inode(b, b"d").ino, b"one"))


def dentry_of_another_type(b: Batch) -> None:
    b.put(t.DENTRIES, (inode(b, b"d").ino, b"one"), DentryRow(inode(b, b"d", b"one").ino, stat.S_IFIFO))


def nlink_too_low(b: Batch) -> None:
    change(b, inode(b, b"d", b"three"), nlink=2)


def nlink_too_high(b: Batch) -> None:
    change(b, inode(b, b"d", b"three"), nlink=4)


def nlink_of_nothing(b: Batch) -> None:
    change(b, inode(b, b"p"), nlink=0)


def nlink_of_a_directory(b: Batch) -> None:
    change(b, inode(b, b"d"), nlink=3)


def link_missing(b: Batch) -> None:
    d = inode(b, b"d").ino
    b.delete(t.LINKS, (inode(b, b"d", b"two").ino, d, b"two0"))


def link_of_no_name(b: Batch) -> None:
    b.put(t.LINKS, (inode(b, b"d", b"two").ino, TOP, b"nowhere"), 1)


def link_of_a_single_name(b: Batch) -> None:
    d = inode(b, b"d").ino
    b.put(t.LINKS, (inode(b, b"d", b"one").ino, d, b"one"), 1)


def link_of_no_inode(b: Batch) -> None:
    b.put(t.LINKS, (TOP + 9999, TOP, b"x"), 1)


def orphan_with_a_name(b: Batch) -> None:
    b.put(t.NAMELESS, inode(b, b"d", b"one").ino, 1)


def orphan_that_is_missing(b: Batch) -> None:
    b.put(t.NAMELESS, TOP + 9999, 1)


def nothing_keeps_it(b: Batch) -> None:
    namespace.unlink(b, TOP, b"p", is_open=lambda _: True)
    row = max(ino for ino, _ in b.scan(t.INODES))
    b.delete(t.NAMELESS, row)


CASES: list[tuple[Callable[[Batch], None], Severity, list[str]]] = [
    (dentry_too_many, Severity.ERROR, ["'again' in inode .* is one name too many of inode"]),
    (dentry_lost, Severity.ERROR, ["is not where it says, 'one'"]),
    (dentry_of_another_type, Severity.ERROR, ["'one' in inode .* says another type"]),
    (nlink_too_low, Severity.ERROR, ["link count of 2, 3 is right"]),
    (nlink_too_high, Severity.ERROR, ["link count of 4, 3 is right"]),
    (
        nlink_of_nothing,
        Severity.ERROR,
        ["'p' in inode .* whose link count is 0", "has no name, and nothing that keeps"],
    ),
    (nlink_of_a_directory, Severity.ERROR, ["link count of 3, 4 is right"]),
    (link_missing, Severity.ERROR, ["'two0' in inode .* is no link of inode", "link count of 2, 1 is right"]),
    (link_of_no_name, Severity.ERROR, ["link count of 2, 3 is right", "said to be 'nowhere' in inode"]),
    (link_of_a_single_name, Severity.WARNING, ["rows of further names, and has a link count of 1"]),
    (link_of_no_inode, Severity.WARNING, ["rows of further names, and is missing"]),
    (orphan_with_a_name, Severity.ERROR, ["without a name, and has a link count of 1"]),
    (orphan_that_is_missing, Severity.WARNING, ["open without a name, and is missing"]),
    (nothing_keeps_it, Severity.WARNING, ["has no name, and nothing that keeps it"]),
]


@pytest.mark.parametrize(("harm", "severity", "messages"), CASES, ids=[harm.__name__ for harm, _, _ in CASES])
def test_what_does_not_agree_is_found(
    settings: Settings, harm: Callable[[Batch], None], severity: Severity, messages: list[str]
) -> None:
    commit(settings, build)
    commit(settings, harm)
    report = verify(settings)
    found = damage_of(report)
    assert report.exit_code == 4
    assert len(found) == len(messages), [f.message for f in found]
    assert {f.kind for f in found} == {Kind.OBJECT}
    assert found[0].severity == severity
    for one, expected in zip(found, messages, strict=True):
        assert re.search(expected, one.message)
