"""When the kernel may keep its pages of a file that is opened again: only what it read of the very same clean bytes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, Mode, stream_of
from aof2.engine.files import kept as k
from aof2.engine.files.atchannel import AtChannel
from aof2.engine.files.state import OpenFile, State
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, make, publish, row_of, run_files, scribble

DATA = bytes(range(256)) * 1024
Event = Callable[[Files, FakeKernel, int], Awaitable[None]]


async def keeps(files: Files, ino: int) -> bool:
    """What an open to read is answered; closed again."""
    fh = await files.open(ino, os.O_RDONLY)
    kept = files.handle(fh).keeps_pages
    await files.release(fh)
    return kept


async def kept_file(files: Files, name: bytes = b"a", *, published: bool = True) -> int:
    """A clean file of which the kernel keeps its pages."""
    ino = await make(files, name, DATA)
    await (publish(files) if published else files.sealer.seal_now())
    assert [await keeps(files, ino) for _ in range(3)] == [False, True, True]
    return ino


def ranged(tmp_path: Path, body: Callable[[Files, FakeKernel], Awaitable[None]]) -> None:
    run_files(small_settings(tmp_path), body, passthrough=False)


async def _write_open(files: Files, kernel: FakeKernel, ino: int) -> None:
    await files.release(await files.open(ino, os.O_RDWR))


async def _rewrite(files: Files, kernel: FakeKernel, ino: int) -> None:
    fh = await files.open(ino, os.O_RDWR | os.O_TRUNC)
    await files.handle(fh).write(0, DATA[::-1])
    await files.release(fh)


async def _cut(files: Files, kernel: FakeKernel, ino: int) -> None:
    await files.truncate(ino, 0)
    await files.truncate(ino, len(DATA))


async def _passed_through(files: Files, kernel: FakeKernel, ino: int) -> None:
    files.modes.passthrough = True
    assert not await keeps(files, ino)
    files.modes.passthrough = False


async def _written_through(files: Files, kernel: FakeKernel, ino: int) -> None:
    files.modes.passthrough = True
    fh = await files.open(ino, os.O_RDWR)
    assert kernel.modes[ino] == Mode.PASSTHROUGH
    scribble(files, ino, b"new")
    await files.release(fh)
    files.modes.passthrough = False


async def _asked_to_evict(files: Files, kernel: FakeKernel, ino: int) -> None:
    await files.volume.evict([(stream_of(ino), ino, 1)])
    await files.drop_kernel_pages(ino)


async def _bad_block(files: Files, kernel: FakeKernel, ino: int) -> None:
    """As the scrub does it."""
    volume = files.volume
    async with volume.opened_object((stream_of(ino), ino, row_of(files, ino).generation)) as handle:
        await volume.hydrator.attach(handle)
        await volume.hydrator.give_up(handle, [3])


async def _forgotten(files: Files, kernel: FakeKernel, ino: int) -> None:
    files.kept.forget(ino)


ALWAYS = [_write_open, _rewrite, _cut, _passed_through, _written_through, _forgotten]
DURABLE = [_asked_to_evict, _bad_block]  # only what is in the remote is given up


@pytest.mark.parametrize(("event", "published"), [(e, True) for e in ALWAYS + DURABLE] + [(e, False) for e in ALWAYS])
def test_not_kept_after(tmp_path: Path, event: Event, published: bool) -> None:
    """Sealed but not published, a file is written on under the same generation."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files, published=published)
        await event(files, kernel, ino)
        assert not await keeps(files, ino), "at once"
        await files.sealer.seal_now()
        await keeps(files, ino)
        assert [await keeps(files, ino) for _ in range(2)] == [True, True]

    ranged(tmp_path, body)


@pytest.mark.parametrize("event", ALWAYS + DURABLE)
def test_not_kept_after_it_is_sealed_again(tmp_path: Path, event: Event) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files, published=event in DURABLE)
        await event(files, kernel, ino)
        await files.sealer.seal_now()
        assert row_of(files, ino).state != ObjectState.DIRTY
        assert not await keeps(files, ino)

    ranged(tmp_path, body)


def test_evicted_for_room_is_kept(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        assert await keeps(files, ino)

    ranged(tmp_path, body)


def test_a_dirty_file_is_never_kept(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files)
        writer = await files.open(ino, os.O_RDWR)
        assert [await keeps(files, ino) for _ in range(3)] == [False] * 3
        reader = await files.open(ino, os.O_RDONLY)
        await files.release(writer)
        assert [await keeps(files, ino) for _ in range(3)] == [False] * 3
        await files.release(reader)
        await files.sealer.seal_now()
        assert [await keeps(files, ino) for _ in range(2)] == [False, True]

    ranged(tmp_path, body)


def test_an_open_that_drops_pages_must_be_over_before_another_keeps_them(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await publish(files)
        first = await files.open(ino, os.O_RDONLY)
        second = await files.open(ino, os.O_RDONLY)
        assert (files.handle(first).keeps_pages, files.handle(second).keeps_pages) == (False, False)
        await files.release(second)
        assert await keeps(files, ino)
        await files.release(first)
        assert await keeps(files, ino)

    ranged(tmp_path, body)


def test_who_read_before_it_was_evicted_proves_nothing(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files)
        before = await files.open(ino, os.O_RDONLY)
        await files.drop_kernel_pages(ino)
        after = await files.open(ino, os.O_RDONLY)
        assert not files.handle(after).keeps_pages
        await files.release(before)
        assert not await keeps(files, ino)
        await files.release(after)
        assert await keeps(files, ino)

    ranged(tmp_path, body)


def test_nothing_is_kept_while_somebody_has_a_file_open_that_had_a_bad_block(tmp_path: Path) -> None:
    """The channel may have given the bad bytes to anybody, and may still."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await kept_file(files)
        before = await files.open(ino, os.O_RDONLY)
        await _bad_block(files, kernel, ino)
        assert [await keeps(files, ino) for _ in range(3)] == [False] * 3
        await files.release(before)
        assert [await keeps(files, ino) for _ in range(2)] == [False, True]

    ranged(tmp_path, body)


def test_passthrough_is_never_kept(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await publish(files)
        assert [await keeps(files, ino) for _ in range(3)] == [False] * 3

    run_files(small_settings(tmp_path), body)


def test_no_more_than_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "RECORDS_MAX", 3)
    pages = k.KeptPages()
    files = [OpenFile((1, ino, 1), "default", tmp_path, State.CLEAN) for ino in range(5)]
    for fh, file in enumerate(files, 1):
        file.channel = AtChannel(Mode.RANGED)
        assert not pages.opened(file, fh)
        pages.released(file.ino, fh)
    assert len(pages) == 3
    assert pages.opened(files[4], 9) and not pages.opened(files[0], 10)
