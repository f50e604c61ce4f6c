"""Bytes: reading and writing in every way Linux has, and all of them seeing the same."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from tests.posix.helpers import (
    COLLAPSE_RANGE,
    INSERT_RANGE,
    KEEP_SIZE,
    PUNCH_HOLE,
    ZERO_RANGE,
    Inotify,
    code,
    fallocate,
    forked,
    names,
    opened,
)
from tests.support.mount import MountedVolume

MIB = 1 << 20
DATA = bytes(range(256)) * 4096 + b"tail"  # a block and a bit


def test_holes_read_as_zeros(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.pwrite(fd, b"end", 3 * MIB)
        assert os.pread(fd, 10, 0) == b"\0" * 10
        assert os.pread(fd, 5, 3 * MIB - 2) == b"\0\0end"
        assert os.pread(fd, 10, 3 * MIB + 1) == b"nd"
        assert os.pread(fd, 10, 4 * MIB) == b""
        assert os.fstat(fd).st_size == 3 * MIB + 3


def test_vectors(folder: Path) -> None:
    with opened(folder / "f") as fd:
        assert os.pwritev(fd, [b"ab", b"", b"cdef"], 1) == 6
        parts = [bytearray(3), bytearray(10)]
        assert os.preadv(fd, parts, 0) == 7
        assert parts[0] == b"\0ab"
        assert parts[1][:4] == b"cdef"


def test_data_and_holes(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.pwrite(fd, b"a" * 65536, 0)
        os.pwrite(fd, b"b" * 65536, 4 * MIB)
        os.ftruncate(fd, 8 * MIB)
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert 65536 <= os.lseek(fd, 0, os.SEEK_HOLE) <= 8 * MIB
        assert os.lseek(fd, 65536, os.SEEK_DATA) <= 4 * MIB
        assert os.lseek(fd, 4 * MIB, os.SEEK_DATA) == 4 * MIB
        assert os.lseek(fd, 4 * MIB, os.SEEK_HOLE) <= 8 * MIB
        assert code(os.lseek, fd, 8 * MIB, os.SEEK_DATA) == code(os.lseek, fd, 9 * MIB, os.SEEK_HOLE) == "ENXIO"
        assert code(os.lseek, fd, -1, os.SEEK_SET) == "EINVAL"


def test_fallocate(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.pwrite(fd, b"x" * 65536, 0)
        fallocate(fd, 0, 65536, 65536)
        assert os.fstat(fd).st_size == 131072
        assert os.pread(fd, 4, 65536) == b"\0" * 4
        fallocate(fd, KEEP_SIZE, 131072, 65536)
        assert os.fstat(fd).st_size == 131072
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 4096, 8192)
        assert os.pread(fd, 16384, 0) == b"x" * 4096 + b"\0" * 8192 + b"x" * 4096
        fallocate(fd, ZERO_RANGE, 100, 100)
        assert os.pread(fd, 300, 0) == b"x" * 100 + b"\0" * 100 + b"x" * 100
        assert os.fstat(fd).st_size == 131072
        assert code(fallocate, fd, 0, -1, 10) == code(fallocate, fd, 0, 0, 0) == "EINVAL"
        assert code(fallocate, fd, PUNCH_HOLE, 0, 10) == "EOPNOTSUPP"
    with opened(folder / "f", os.O_RDONLY) as fd:
        assert code(fallocate, fd, 0, 0, 10) == "EBADF"
    with opened(folder / "g") as fd:
        os.posix_fallocate(fd, 0, 1000)
    assert (folder / "g").read_bytes() == b"\0" * 1000


def test_ranges_that_move_may_be_refused(each_here: Path) -> None:
    """Collapsing and inserting: done or refused, never half."""
    with opened(each_here / "f") as fd:
        os.pwrite(fd, DATA, 0)
        for mode in (COLLAPSE_RANGE, INSERT_RANGE):
            if code(fallocate, fd, mode, 4096, 4096) in ("EOPNOTSUPP", "EINVAL"):
                assert os.pread(fd, 2 * len(DATA), 0) == DATA


def test_mapping_and_calls_see_the_same(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.ftruncate(fd, 65536)
        with mmap.mmap(fd, 65536) as shared, mmap.mmap(fd, 65536, access=mmap.ACCESS_COPY) as private:
            os.pwrite(fd, b"by write", 100)
            assert shared[100:108] == private[100:108] == b"by write"
            shared[5000:5006] = b"by map"
            assert os.pread(fd, 6, 5000) == b"by map"
            private[8192:8200] = b"not seen"
            assert os.pread(fd, 8, 8192) == shared[8192:8200] == b"\0" * 8
            shared.flush()
    assert (folder / "f").read_bytes()[5000:5006] == b"by map"


def test_two_mappings(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.ftruncate(fd, 16384)
        with mmap.mmap(fd, 16384) as one:

            def work() -> bytes:
                with opened(folder / "f", os.O_RDWR) as mine, mmap.mmap(mine, 16384) as two:
                    seen = two[0:3]
                    two[4096:4099] = b"two"
                    return seen

            one[0:3] = b"one"
            assert forked(work) == b"one"
            assert one[4096:4099] == b"two"


def test_a_mapping_outlives_its_descriptor(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"0" * 10_000)
    with opened(path, os.O_RDWR) as fd:
        view = mmap.mmap(fd, 10_000)
    view[0:5] = b"12345"
    assert path.read_bytes()[:6] == b"123450"
    os.unlink(path)
    view[5:6] = b"6"
    assert view[:7] == b"1234560"
    view.close()


def test_a_mapping_past_the_end_is_a_signal(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"x" * 8192)

    def work() -> None:
        fd = os.open(path, os.O_RDWR)
        view = mmap.mmap(fd, 8192)
        os.ftruncate(fd, 100)
        view[5000]

    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGBUS


def test_private_mapping_of_a_read_only_file(folder: Path) -> None:
    (folder / "f").write_bytes(DATA)
    with opened(folder / "f", os.O_RDONLY) as fd:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
            assert view[:] == DATA
        assert code(mmap.mmap, fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) == "EACCES"


def test_direct(folder: Path) -> None:
    path = folder / "f"
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd, mmap.mmap(-1, 2 * MIB) as buffer:
        buffer[: len(DATA)] = DATA
        assert os.pwritev(fd, [memoryview(buffer)[:MIB]], 0) == MIB
        with opened(path, os.O_RDWR) as other:
            assert os.pread(other, 4096, MIB - 4096) == DATA[MIB - 4096 : MIB]
            os.pwrite(other, b"plain", 8192)
        target = mmap.mmap(-1, 4096)
        assert os.preadv(fd, [target], 8192) == 4096
        assert target[:5] == b"plain"
        target.close()


def test_sendfile_splice_and_copy(folder: Path) -> None:
    (folder / "from").write_bytes(DATA)
    size = len(DATA)
    with opened(folder / "from", os.O_RDONLY) as source:
        with opened(folder / "copied") as target:
            done = 0
            while done < size:
                done += os.copy_file_range(source, target, size - done, done, done)
        assert (folder / "copied").read_bytes() == DATA
        with opened(folder / "sent") as target:
            done = 0
            while done < size:
                done += os.sendfile(target, source, done, size - done)
        assert (folder / "sent").read_bytes() == DATA
        reader, writer = os.pipe()
        with opened(folder / "spliced") as target:
            done = 0
            while done < size:
                moved = os.splice(source, writer, 65536, offset_src=done)
                left = moved
                while left:
                    left -= os.splice(reader, target, left)
                done += moved
        os.close(reader)
        os.close(writer)
        assert (folder / "spliced").read_bytes() == DATA
    with opened(folder / "copied", os.O_RDWR) as fd:
        assert os.copy_file_range(fd, fd, 1000, 0, 500_000) == 1000
        assert os.pread(fd, 1000, 500_000) == DATA[:1000]
        assert code(os.copy_file_range, fd, fd, 1000, 0, 500) == "EINVAL"


def test_copies_in_and_out(each_here: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(DATA)
    subprocess.run(["cp", "-a", tmp_path / "outside", each_here / "in"], check=True)
    subprocess.run(["cp", "--sparse=always", each_here / "in", tmp_path / "back"], check=True)
    assert (tmp_path / "back").read_bytes() == DATA
    assert (each_here / "in").stat().st_mtime_ns == (tmp_path / "outside").stat().st_mtime_ns


def test_many_threads_on_one_file(folder: Path) -> None:
    with opened(folder / "f") as fd:

        def work(number: int) -> None:
            for i in range(50):
                os.pwrite(fd, bytes([number]) * 1000, (i * 8 + number) * 1000)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        data = os.pread(fd, 1 << 20, 0)
    assert data == b"".join(bytes([n]) * 1000 for _ in range(50) for n in range(8))


def test_syncs(folder: Path) -> None:
    with opened(folder / "f") as fd:
        os.write(fd, b"x")
        os.fsync(fd)
        os.fdatasync(fd)
        assert ctypes.CDLL(None).syncfs(fd) == 0
        assert ctypes.CDLL(None).sync_file_range(fd, 0, 0, 7) == 0
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def test_blocks_and_statfs(each_volume: MountedVolume, each_here: Path) -> None:
    (each_here / "f").write_bytes(DATA)
    st = (each_here / "f").stat()
    assert abs(st.st_blocks * 512 - len(DATA)) <= 65536
    assert st.st_blksize >= 512
    limits = os.statvfs(each_here)
    assert limits.f_namemax == 255
    assert limits.f_blocks * limits.f_frsize == 1 << 30  # cache.hot_bytes
    assert 0 < limits.f_bavail <= limits.f_bfree <= limits.f_blocks
    assert limits.f_ffree > 1_000_000
    assert os.statvfs(each_volume.mountpoint).f_blocks == limits.f_blocks


def test_inotify(folder: Path) -> None:
    watch = Inotify(folder)
    (folder / "f").write_text("x")
    os.rename(folder / "f", folder / "g")
    os.chmod(folder / "g", 0o600)
    os.unlink(folder / "g")
    seen = watch.read()
    watch.close()
    for event in (
        ("f", Inotify.CREATE),
        ("f", Inotify.MODIFY),
        ("f", Inotify.CLOSE_WRITE),
        ("f", Inotify.MOVED_FROM),
        ("g", Inotify.MOVED_TO),
        ("g", Inotify.ATTRIB),
        ("g", Inotify.DELETE),
    ):
        assert event in seen


# -- what is not a file --------------------------------------------------------------------------------------------


def test_fifo(folder: Path) -> None:
    path = folder / "fifo"
    os.mkfifo(path, 0o622)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert code(os.open, path, os.O_WRONLY | os.O_NONBLOCK) == "ENXIO"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with opened(path, os.O_WRONLY) as writer:
        os.write(writer, b"through")
        assert os.read(reader, 10) == b"through"
    os.close(reader)


def test_socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("s")
            server.listen()
            assert stat.S_ISSOCK(os.stat("s").st_mode)
            client.connect("s")
            accepted, _ = server.accept()
            client.sendall(b"hello")
            assert accepted.recv(10) == b"hello"
            accepted.close()
        assert code(os.open, "s", os.O_RDONLY) == "ENXIO"
        os.unlink("s")
    finally:
        os.chdir(here)


def test_devices(folder: Path) -> None:
    """The shared mounts are with -o dev."""
    os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(folder / "disk", stat.S_IFBLK | 0o600, os.makedev(250, 70_000))
    assert (folder / "null").stat().st_rdev == os.makedev(1, 3)
    assert (folder / "disk").stat().st_rdev == os.makedev(250, 70_000)
    if "plain" not in folder.name:
        with opened(folder / "null", os.O_RDWR) as fd:
            assert os.write(fd, b"gone") == 4
            assert os.read(fd, 1) == b""
    assert forked(lambda: code(os.mknod, "x", stat.S_IFCHR | 0o666, os.makedev(1, 3)), uid=65534, cwd=folder) in (
        "EPERM",
        "EACCES",
    )
    os.mknod(folder / "regular", stat.S_IFREG | 0o640)
    assert (folder / "regular").read_bytes() == b""
    (folder / "regular").write_bytes(b"x")


# -- locks ---------------------------------------------------------------------------------------------------------


def test_flock_between_processes(folder: Path) -> None:
    path = folder / "f"
    path.touch()

    def attempt(how: int) -> str:
        with opened(path, os.O_RDWR) as mine:
            return code(fcntl.flock, mine, how | fcntl.LOCK_NB)

    with opened(path, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert forked(lambda: attempt(fcntl.LOCK_SH)) == "EAGAIN"
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert forked(lambda: attempt(fcntl.LOCK_SH)) == ""
        assert forked(lambda: attempt(fcntl.LOCK_EX)) == "EAGAIN"
    assert forked(lambda: attempt(fcntl.LOCK_EX)) == ""


def test_record_locks_between_processes(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"x" * 100)

    def attempt(start: int, length: int) -> str:
        with opened(path, os.O_RDWR) as mine:
            return code(fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)

    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
        assert forked(lambda: attempt(25, 1)) == "EAGAIN"
        assert forked(lambda: attempt(30, 10)) == ""
        assert forked(lambda: attempt(0, 20)) == ""
        fcntl.lockf(fd, fcntl.LOCK_UN, 5, 20)
        assert forked(lambda: attempt(20, 5)) == ""
        assert forked(lambda: attempt(25, 5)) == "EAGAIN"
    assert forked(lambda: attempt(0, 0)) == ""


def test_a_lock_is_waited_for(folder: Path) -> None:
    path = folder / "counter"
    path.write_text("0")
    script = (
        "import fcntl, sys\nfor _ in range(50):\n  with open(sys.argv[1], 'r+') as f:\n"
        "    fcntl.flock(f, fcntl.LOCK_EX)\n    n = int(f.read())\n    f.seek(0)\n    f.write(str(n + 1))\n"
    )
    workers = [subprocess.Popen(["python3", "-c", script, path]) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert path.read_text() == "150"


# -- .aof2 ---------------------------------------------------------------------------------------------------------


def test_views(each_volume: MountedVolume, each_here: Path) -> None:
    import json

    (each_here / "f").write_text("x")
    dot = each_volume.mountpoint / ".aof2"
    assert names(dot) == ["manifest", "metrics", "status.json"]
    assert stat.S_IMODE(dot.stat().st_mode) == 0o500
    status = json.loads((dot / "status.json").read_bytes())
    assert "default" in json.dumps(status)
    metrics = (dot / "metrics").read_text()
    assert "# TYPE " in metrics
    assert names(dot / "manifest") == ["default.jsonl", "other.jsonl"]
    rows = [json.loads(line) for line in (dot / "manifest" / "default.jsonl").read_bytes().splitlines()]
    assert rows
    assert all({"chunk_index", "ordinal", "type", "segment_id", "timestamp_ms"} <= row.keys() for row in rows)


@pytest.mark.parametrize("name", ["status.json", "metrics", "manifest/default.jsonl"])
def test_views_are_read_only(volume: MountedVolume, name: str) -> None:
    path = volume.mountpoint / ".aof2" / name
    assert code(os.open, path, os.O_RDWR) == "EROFS"
    assert code(os.truncate, path, 0) in ("EPERM", "EROFS")
    assert code(os.unlink, path) == code(os.chmod, path, 0o777) == "EPERM"
    assert code(os.rename, path, path.with_name("x")) in ("EPERM", "EXDEV")
    assert code((path.parent / "new").touch) == code(os.mkdir, path.parent / "new") == "EPERM"
    assert code(os.setxattr, path, "user.x", b"") == "EPERM"
    with opened(path, os.O_RDONLY) as fd:
        first = os.pread(fd, 1 << 20, 0)
        assert os.pread(fd, 1 << 20, 0) == first
