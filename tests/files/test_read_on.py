"""A file is sealed after its last writer closed it, while processes go on reading it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, Mode, stream_of
from aof2.engine.files.state import State
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, content, on_disk, publish, read, row_of, run_files, top, write

DATA = bytes(range(256)) * 300
MODES = pytest.mark.parametrize("passthrough", [True, False], ids=["passthrough", "ranged"])


async def written_and_read(files: Files, kernel: FakeKernel, flags: int) -> tuple[int, int]:
    """Its inode, and a reader's handle: the writer closed it."""
    row, fh = await files.create(top(files.volume), b"a", flags, mode=0o644, uid=0, gid=0)
    await write(files, kernel, fh, 0, DATA)
    reader = await files.open(row.ino, os.O_RDONLY)
    await files.release(fh)
    return row.ino, reader


@MODES
def test_it_is_sealed_and_stays_readable(tmp_path: Path, passthrough: bool) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        files.modes.passthrough = passthrough
        ino, reader = await written_and_read(files, kernel, os.O_WRONLY)
        await publish(files)
        assert row_of(files, ino).state == ObjectState.PUBLISHED
        file = files.known.get(ino)
        assert file is not None and file.state is State.CLEAN and file.handles == 1
        assert await read(files, kernel, reader, 0, len(DATA)) == DATA
        assert (await files.volume.evict([file.key]))[0] == 0, "what is open stays"
        await files.release(reader)
        assert files.known.get(ino) is None
        assert files.volume.quota.usage.used_bytes == on_disk(files.volume)
        assert (await files.volume.evict([(stream_of(ino), ino, 1)]))[0] > 0
        assert await content(files, ino) == DATA

    run_files(small_settings(tmp_path), body)


@MODES
def test_written_on_while_it_is_read(tmp_path: Path, passthrough: bool) -> None:
    """Sealed, written to, sealed: the reader sees each, by the handle that it has."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        files.modes.passthrough = passthrough
        ino, reader = await written_and_read(files, kernel, os.O_WRONLY)
        for n in range(3):
            await publish(files)
            assert row_of(files, ino).state == ObjectState.PUBLISHED
            fh = await files.open(ino, os.O_WRONLY)
            await write(files, kernel, fh, n, b"%d" % n)
            assert row_of(files, ino).state == ObjectState.DIRTY
            await files.release(fh)
            assert (await read(files, kernel, reader, 0, 3))[: n + 1] == b"012"[: n + 1]
        await files.release(reader)
        await publish(files)
        assert row_of(files, ino).state == ObjectState.PUBLISHED
        assert files.volume.quota.usage.used_bytes == on_disk(files.volume)
        assert await content(files, ino) == b"012" + DATA[3:]

    run_files(small_settings(tmp_path), body)


def test_one_that_may_be_mapped_waits_for_its_last_close(tmp_path: Path) -> None:
    """A mapping outlives its descriptor; while the channel has the file, no lease tells."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, reader = await written_and_read(files, kernel, os.O_RDWR)
        await publish(files)
        assert row_of(files, ino).state == ObjectState.DIRTY
        await files.release(reader)
        await publish(files)
        assert row_of(files, ino).state == ObjectState.PUBLISHED
        fh = await files.open(ino, os.O_WRONLY)  # what was sealed under a lease has no mapping
        reader = await files.open(ino, os.O_RDONLY)
        await write(files, kernel, fh, 0, b"new")
        await files.release(fh)
        await publish(files)
        assert (row_of(files, ino).state, row_of(files, ino).generation) == (ObjectState.PUBLISHED, 2)
        await files.release(reader)

    run_files(small_settings(tmp_path), body)


def test_a_reader_that_comes_and_goes_hides_no_mapping(tmp_path: Path) -> None:
    """It has the file open in the moment of the hash alone: the lease is asked for all the same."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, reader = await written_and_read(files, kernel, os.O_RDWR)
        file = files.known.get(ino)
        assert file is not None and file.mappable
        mapped, fd = os.open(file.path, os.O_RDWR), os.open(file.path, os.O_RDONLY)  # as a mapping, refuses the lease
        try:
            assert files.sealer._hash(file, fd, file.seal_attempt, None) is None
        finally:
            os.close(mapped)
            os.close(fd)
        await files.release(reader)

    run_files(small_settings(tmp_path), body)


def test_removed_while_it_is_read(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, reader = await written_and_read(files, kernel, os.O_WRONLY)
        await publish(files)
        file = files.known.get(ino)
        assert file is not None and file.channel.mode is Mode.PASSTHROUGH
        fh = await files.open(ino, os.O_WRONLY)
        await files.release(fh)  # nothing was written
        files.removal.nameless(ino)
        await publish(files)
        assert await read(files, kernel, reader, 0, 10) == DATA[:10]
        await files.release(reader)
        assert files.known.get(ino) is None

    run_files(small_settings(tmp_path), body)
