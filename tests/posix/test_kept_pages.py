"""What the kernel keeps of a ranged file when it is opened again: asked for once, and never of other bytes.

Bytes are counted in the channel, which answers for everybody: read into an answer over io_uring, written as one else.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.helpers import KEEP_SIZE, PUNCH_HOLE, fallocate, opened
from tests.support.mount import MountedVolume

MIB = 1 << 20
SIZE = 4 * MIB + 1234
WAIT_S = 10.0
Writer = Callable[[Path, bytes], None]


def given(volume: MountedVolume) -> int:
    """Bytes that went to the kernel so far: at most twice as many, and none of a short answer that the daemon gave."""
    for pid in volume.pids():
        if "channel" in Path(f"/proc/{pid}/comm").read_text():
            counted = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            return int(counted["rchar"]) + int(counted["wchar"])
    raise AssertionError("no channel")


def asked_for(volume: MountedVolume, path: Path, wanted: bytes) -> int:
    """Reads the file, which must be this; how many bytes the kernel had to be given for that."""
    before = given(volume)
    assert path.read_bytes() == wanted
    return given(volume) - before


def is_kept(volume: MountedVolume, path: Path, wanted: bytes) -> bool:
    return asked_for(volume, path, wanted) < SIZE // 8


def until_kept(volume: MountedVolume, path: Path, wanted: bytes) -> None:
    """A close may reach the daemon a moment after it returned."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_kept(volume, path, wanted):
        assert time.monotonic() < deadline_s, "each open drops what the kernel has of the file"


def clean(volume: MountedVolume, path: Path) -> None:
    volume.done("wait", path)


def residency(path: Path) -> float:
    """How much of it is here."""
    return float(os.getxattr(path, "user.aof2.residency"))


def make(volume: MountedVolume, path: Path) -> bytes:
    data = os.urandom(SIZE)
    path.write_bytes(data)
    clean(volume, path)
    return data


