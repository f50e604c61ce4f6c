"""Answers that are in the daemon's memory only and too long for the FUSE socket: right bytes, handed over another way.

Each test looks at the count of what was handed over, so that it fails when bytes go through the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mount import MountedVolume, mounted_volume

MIB = 1 << 20
KIB = 1 << 10
SIZE = 8 * MIB + 4097
SMALL_CACHE = {"hot_bytes": "64MiB", "page_cache_bytes": "16MiB"}
COUNTED = {"default": {"kind": "files", "write_mode": "budget"}}  # what is being written takes its room at once


def handed_over(volume: MountedVolume) -> int:
    return int(volume.ask("status")["mount"]["handed_over"])


def cold(volume: MountedVolume, name: str) -> tuple[Path, bytes]:
    """A file of which nothing is on this disk."""
    path, data = volume.path / name, os.urandom(SIZE)
    path.write_bytes(data)
    volume.done("wait", path)
    volume.evict(path)
    return path, data


def chunks(fd: int, size: int = MIB) -> bytes:
    """In reads of a megabyte, without read-ahead."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    parts = []
    while part := os.pread(fd, size, sum(map(len, parts))):
        parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def no_room(volume: MountedVolume) -> Iterator[None]:
    """The disk's limit is taken by what must stay: a pinned file, and one that is being written."""
    pinned = volume.path / "pinned"
    pinned.write_bytes(os.urandom(57 * MIB))
    volume.done("wait", pinned)
    volume.done("pin", pinned)
    with open(volume.path / "written", "wb", buffering=0) as f:
        f.write(os.urandom(7 * MIB - 32 * KIB))
        yield


@pytest.mark.parametrize("options", [(), ("nopassthrough",)])
def test_blocks_that_find_no_room_on_disk(tmp_path: Path, options: tuple[str, ...]) -> None:
    with mounted_volume(tmp_path, options=options, tenants=COUNTED, cache=SMALL_CACHE) as volume:
        path, data = cold(volume, "f")
        with no_room(volume):
            before = handed_over(volume)
            with open(path, "rb", buffering=0) as f:
                assert chunks(f.fileno()) == data
            assert handed_over(volume) - before >= SIZE // MIB
            with ThreadPoolExecutor(16) as readers:
                assert set(readers.map(lambda _: path.read_bytes(), range(32))) == {data}
        assert path.read_bytes() == data
        assert not volume.complaints()


def test_a_partly_fetched_file_that_is_being_written(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        path, data = cold(volume, "f")
        with open(path, "r+b", buffering=0) as f:
            before = handed_over(volume)
            os.pwrite(f.fileno(), b"written", 3 * MIB + 5)
            wanted = data[: 3 * MIB + 5] + b"written" + data[3 * MIB + 12 :]
            assert chunks(f.fileno()) == wanted
            assert handed_over(volume) > before
        volume.done("wait", path)
        volume.evict(path)
        assert path.read_bytes() == wanted
        assert not volume.complaints()


def test_a_partly_fetched_file_that_finds_no_room(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, tenants=COUNTED, cache=SMALL_CACHE) as volume:
        path, data = cold(volume, "f")
        with open(path, "r+b", buffering=0) as f:
            os.pwrite(f.fileno(), b"written", 3 * MIB + 5)
            wanted = data[: 3 * MIB + 5] + b"written" + data[3 * MIB + 12 :]
            with no_room(volume):
                before = handed_over(volume)
                assert chunks(f.fileno()) == wanted
                assert handed_over(volume) - before >= SIZE // MIB - 1
        assert not volume.complaints()


def test_views(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        for i in range(300):
            (volume.path / f"f{i}").write_bytes(b"%d" % i)
        volume.done("wait", volume.path)
        view = volume.mountpoint / ".aof2" / "manifest" / "default.jsonl"
        before = handed_over(volume)
        with open(view, "rb", buffering=0) as f:
            long = os.pread(f.fileno(), MIB, 0)
            assert handed_over(volume) == before + 1
            assert len(long) > 64 * KIB
            short = [os.pread(f.fileno(), 4 * KIB, at) for at in range(0, len(long), 4 * KIB)]
            assert b"".join(short)[: len(long)] == long
            assert handed_over(volume) == before + 1


def test_long_listings_come_in_pieces(tmp_path: Path) -> None:
    """A kernel from 6.16 on asks for as much of a directory as its caller has room for, up to a megabyte."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mounted_volume(tmp_path) as volume:
        folder = volume.path / "folder"
        folder.mkdir()
        names = {f"{i:04d}" + "x" * 200 for i in range(2000)}
        for name in names:
            (folder / name).touch()
        room = ctypes.create_string_buffer(4 * MIB)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        seen: list[str] = []
        lengths: list[int] = []
        try:
            while (n := libc.syscall(217, fd, room, ctypes.c_size_t(len(room)))) > 0:  # getdents64
                lengths.append(n)
                at = 0
                while at < n:
                    length = int.from_bytes(room.raw[at + 16 : at + 18], "little")
                    seen.append(room.raw[at + 19 : at + length].split(b"\0")[0].decode())
                    at += length
        finally:
            os.close(fd)
        assert n == 0
        assert len(seen) == len(set(seen))
        assert set(seen) == names | {".", ".."}
        assert max(lengths) < 64 * KIB
