"""Bytes from a socket into a file: all of them, checksummed, and how it ends when they do not come."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2 import native
from aof2.native import Ending


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("scratch_len", [1, 100, 4096, 5000, 1 << 16])
@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1), (5, 4091), (5, 4092), (4096, 3 * 4096), (777, 70_001)])
def test_all_that_was_asked_for(
    pair: tuple[socket.socket, socket.socket], file: int, scratch_len: int, offset: int, length: int
) -> None:
    here, there = pair
    data = random.Random(length).randbytes(length + 50)
    sender = threading.Thread(target=there.sendall, args=(data,))
    sender.start()
    came = native.receive(
        here.fileno(), file, offset, length, bytearray(scratch_len), timeout_s=20, piece_bytes=5000, begun=b"before"
    )
    whole = b"before" + data[:length]
    crcs = [native.crc64(whole[i : i + 5000]) for i in range(0, len(whole), 5000)]
    assert came == (Ending.ALL, length, crcs, 0)
    assert os.pread(file, length + 50, offset) == data[:length]
    rest = b""
    while len(rest) < 50:  # what comes after is left for the next
        rest += here.recv(50)
    sender.join()
    assert rest == data[length:]


def test_an_early_end(pair: tuple[socket.socket, socket.socket], file: int) -> None:
    here, there = pair
    there.sendall(b"half")
    there.close()
    came = native.receive(here.fileno(), file, 3, 8, bytearray(64), timeout_s=20, piece_bytes=99)
    assert came == (Ending.ENDED, 4, [native.crc64(b"half")], 0)
    assert os.pread(file, 9, 3) == b"half"


def test_silence(pair: tuple[socket.socket, socket.socket], file: int) -> None:
    here, there = pair
    there.sendall(b"x")
    came = native.receive(here.fileno(), file, 0, 2, bytearray(64), timeout_s=0.02, piece_bytes=99)
    assert came == (Ending.SILENT, 1, [native.crc64(b"x")], 0)


def test_a_file_that_takes_nothing(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    here, there = pair
    there.sendall(b"data")
    (tmp_path / "ro").write_bytes(b"")
    fd = os.open(tmp_path / "ro", os.O_RDONLY)
    try:
        came = native.receive(here.fileno(), fd, 0, 4, bytearray(64), timeout_s=20, piece_bytes=99)
    finally:
        os.close(fd)
    assert (came.ending, came.done) == (Ending.FILE, 0)
    assert came.error > 0


def test_what_is_no_socket(file: int) -> None:
    came = native.receive(file, file, 0, 4, bytearray(64), timeout_s=20, piece_bytes=99)
    assert (came.ending, came.done) == (Ending.SOCKET, 0)
    with pytest.raises(ValueError, match="begun"):
        native.receive(file, file, 0, 4, bytearray(64), timeout_s=20, piece_bytes=4, begun=b"full")
    with pytest.raises(ValueError, match="scratch"):
        native.receive(file, file, 0, 4, bytearray(), timeout_s=20, piece_bytes=99)
