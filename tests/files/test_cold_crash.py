"""A cold file that was cut, filled or written, and a crash before it was sealed: no old byte comes back."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, extents, stream_of
from tests.engine.helpers import KIB, read_object, small_settings
from tests.files.helpers import FakeKernel, content, make, publish, row_of, run_files, scribble
from tests.files.test_table import data_of

BLOCK = 16 * KIB


async def cut_all(files: Files, ino: int, fh: int, expected: bytearray) -> None:
    await files.truncate(ino, 0)
    expected.clear()


async def cut_and_extend(files: Files, ino: int, fh: int, expected: bytearray) -> None:
    await files.truncate(ino, BLOCK + 5)
    await files.truncate(ino, 200 * KIB)
    expected[:] = expected[: BLOCK + 5].ljust(200 * KIB, b"\0")


async def cut_and_write(files: Files, ino: int, fh: int, expected: bytearray) -> None:
    await files.truncate(ino, 10)
    await files.handle(fh).write(3 * BLOCK, b"behind a hole")
    expected[:] = expected[:10].ljust(3 * BLOCK, b"\0") + b"behind a hole"


async def fill_and_scribble(files: Files, ino: int, fh: int, expected: bytearray) -> None:
    file = files.known.get(ino)
    assert file is not None
    await files.content.fill(file)
    scribble(files, ino, b"past everybody", 2 * BLOCK)
    expected[2 * BLOCK : 2 * BLOCK + 14] = b"past everybody"


@pytest.mark.parametrize(("synced", "holes"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("change", [cut_all, cut_and_extend, cut_and_write, fill_and_scribble])
def test_a_cold_file_that_was_changed_survives_a_crash(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    synced: bool,
    holes: bool,
    change: Callable[[Files, int, int, bytearray], Awaitable[None]],
) -> None:
    """Where the filesystem cannot tell what was written by its holes, only fsync can."""
    if not holes:
        monkeypatch.setattr(extents, "can_punch", lambda folder, block_bytes: False)
    settings = small_settings(tmp_path)
    expected = bytearray(data_of(300 * KIB))
    inos: list[int] = []

    async def first(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", bytes(expected))
        inos.append(ino)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        fh = await files.open(ino, os.O_RDWR)
        await change(files, ino, fh, expected)
        if synced:
            await files.durability.fsync(ino)
        file = files.known.get(ino)
        assert file is not None
        file.close_fd()  # all that a dead process closes: nothing is sealed
        if file.base is not None:
            file.base.close_file()

    async def second(files: Files, kernel: FakeKernel) -> None:
        assert await content(files, inos[0]) == expected
        await publish(files)
        assert row_of(files, inos[0]).state == ObjectState.PUBLISHED
        assert await content(files, inos[0]) == expected

    run_files(settings, first)
    run_files(settings, second)


def test_many_ask_at_once_whether_holes_can_be_made(tmp_path: Path) -> None:
    """Recovery does, one thread a dirty file; a wrong no would fetch old bytes over new ones."""
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: extents.can_punch(tmp_path, BLOCK), range(200)))
    assert list(tmp_path.iterdir()) == []


class DiedError(Exception):
    """The process, as far as the test goes."""


@pytest.mark.parametrize("resident_blocks", [0, 3])
def test_a_crash_between_opening_and_cutting_leaves_the_old_bytes(tmp_path: Path, resident_blocks: int) -> None:
    """O_TRUNC of a file that is not here: the old file or an empty one, never zeros."""
    settings = small_settings(tmp_path)
    data = data_of(300 * KIB)
    inos: list[int] = []

    async def first(files: Files, kernel: FakeKernel) -> None:
        async def die(file: object, size: int) -> None:
            raise DiedError

        ino = await make(files, b"a", data)
        inos.append(ino)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        if resident_blocks:
            await read_object(files.volume, (stream_of(ino), ino, 1), 0, resident_blocks * BLOCK)
        files.sizes.truncate = die  # type: ignore[method-assign]
        with pytest.raises(DiedError):
            await files.open(ino, os.O_RDWR | os.O_TRUNC)
        file = files.known.get(ino)
        assert file is not None
        file.close_fd()
        if file.base is not None:
            file.base.close_file()

    async def second(files: Files, kernel: FakeKernel) -> None:
        assert await content(files, inos[0]) in (data, b"")
        await publish(files)
        assert await content(files, inos[0]) in (data, b"")

    run_files(settings, first)
    run_files(settings, second)
