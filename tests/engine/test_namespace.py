"""The tree in the catalog: names, renames, tombstones."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from aof2.engine import namespace as ns
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.catalog.helpers import volume as catalog
from tests.engine.helpers import (
    backing_path,
    create_object,
    object_row,
    put_object,
    read_object,
    undelete_object,
    unlink_object,
)

from .helpers import run_volume, small_settings

ROOT = ns.root_ino(1)


def made(b: Batch) -> None:
    ns.make_root(b)
    for name in (b"a", b"b"):
        ns.create(b, ROOT, name, chunk_bytes=1 << 20)
    ns.mkdir(b, ROOT, b"d")


def fails(code: int, v: object, work: object) -> None:
    with pytest.raises(OSError, match=r"\[Errno") as e:
        v.writer.call(1, work)  # type: ignore[attr-defined]
    assert e.value.errno == code


def test_errnos_are_posix(tmp_path: Path) -> None:
    with catalog(tmp_path) as v:
        v.writer.call(1, made)
        d = v.writer.call(1, lambda b: ns.lookup(b, ROOT, b"d")).ino
        v.writer.call(1, lambda b: ns.create(b, d, b"x", chunk_bytes=1))
        fails(errno.EEXIST, v, lambda b: ns.create(b, ROOT, b"a", chunk_bytes=1))
        fails(errno.ENOENT, v, lambda b: ns.unlink(b, ROOT, b"nope"))
        fails(errno.EISDIR, v, lambda b: ns.unlink(b, ROOT, b"d"))
        fails(errno.ENOTDIR, v, lambda b: ns.rmdir(b, ROOT, b"a"))
        fails(errno.ENOTEMPTY, v, lambda b: ns.rmdir(b, ROOT, b"d"))
        fails(errno.ENAMETOOLONG, v, lambda b: ns.create(b, ROOT, b"n" * 256, chunk_bytes=1))
        for bad in (b"", b".", b"..", b"a/b", b"a\0b"):
            fails(errno.EINVAL, v, lambda b, n=bad: ns.create(b, ROOT, n, chunk_bytes=1))
        fails(errno.EINVAL, v, lambda b: ns.rename(b, ROOT, b"d", d, b"inside"))
        fails(errno.EISDIR, v, lambda b: ns.rename(b, ROOT, b"a", ROOT, b"d"))
        fails(errno.ENOTDIR, v, lambda b: ns.rename(b, ROOT, b"d", ROOT, b"a"))
        fails(errno.EEXIST, v, lambda b: ns.rename(b, ROOT, b"a", ROOT, b"b", replace=False))


def test_renames_are_one_commit_and_keep_link_counts(tmp_path: Path) -> None:
    with catalog(tmp_path) as v:
        v.writer.call(1, made)
        v.writer.call(1, lambda b: ns.mkdir(b, ROOT, b"e"))
        d, e = (v.writer.call(1, lambda b, n=n: ns.lookup(b, ROOT, n)).ino for n in (b"d", b"e"))
        v.writer.call(1, lambda b: ns.rename(b, ROOT, b"d", e, b"moved"))
        v.writer.call(1, lambda b: ns.rename(b, ROOT, b"a", ROOT, b"b"))
        with v.catalog.view() as view:
            names = {key for key, _ in view.scan(1, t.DENTRIES)}
            links = {ino: row.nlink for ino, row in view.scan(1, t.INODES)}
        assert names == {(ROOT, b"e"), (ROOT, b"b"), (e, b"moved")}
        assert (links[ROOT], links[e], links[d]) == (3, 3, 2)


def test_unlink_leaves_a_tombstone_that_can_be_lifted(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"kept", b"precious" * 1000)
        await v.checkpoint("default")
        await unlink_object(v, "default", b"kept")
        assert object_row(v, key).state == ObjectState.TOMBSTONED
        with pytest.raises(OSError, match="No such file"):
            await unlink_object(v, "default", b"kept")
        await undelete_object(v, "default", key[1], b"back")
        await v.evict([key])
        assert await read_object(v, key, 0, 8) == b"precious"
        assert object_row(v, key).state == ObjectState.PUBLISHED

    run_volume(small_settings(tmp_path), body)


def test_unlinking_what_was_never_published_leaves_nothing(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"gone", b"x" * 5000)
        await unlink_object(v, "default", b"gone")
        assert not backing_path(v, key).exists()
        assert v.quota.usage.used_bytes == 0
        with v.catalog.view() as view:
            for table in (t.OBJECTS, t.CHUNKS, t.RESIDENCY, t.UNPUBLISHED):
                assert list(view.scan(key[0], table)) == []
            assert (view.get(key[0], t.COUNTERS, "hot_bytes") or 0) == 0

    run_volume(small_settings(tmp_path), body)


def test_orphans_are_no_damage_and_are_found_after_a_crash(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    keys: list[tuple[int, int, int]] = []

    async def leave(v: Volume) -> None:
        """One published, one sealed, one dirty; all open when their names went."""
        keys.append(await put_object(v, "default", b"published", b"p" * 5000))
        await v.checkpoint("default")
        keys.append(await put_object(v, "default", b"sealed", b"s" * 5000))
        keys.append(await create_object(v, "default", b"dirty"))
        backing_path(v, keys[2]).write_bytes(b"d" * 5000)
        for name in (b"published", b"sealed", b"dirty"):
            work = partial(ns.unlink, parent=ns.root_ino(keys[0][0]), name=name, is_open=lambda _: True)
            await result_of(v.writer.submit(keys[0][0], work))
        assert await v.janitor.sweep_orphans() == 0
        assert await read_object(v, keys[0], 0, 1) == b"p"

    async def drop(v: Volume) -> None:
        """Opening the volume dropped them: whoever had them open is gone with the process before."""
        await v.janitor.sweep_orphans()
        assert [backing_path(v, key).exists() for key in keys] == [True, False, False]
        with v.catalog.view() as view:
            assert [key[0] for key, _ in view.scan(keys[0][0], t.OBJECTS)] == [keys[0][1]]
            assert ns.nameless(view, keys[0][0]) == []
        assert object_row(v, keys[0]).state == ObjectState.TOMBSTONED

    run_volume(settings, leave, parts=("jobs",))
    assert verify(settings).exit_code == 0
    run_volume(settings, drop, parts=("jobs",))
    assert verify(settings).exit_code == 0