@pytest.mark.parametrize("each_volume", ["ranged"], indirect=True)
def test_what_is_here_is_asked_for_once(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    data = make(each_volume, path)
    assert path.read_bytes() == data
    until_kept(each_volume, path, data)
    assert all(is_kept(each_volume, path, data) for _ in range(5))


def test_what_is_partly_here_is_asked_for_once(each_volume: MountedVolume, each_here: Path) -> None:
    """In either mount: a file of which something is missing is ranged."""
    path = each_here / "f"
    data = make(each_volume, path)
    each_volume.evict(path)
    for _ in range(20):
        with opened(path, os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            before = given(each_volume)
            assert os.pread(fd, MIB, 2 * MIB) == data[2 * MIB : 3 * MIB]
            more = given(each_volume) - before
        if more < 4096:
            return
    raise AssertionError("each open drops what the kernel has of the file")


def test_evicted_on_request_it_comes_from_the_remote(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    data = make(each_volume, path)
    for _ in range(3):
        assert path.read_bytes() == data
        each_volume.evict(path)
        assert residency(path) == 0
        assert asked_for(each_volume, path, data) >= SIZE - SIZE % MIB
        deadline_s = time.monotonic() + WAIT_S
        while residency(path) < 1:
            assert time.monotonic() < deadline_s, "read, and not brought here"
            time.sleep(0.05)


# -- other bytes ---------------------------------------------------------------------------------------------------


def write_over(path: Path, data: bytes) -> None:
    with opened(path, os.O_WRONLY) as fd:
        assert os.pwrite(fd, data, 0) == len(data)


def write_anew(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def cut_and_write(path: Path, data: bytes) -> None:
    os.truncate(path, 0)
    write_over(path, data)


def cut_and_extend(path: Path, data: bytes) -> None:
    """A hole, all of it, and then the bytes in pieces."""
    os.truncate(path, 0)
    os.truncate(path, len(data))
    with opened(path, os.O_RDWR) as fd:
        for at in range(0, len(data), 100_000):
            os.pwrite(fd, data[at : at + 100_000], at)


def store(path: Path, data: bytes) -> None:
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, 0) as view:
        view[:] = data


def store_after_close(path: Path, data: bytes) -> None:
    with opened(path, os.O_RDWR) as fd:
        view = mmap.mmap(fd, 0)
    with view:
        view[:] = data


def punch_and_write(path: Path, data: bytes) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 0, len(data))
        os.pwrite(fd, data, 0)


def copy_over(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    with opened(other, os.O_RDONLY) as source, opened(path, os.O_WRONLY) as fd:
        done = 0
        while done < len(data):
            done += os.copy_file_range(source, fd, len(data) - done, done, done)


def direct(path: Path, data: bytes) -> None:
    whole = len(data) // 4096 * 4096
    with opened(path, os.O_WRONLY | os.O_DIRECT) as fd, mmap.mmap(-1, whole) as aligned:
        aligned[:] = data[:whole]
        os.pwrite(fd, aligned, 0)
    with opened(path, os.O_WRONLY) as fd:
        os.pwrite(fd, data[whole:], whole)


WRITERS: list[Writer] = [
    write_over, write_anew, cut_and_write, cut_and_extend, store, store_after_close, punch_and_write, copy_over, direct,
]  # fmt: skip


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_other_bytes_of_the_same_size_and_time(
    each_volume: MountedVolume, each_here: Path, writer: Writer, gone: bool
) -> None:
    """`gone`: it was not here when it was written, so the writer is ranged in either mount, and fetches."""
    path = each_here / "f"
    data = make(each_volume, path)
    before = path.stat()
    path.read_bytes()
    if gone:
        each_volume.evict(path)
        with opened(path, os.O_RDONLY) as fd:
            os.pread(fd, 100_000, MIB)
    assert path.read_bytes() == path.read_bytes() == data
    for seed in range(2):
        data = random.Random(seed).randbytes(SIZE)
        writer(path, data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.read_bytes() == data, "dirty"
        clean(each_volume, path)
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        assert path.read_bytes() == data, "clean"
        assert path.read_bytes() == data, "kept"


@pytest.mark.parametrize("each_volume", ["ranged"], indirect=True)
@pytest.mark.parametrize("writer", WRITERS)
def test_who_has_it_open_sees_what_is_written(each_volume: MountedVolume, each_here: Path, writer: Writer) -> None:
    path = each_here / "f"
    data = make(each_volume, path)
    until_kept(each_volume, path, data)
    with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
        assert view[:] == data
        new = os.urandom(SIZE)
        writer(path, new)
        assert os.pread(fd, SIZE, 0) == new
        assert view[:] == new
        assert path.read_bytes() == new
    clean(each_volume, path)
    assert path.read_bytes() == new
    until_kept(each_volume, path, new)


def test_undeleted(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    old = make(each_volume, path)
    assert path.read_bytes() == path.read_bytes() == old
    path.unlink()
    new = make(each_volume, path)
    assert path.read_bytes() == path.read_bytes() == new
    path.unlink()
    each_volume.done("undelete", path)
    assert path.read_bytes() == path.read_bytes() == new


def test_at_random(each_volume: MountedVolume, each_here: Path) -> None:
    """Writers, evictions and readers that come and go, some of them staying."""
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    path = each_here / "f"
    data = make(each_volume, path)
    stamp = path.stat()
    said: list[str] = [f"seed {seed}"]
    held: list[int] = []
    for _ in range(80):
        what = dice.choice(["write", "clean", "evict", "look", "look", "look", "look", "hold", "let go"])
        said.append(what)
        if what == "write":
            writer = dice.choice(WRITERS)
            said.append(writer.__name__)
            data = dice.randbytes(SIZE)
            writer(path, data)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        elif what == "hold" and len(held) < 3:
            held.append(os.open(path, os.O_RDONLY))
        elif what in ("clean", "evict", "let go"):
            while held:
                os.close(held.pop())
            if what == "clean":
                clean(each_volume, path)
            elif what == "evict":
                each_volume.evict(path)
        if what in ("look", "hold"):
            at, length = dice.randrange(SIZE), dice.choice([100, 5000, SIZE])
            for fd in held:
                assert os.pread(fd, length, at) == data[at : at + length], "\n".join(said)
            with opened(path, os.O_RDONLY) as fd:
                assert os.pread(fd, length, at) == data[at : at + length], "\n".join(said)
    while held:
        os.close(held.pop())
    assert path.read_bytes() == data, "\n".join(said)
