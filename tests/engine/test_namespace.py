"""The tree in the catalog: names, renames, tombstones; random use against a plain model."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine import namespace as ns
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.volume import Volume
from tests.catalog.helpers import open_volume
from tests.catalog.helpers import volume as catalog

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


STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "mkdir", "unlink", "rmdir", "rename"]), st.integers(0, 3), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=40)
@given(STEPS)
def test_random_use_matches_a_plain_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("ns")
    v = open_volume(root)
    v.writer.call(1, ns.make_root)
    model: dict[bytes, str] = {}
    for kind, i, j in steps:
        a, b2 = b"n%d" % i, b"n%d" % j
        try:
            if kind == "create":
                v.writer.call(1, lambda b, n=a: ns.create(b, ROOT, n, chunk_bytes=1))
                assert a not in model
                model[a] = "file"
            elif kind == "mkdir":
                v.writer.call(1, lambda b, n=a: ns.mkdir(b, ROOT, n))
                assert a not in model
                model[a] = "dir"
            elif kind == "unlink":
                v.writer.call(1, lambda b, n=a: ns.unlink(b, ROOT, n))
                assert model.pop(a) == "file"
            elif kind == "rmdir":
                v.writer.call(1, lambda b, n=a: ns.rmdir(b, ROOT, n))
                assert model.pop(a) == "dir"
            else:
                v.writer.call(1, lambda b, n=a, m=b2: ns.rename(b, ROOT, n, ROOT, m))
                if a != b2:
                    assert b2 not in model or model[b2] == model[a]
                    model[b2] = model.pop(a)
        except OSError as e:
            assert e.errno in (errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL)
    with v.catalog.view() as view:
        names = {key[1] for key, _ in view.scan(1, t.DENTRIES)}
        inodes = {ino for ino, _ in view.scan(1, t.INODES)}
        root_links = view.get(1, t.INODES, ROOT)
    assert names == set(model)
    assert len(inodes) == len(model) + 1
    assert root_links is not None
    assert root_links.nlink == 2 + list(model.values()).count("dir")
    v.close()
    shutil.rmtree(root)


def test_unlink_leaves_a_tombstone_that_can_be_lifted(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await v.put("default", b"kept", b"precious" * 1000)
        await v.checkpoint("default")
        await v.unlink("default", b"kept")
        assert v.object_row(key).state == ObjectState.TOMBSTONED
        with pytest.raises(OSError, match="No such file"):
            await v.unlink("default", b"kept")
        await v.undelete("default", key[1], b"back")
        await v.evict([key])
        assert await v.read(key, 0, 8) == b"precious"
        assert v.object_row(key).state == ObjectState.PUBLISHED

    run_volume(small_settings(tmp_path), body)


def test_unlinking_what_was_never_published_leaves_nothing(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await v.put("default", b"gone", b"x" * 5000)
        await v.unlink("default", b"gone")
        assert not v.backing_path(key).exists()
        assert v.quota.usage.used_bytes == 0
        with v.catalog.view() as view:
            for table in (t.OBJECTS, t.CHUNKS, t.RESIDENCY, t.UNPUBLISHED):
                assert list(view.scan(key[0], table)) == []
            assert (view.get(key[0], t.COUNTERS, "hot_bytes") or 0) == 0

    run_volume(small_settings(tmp_path), body)
