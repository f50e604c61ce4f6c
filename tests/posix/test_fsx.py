"""Random operations on one file in the mount and on a plain one beside it: the same bytes, size and errors throughout.

A failure prints its seed and what was done last: `Machine(seed)` does the same again.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, code, fallocate
from tests.support.mount import MountedVolume

PAGE = 4096
SMALL, LARGE = 256 << 10, (3 << 20) + 12_345  # one block; several, with a crooked end


class Machine:
    """Does everything twice."""

    def __init__(self, seed: int, mine: Path, plain: Path, size_max: int, evict: Callable[[Path], None] | None) -> None:
        self.random = random.Random(seed)
        self.paths = [mine, plain]
        self.size_max = size_max
        self.evict = evict
        self.said: list[str] = [f"seed {seed}"]
        self.fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in self.paths]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def run(self, steps: int) -> None:
        kinds = [self.write] * 6 + [self.map_write] * 3 + [self.read] * 4 + [self.map_read] * 2
        kinds += [self.truncate] * 2 + [self.punch, self.zero, self.allocate, self.copy, self.append]
        kinds += [self.reopen] * 2 + [self.sync, self.rewrite]
        try:
            for _ in range(steps):
                self.random.choice(kinds)()
                self.compare_size()
            self.compare()
        except BaseException as e:
            e.add_note("\n".join(self.said[:1] + self.said[-25:]))
            raise
        finally:
            self.close()

    # -- what is done ------------------------------------------------------------------------------------------

    def both(self, text: str, what: Callable[[int], object]) -> list[object]:
        self.said.append(text)
        results = [what(fd) for fd in self.fds]
        assert results[0] == results[1], text
        return results

    @property
    def size(self) -> int:
        return os.fstat(self.fds[1]).st_size

    def range(self, *, past_end: bool = True) -> tuple[int, int]:
        top = self.size_max if past_end else self.size
        offset = self.random.randrange(max(1, top))
        if self.random.random() < 0.3:
            offset = offset // PAGE * PAGE
        length = self.random.choice((1, 100, PAGE, 3 * PAGE + 17, self.size_max // 7))
        return offset, min(self.random.randint(1, length), self.size_max - offset)

    def bytes(self, length: int) -> bytes:
        return self.random.randbytes(min(length, 1000)).ljust(length, bytes([self.random.randrange(1, 256)]))

    def write(self) -> None:
        offset, length = self.range()
        data = self.bytes(length)
        self.both(f"write {offset}+{length}", lambda fd: os.pwrite(fd, data, offset))

    def append(self) -> None:
        length = min(self.random.randint(1, 5000), self.size_max - self.size)
        data, at = self.bytes(max(0, length)), self.size
        self.both(f"append {length} at {at}", lambda fd: os.pwrite(fd, data, at))

    def read(self) -> None:
        offset, length = self.range()
        self.both(f"read {offset}+{length}", lambda fd: os.pread(fd, length, offset))

    def truncate(self) -> None:
        size = self.random.choice(
            (0, self.size, self.random.randint(0, self.size_max), self.random.randint(0, self.size))
        )
        if size == 0 and self.random.random() < 0.7:
            size = self.size // 2
        self.both(f"truncate {size}", lambda fd: os.ftruncate(fd, size))

    def punch(self) -> None:
        offset, length = self.range()
        self.both(f"punch {offset}+{length}", lambda fd: code(fallocate, fd, PUNCH_HOLE | KEEP_SIZE, offset, length))

    def zero(self) -> None:
        offset, length = self.range()
        keep = self.random.choice((0, KEEP_SIZE))
        self.both(f"zero {offset}+{length}", lambda fd: code(fallocate, fd, ZERO_RANGE | keep, offset, length))

    def allocate(self) -> None:
        offset, length = self.range()
        keep = self.random.choice((0, KEEP_SIZE))
        self.both(f"allocate {offset}+{length}", lambda fd: code(fallocate, fd, keep, offset, length))

    def copy(self) -> None:
        offset, length = self.range(past_end=False)
        to, _ = self.range()
        length = min(length, abs(to - offset), self.size_max - to)
        if length > 0 and self.size > offset:
            self.both(f"copy {offset}+{length} to {to}", lambda fd: _copy(fd, length, offset, to))

    def map_write(self) -> None:
        if not self.size:
            return
        offset, length = self.range(past_end=False)
        length = min(length, self.size - offset)
        data = self.bytes(length)

        def work(fd: int) -> None:
            with mmap.mmap(fd, 0) as view:
                view[offset : offset + length] = data

        self.both(f"map and write {offset}+{length}", work)

    def map_read(self) -> None:
        if not self.size:
            return
        offset, length = self.range(past_end=False)

        def work(fd: int) -> bytes:
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
                return view[offset : offset + length]

        self.both(f"map and read {offset}+{length}", work)

    def sync(self) -> None:
        self.both("fsync", os.fsync)

    def rewrite(self) -> None:
        """Opened with O_TRUNC, now and then."""
        if self.random.random() < 0.3:
            self.said.append("rewrite")
            self.close()
            self.fds = [os.open(path, os.O_RDWR | os.O_TRUNC) for path in self.paths]

    def reopen(self) -> None:
        self.said.append("close")
        self.close()
        if self.evict is not None and self.random.random() < 0.7:
            self.said.append("evict")
            self.evict(self.paths[0])
        assert self.paths[0].stat().st_size == self.paths[1].stat().st_size
        if self.random.random() < 0.3:
            cut = self.random.randint(0, self.size_max)
            self.said.append(f"truncate while closed {cut}")
            for path in self.paths:
                os.truncate(path, cut)
        if self.random.random() < 0.3:
            self.said.append("open to read, then also to write")
            readers = [os.open(path, os.O_RDONLY) for path in self.paths]
            self.fds = [os.open(path, os.O_RDWR) for path in self.paths]
            for fd in readers:
                os.close(fd)
        else:
            self.fds = [os.open(path, os.O_RDWR) for path in self.paths]

    # -- what is compared --------------------------------------------------------------------------------------

    def compare_size(self) -> None:
        sizes = [os.fstat(fd).st_size for fd in self.fds]
        assert sizes[0] == sizes[1], self.said[-1]

    def compare(self) -> None:
        mine, plain = (path.read_bytes() for path in self.paths)
        if mine != plain:
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b), min(len(mine), len(plain))
            )
            raise AssertionError(f"different from byte {at} of {len(plain)} ({len(mine)})")


def _copy(fd: int, length: int, offset: int, to: int) -> bool:
    done = 0
    while done < length:
        step = os.copy_file_range(fd, fd, length - done, offset + done, to + done)
        if not step:
            break
        done += step
    return bool(done)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size_max", [SMALL, LARGE])
def test_open_and_close(each_here: Path, tmp_path: Path, seed: int, size_max: int) -> None:
    Machine(seed, each_here / "f", tmp_path / "f", size_max, None).run(150)


@pytest.mark.parametrize("seed", range(100, 104))
def test_evicted_between(each_volume: MountedVolume, each_here: Path, tmp_path: Path, seed: int) -> None:
    """Whenever it is closed, all of it may be in the remote only: what is written next lands on blocks that are not
    here."""
    Machine(seed, each_here / "f", tmp_path / "f", LARGE, each_volume.evict).run(80)
