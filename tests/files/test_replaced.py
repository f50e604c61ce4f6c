"""Names that the channel replaced or exchanged: what lost its name stays whole until the kernel forgets it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.files import Files
from aof2.engine.files.kind import FilesKind
from aof2.engine.intents.format import BY_CHANNEL, IntentKind, pack
from aof2.engine.kinds.kind import Asked, Caller
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, content, make, run_files, top
from tests.files.test_births import names
from tests.files.test_unlinks import run_unlinks

REPLACED, EXCHANGED = IntentKind.REPLACED, IntentKind.EXCHANGED
ROOT = Caller(0, 0)
TIME_NS = 2 * 10**18


def record(
    files: Files,
    kind: IntentKind,
    old: bytes,
    new: bytes,
    ino: int,
    other: int,
    *,
    mode: int = stat.S_IFREG,
    flags: int = 0,
) -> bytes:
    """As the channel writes it, of names in the top directory."""
    above = top(files.volume)
    return pack(
        kind, ino, parent=above, fh=above, name=old + b"\0" + new, other=other, mode=mode, flags=flags, time_ns=TIME_NS
    )


def answered(files: Files, kind: FilesKind, data: bytes) -> None:
    stream_id = stream_of(top(files.volume))
    next(one for one in kind.intents.logs if one.stream_id == stream_id).append(data)


def row(files: Files, ino: int) -> InodeRow | None:
    with files.volume.catalog.view() as view:
        return view.get(stream_of(ino), t.INODES, ino)


def is_nameless(files: Files, ino: int) -> bool:
    with files.volume.catalog.view() as view:
        return view.get(stream_of(ino), t.NAMELESS, ino) is not None


async def is_here(files: Files, ino: int) -> bool:
    await files.volume.evictor.doomed.delete_all()
    return files.volume.hot.path("default", ino, 1).exists()


def test_it_stays_until_the_kernel_forgets_it(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        used = files.volume.quota.usage.used_bytes
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b))
        assert not kind.is_folded(b, Asked.ANY)
        await kind.fold()
        assert names(files) == [b"b"] and is_nameless(files, b)
        assert await content(files, b) == b"b" * 5000  # its name was looked up before
        await kind.forget(b)
        assert row(files, b) is None and not await is_here(files, b) and await is_here(files, a)
        assert files.volume.quota.usage.used_bytes == used // 2

    run_unlinks(tmp_path, body)


def test_what_the_kernel_forgot_before_goes_with_the_fold(tmp_path: Path) -> None:
    """As in a burst of renames: the kernel drops an inode without a name at once."""

    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b))
        await kind.forget(b)
        await kind.fold()
        assert names(files) == [b"b"] and row(files, b) is None
        assert not await is_here(files, b) and await is_here(files, a)

    run_unlinks(tmp_path, body)


def test_what_was_forgotten_and_looked_up_again_stays(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b, c, d = [await make(files, name, name * 5000) for name in (b"a", b"b", b"c", b"d")]
        answered(files, kind, record(files, REPLACED, b"c", b"d", c, d))
        await kind.forget(b)  # for want of memory
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b))
        await kind.fold()
        assert names(files) == [b"b", b"d"] and is_nameless(files, b) and is_nameless(files, d)
        await kind.forget(b)
        assert row(files, b) is None

    run_unlinks(tmp_path, body)


def test_it_is_open(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        fh = await kind.open(b, os.O_RDWR, ROOT)
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b))
        await kind.forget(b)  # the close comes behind it
        await kind.fold()
        assert is_nameless(files, b) and await is_here(files, b)
        await files.release(fh)
        assert row(files, b) is None and not await is_here(files, b)

    run_unlinks(tmp_path, body)


def test_another_name_of_it_is_left(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        await kind.link(b, top(files.volume), b"c")
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b, flags=1))
        await kind.fold()
        left = row(files, b)
        assert left is not None and (left.nlink, left.last_name) == (1, b"c")
        await kind.forget(b)
        assert names(files) == [b"b", b"c"] and await is_here(files, b)

    run_unlinks(tmp_path, body)


def test_directories(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        above = top(files.volume)
        one, other = [await kind.mkdir(above, name, 0o755, ROOT) for name in (b"one", b"other")]
        data = record(files, REPLACED, b"one", b"other", one.ino, other.ino, mode=stat.S_IFDIR)
        answered(files, kind, data)
        await kind.fold()
        found = row(files, above)
        assert names(files) == [b"other"] and row(files, other.ino) is None
        assert found is not None and (found.nlink, found.mtime_ns) == (3, TIME_NS)
        assert kind.row(other.ino).nlink == 0  # the kernel may ask
        await kind.forget(other.ino)

    run_unlinks(tmp_path, body)


def test_exchanged(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        answered(files, kind, record(files, EXCHANGED, b"a", b"b", a, b, flags=stat.S_IFREG))
        await kind.fold()
        assert [kind.find(top(files.volume), name).ino for name in (b"a", b"b")] == [b, a]  # type: ignore[union-attr]
        rows = [row(files, ino) for ino in (a, b)]
        assert [one.last_name for one in rows if one is not None] == [b"b", b"a"]

    run_unlinks(tmp_path, body)


def test_a_name_that_means_another_by_now_is_left(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        a, b = [await make(files, name, name * 5000) for name in (b"a", b"b")]
        for kind_of_move in (REPLACED, EXCHANGED):
            answered(files, kind, record(files, kind_of_move, b"a", b"b", a, b + 7))
            answered(files, kind, record(files, kind_of_move, b"a", b"b", a + 7, b))
        await kind.fold()
        assert names(files) == [b"a", b"b"]

    run_unlinks(tmp_path, body)


def test_xattrs_go_with_their_file(tmp_path: Path) -> None:
    """Also those that were set right before it went."""

    async def body(files: Files, kind: FilesKind) -> None:
        a, b, c = [await make(files, name, name * 5000) for name in (b"a", b"b", b"c")]
        for ino in (a, b, c):
            answered(files, kind, pack(IntentKind.XATTR_SET, ino, name=b"user.x\0\0value", time_ns=TIME_NS))
        answered(files, kind, pack(IntentKind.XATTR_REMOVED, c, name=b"user.x", time_ns=TIME_NS))
        answered(files, kind, pack(IntentKind.XATTR_SET, c, name=b"user.y\0", time_ns=TIME_NS))
        answered(files, kind, record(files, REPLACED, b"c", b"b", c, b))
        await kind.forget(b)
        unlinked = pack(IntentKind.UNLINKED, a, parent=top(files.volume), name=b"a", time_ns=TIME_NS, flags=BY_CHANNEL)
        answered(files, kind, unlinked)
        await kind.fold()
        with files.volume.catalog.view() as view:
            assert list(view.scan(stream_of(a), t.XATTRS)) == [((c, b"user.y"), b"")]
        found = row(files, c)
        assert found is not None and found.ctime_ns == TIME_NS and names(files) == [b"b"]

    run_unlinks(tmp_path, body)


def test_after_a_crash_nothing_is_open(tmp_path: Path) -> None:
    inos: list[int] = []

    async def body(files: Files, kind: FilesKind) -> None:
        inos[:] = [await make(files, name, name * 5000) for name in (b"a", b"b", b"c", b"d")]
        a, b, c, d = inos
        answered(files, kind, record(files, REPLACED, b"a", b"b", a, b))
        await kind.fold()  # it is kept, nameless
        answered(files, kind, record(files, REPLACED, b"c", b"d", c, d))
        answered(files, kind, record(files, EXCHANGED, b"b", b"d", a, c, flags=stat.S_IFREG))

    run_unlinks(tmp_path, body, ends=False)

    async def after(files: Files, _: FakeKernel) -> None:
        a, b, c, d = inos
        with files.volume.catalog.view() as view:
            found = {name: e.ino for name, e in namespace.list_dir(view, stream_of(a), top(files.volume), None, 9)}
        assert found == {b"b": c, b"d": a}
        assert row(files, b) is None and row(files, d) is None

    run_files(small_settings(tmp_path), after)
