"""Clean files that are here whole are opened to be read by the channel alone: the daemon stands still meanwhile, so
whatever needed it would hang. And what the daemon does with such a file while it is open."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import pytest

from tests.posix.conftest import IS_ROOT
from tests.support.mount import MountedVolume, until

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="files are passed through for root alone")


SETTLED_S = 3.0  # what came in is recorded a while later


def content(seed: int, size: int = 5000) -> bytes:
    return random.Random(seed).randbytes(size)


@contextmanager
def standing_still(volume: MountedVolume) -> Iterator[None]:
    pid = volume.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def clean(volume: MountedVolume, path: Path, data: bytes) -> bytes:
    """Written, in the remote, and known to the kernel."""
    path.write_bytes(data)
    volume.done("wait", path)
    assert path.stat().st_size == len(data)
    return data


@contextmanager
def held(volume: MountedVolume, path: Path, data: bytes) -> Iterator[int]:
    """Open to read, and the daemon does not know."""
    with standing_still(volume):
        fd = os.open(path, os.O_RDONLY)
        assert os.pread(fd, len(data) + 1, 0) == data
    try:
        yield fd
    finally:
        os.close(fd)


def nothing_is_left(volume: MountedVolume) -> None:
    """What had no name any more went with its last close, by itself."""

    def nameless() -> int:
        with lmdb.open(str(volume.root / "state" / "catalog"), readonly=True, lock=False, max_dbs=16) as env:
            db = env.open_db(b"namespace", create=False)
            with env.begin(db=db) as rows, rows.cursor() as cursor:
                return sum(1 for key in cursor.iternext(values=False) if key[4:5] == b"n")

    until(lambda: not nameless(), "an inode without a name stays")


def test_opened_read_mapped_and_closed_without_the_daemon(volume: MountedVolume, here: Path) -> None:
    files = {here / f"f{i}": content(i, 1 + 700 * i) for i in range(20)}
    for path, data in files.items():
        path.write_bytes(data)
    volume.done("wait", here)
    assert [path.stat().st_size for path in files] == [len(data) for data in files.values()]
    with standing_still(volume):
        for _ in range(3):
            for path, data in files.items():
                assert path.read_bytes() == data
        fds = [os.open(path, os.O_RDONLY) for path in files for _ in range(2)]
        with mmap.mmap(fds[-1], 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == [*files.values()][-1]
        assert os.lseek(fds[-1], 0, os.SEEK_HOLE) == len([*files.values()][-1])
        for fd in fds:
            os.close(fd)


def test_what_came_back_is_opened_without_the_daemon(volume: MountedVolume, here: Path) -> None:
    data = clean(volume, here / "f", content(1))
    volume.evict(here / "f")
    assert (here / "f").read_bytes() == data
    until(lambda: float(os.getxattr(here / "f", "user.aof2.residency")) == 1.0)
    time.sleep(SETTLED_S)
    with standing_still(volume):
        assert (here / "f").read_bytes() == data


def test_a_writer_joins_a_reader(volume: MountedVolume, here: Path) -> None:
    path = here / "f"
    data = clean(volume, path, content(2))
    with held(volume, path, data) as fd, open(path, "r+b") as f:
        f.write(b"changed")
        f.flush()
        assert os.pread(fd, len(data), 0) == b"changed" + data[7:]
    volume.done("wait", path)
    assert path.read_bytes() == b"changed" + data[7:]
    volume.evict(path)
    assert path.read_bytes() == b"changed" + data[7:]


def test_a_reader_outlives_its_writer_and_closes(volume: MountedVolume, here: Path) -> None:
    path = here / "f"
    data = clean(volume, path, content(3))
    with held(volume, path, data) as fd:
        with open(path, "ab") as f:
            f.write(b"more")
        assert os.pread(fd, len(data) + 9, 0) == data + b"more"
    volume.done("wait", path)
    volume.evict(path)
    assert path.read_bytes() == data + b"more"


@pytest.mark.parametrize("size", [0, 100, 9000])
def test_cut_while_it_is_read(volume: MountedVolume, here: Path, size: int) -> None:
    path = here / "f"
    data = clean(volume, path, content(4))
    with held(volume, path, data) as fd:
        os.truncate(path, size)
        wanted = data[:size] + bytes(max(0, size - len(data)))
        assert os.pread(fd, 10_000, 0) == wanted
        assert os.fstat(fd).st_size == size
    volume.done("wait", path)
    assert path.read_bytes() == wanted


@pytest.mark.parametrize("how", ["by the channel", "by the daemon", "replaced"])
def test_removed_while_it_is_read(volume: MountedVolume, here: Path, how: str) -> None:
    path, other = here / "f", here / "other"
    data = clean(volume, path, content(5))
    if how == "by the daemon":
        os.link(path, other)  # of two names it is asked for the first
        with held(volume, path, data) as fd:
            other.unlink()
            path.unlink()
            assert os.pread(fd, len(data), 0) == data
            assert os.fstat(fd).st_nlink == 0
    elif how == "replaced":
        clean(volume, other, content(6))
        with held(volume, path, data) as fd:
            other.rename(path)
            assert os.pread(fd, len(data), 0) == data
            assert path.read_bytes() == content(6)
        path.unlink()
    else:
        with held(volume, path, data) as fd:
            path.unlink()
            assert os.pread(fd, len(data), 0) == data
            assert os.fstat(fd).st_nlink == 0
            assert not list(here.iterdir())
    nothing_is_left(volume)


def test_removed_ones_go_once_they_are_closed(volume: MountedVolume, here: Path) -> None:
    for i in range(30):
        (here / f"f{i}").write_bytes(content(i))
    volume.done("wait", here)
    fds = [os.open(here / f"f{i}", os.O_RDONLY) for i in range(30)]
    for i in range(30):
        (here / f"f{i}").unlink()
    assert [os.pread(fd, 9000, 0) for fd in fds] == [content(i) for i in range(30)]
    for fd in fds:
        os.close(fd)
    nothing_is_left(volume)


def test_what_is_open_is_not_evicted(volume: MountedVolume, here: Path) -> None:
    path = here / "f"
    data = clean(volume, path, content(7))
    with held(volume, path, data) as fd:
        tried = volume.aof2("evict", path)
        assert "open" in tried.stdout + tried.stderr
        assert os.pread(fd, len(data), 0) == data
    volume.evict(path)
    assert path.read_bytes() == data


def test_synced_and_copied_from(volume: MountedVolume, here: Path) -> None:
    path, copy = here / "f", here / "copy"
    data = clean(volume, path, content(8, 300_000))
    with held(volume, path, data) as fd:
        os.fsync(fd)
        os.fdatasync(fd)
        out = os.open(copy, os.O_RDWR | os.O_CREAT)
        try:
            done = 0
            while done < len(data):
                done += os.copy_file_range(fd, out, len(data) - done, done, done)
        finally:
            os.close(out)
    assert copy.read_bytes() == data


def test_a_program_is_run_from_it(volume: MountedVolume, here: Path) -> None:
    path = here / "true"
    clean(volume, path, Path("/bin/true").read_bytes())
    path.chmod(0o755)
    with standing_still(volume):
        assert subprocess.run([path], check=False).returncode == 0


def test_readers_writers_removals_and_evictions_at_once(volume: MountedVolume, here: Path) -> None:
    """A file is always one of the whole versions that were written to it."""
    names = [here / f"f{i}" for i in range(12)]
    versions = [bytes([v]) * 4000 for v in range(256)]
    for path in names:
        path.write_bytes(versions[0])
    volume.done("wait", here)
    over = threading.Event()
    bad: list[object] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            with suppress(FileNotFoundError):
                data = rng.choice(names).read_bytes()
                if data not in versions and data != b"":
                    bad.append(data[:16])

    def write(seed: int) -> None:
        rng = random.Random(seed)
        for n in range(1, 100):
            path = rng.choice(names)
            kind = rng.choices(range(4), (8, 8, 8, 1))[0]
            if kind == 0:
                fresh = path.with_name(f"new{seed}")
                fresh.write_bytes(versions[n])
                fresh.rename(path)
            elif kind == 1:
                with open(path, "r+b") if path.exists() else open(path, "wb") as f:
                    f.write(versions[n])
            elif kind == 2:
                path.unlink(missing_ok=True)
                path.write_bytes(versions[n])
            else:
                volume.aof2("checkpoint")
                volume.aof2("evict", here)

    def guarded(work: object, seed: int) -> None:
        try:
            work(seed)  # type: ignore[operator]
        except Exception as e:
            bad.append(e)

    readers = [threading.Thread(target=guarded, args=(read, i)) for i in range(4)]
    writer = threading.Thread(target=guarded, args=(write, 99))
    for thread in (*readers, writer):
        thread.start()
    writer.join()
    over.set()
    for thread in readers:
        thread.join()
    assert not bad
    volume.done("wait", here)
    assert all(path.read_bytes() in versions for path in names)
