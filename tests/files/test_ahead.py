"""Which names are told ahead, and the answers about names that do not go through pyfuse3."""

from __future__ import annotations

import os
import random
import stat
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.files import Files, stream_of
from aof2.engine.files.kind import FilesKind
from aof2.fs import attrs
from aof2.fs.ahead import COUNT_MAX, Ahead, _Walk
from aof2.fs.options import Options
from aof2.fs.tree import Tree
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, kinds_of, make, run_files, top

ENTRY = struct.Struct("=QQQQII3Q3q10I")
ATTR = struct.Struct("=QII3Q3q10I")
u32, u63, ns = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(-(2**62), 2**62)
kinds = st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR])
rows = st.builds(
    InodeRow, u63, st.builds(lambda kind, mode: kind | mode, kinds, st.integers(0, 0o7777)), u32, u32,
    st.integers(0, 2**50), u32, ns, ns, ns, u32,
)  # fmt: skip
options = st.builds(
    Options, uid=st.none() | u32, gid=st.none() | u32, umask=st.none() | st.integers(0, 0o777)
)  # fmt: skip


def fields(attr: pyfuse3.EntryAttributes) -> list[int]:
    times = [attr.st_atime_ns, attr.st_mtime_ns, attr.st_ctime_ns]
    return [
        attr.st_ino, attr.st_size, attr.st_blocks, *(t // 10**9 for t in times), *(t % 10**9 for t in times),
        attr.st_mode, attr.st_nlink, attr.st_uid, attr.st_gid, attr.st_rdev, attr.st_blksize, 0,
    ]  # fmt: skip


@given(rows, options, st.booleans(), st.booleans())
def test_packed_attributes_are_those_of_pyfuse3(row: InodeRow, told: Options, dirty: bool, changing: bool) -> None:
    backing = os.stat(__file__) if dirty and stat.S_ISREG(row.mode) else None
    expected = attrs.attributes(row, told, backing, changing=changing)
    entry = ENTRY.unpack(attrs.entry_out(row, told, backing, changing=changing))
    assert list(entry[:6]) == [row.ino, 0, expected.entry_timeout, expected.attr_timeout, 0, 0]
    assert list(entry[6:]) == fields(expected)
    attr = ATTR.unpack(attrs.attr_out(row, told, backing, changing=changing))
    assert list(attr) == [expected.attr_timeout, 0, 0, *fields(expected)]


def test_an_absent_name_may_be_remembered() -> None:
    assert ENTRY.unpack(attrs.ABSENT_OUT)[:4] == (0, 0, attrs.absent().entry_timeout, 0)


def run_ahead(tmp_path: Path, body: Any) -> None:
    async def main(files: Files, _: FakeKernel) -> None:
        await body(files, Tree(kinds_of(files), Options()))

    run_files(small_settings(tmp_path), main)


async def many(files: Files, count: int) -> list[bytes]:
    """Files that are closed and clean; with a directory among them."""
    parent, names = top(files.volume), [b"f%05d" % i for i in range(count)]

    def work(b: Any) -> None:
        for i, name in enumerate(names):
            one = namespace.mkdir if i == 20 else partial(namespace.create, chunk_bytes=1 << 20)
            one(b, parent=parent, name=name, mode=0o644, uid=0, gid=0)

    await result_of(files.volume.writer.submit(stream_of(parent), work))
    return names


def told(packed: bytes) -> list[bytes]:
    names, at = [], 0
    while at < len(packed):
        end = at + ENTRY.size + 1 + packed[at + ENTRY.size]
        names.append(packed[at + ENTRY.size + 1 : end])
        at = end
    return names


def walk(ahead: Ahead, parent: int, names: list[bytes]) -> tuple[int, int]:
    """Looks names up as the kernel does; how many were asked for here, and how many were told."""
    known: set[bytes] = set()
    asked = told_count = 0
    for name in names:
        if name not in known:
            asked += 1
            new = told(ahead.after(parent, name + b"\0"))
            known.update(new)
            told_count += len(new)
    return asked, told_count


def test_a_walk_in_order_asks_for_few(tmp_path: Path) -> None:
    async def body(files: Files, tree: Tree) -> None:
        names, ahead = await many(files, 2000), Ahead(tree)
        for _ in range(3):
            asked, told_count = walk(ahead, top(files.volume), names)
            assert asked < 30
            assert told_count <= len(names)

    run_ahead(tmp_path, body)


def test_what_is_told_is_what_a_look_up_answers(tmp_path: Path) -> None:
    async def body(files: Files, tree: Tree) -> None:
        names, ahead, parent = await many(files, 600), Ahead(tree), top(files.volume)
        for name in names:
            packed = ahead.after(parent, name + b"\0")
            assert len(told(packed)) <= COUNT_MAX
            for i, ahead_name in enumerate(told(packed)):
                row = tree.find(parent, ahead_name)
                assert row is not None
                at = i * (ENTRY.size + 1 + len(ahead_name))
                assert packed[at : at + ENTRY.size] == tree.entry_out(row)

    run_ahead(tmp_path, body)


def test_another_order_is_left_alone(tmp_path: Path) -> None:
    async def body(files: Files, tree: Tree) -> None:
        names, ahead = await many(files, 2000), Ahead(tree)
        shuffled = random.Random(5).sample(names, len(names))
        asked, told_count = walk(ahead, top(files.volume), shuffled)
        assert asked > 1900 and told_count < 300
        asked, told_count = walk(ahead, top(files.volume), names[::100] * 20)
        assert told_count < 300

    run_ahead(tmp_path, body)


def test_directories_and_what_is_open_dirty_or_unlinked_are_not_told(tmp_path: Path) -> None:
    async def body(files: Files, tree: Tree) -> None:
        names, parent = await many(files, 40), top(files.volume)
        kind = tree.kinds.of(parent)
        assert isinstance(kind, FilesKind)
        await kind.intents.start(files.volume.writable_tenants())
        opened = await make(files, b"f00006+open", b"x")
        await files.sealer.seal_now()
        fh = await files.open(opened, os.O_RDONLY)
        await make(files, b"f00005+dirty", b"x")
        assert kind.unlinks.take(parent, names[7]) is not None
        ahead = Ahead(tree)
        found = [name for at in names for name in told(ahead.after(parent, at + b"\0"))]
        assert len(found) > 30 and not {names[7], names[20], b"f00005+dirty", b"f00006+open"} & set(found)
        await files.release(fh)
        assert set(told(Ahead(tree)._next(_Walk(b"f00006"), parent))) > {b"f00006+open"}
        kind.intents.close()

    run_ahead(tmp_path, body)
