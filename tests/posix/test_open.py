"""open(2): its flags, what a descriptor keeps, and what becomes of a file without a name."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.posix.helpers import NOBODY, bits, code, code_as, forked, link_fd, names, opened, umask


def test_create_takes_mode_and_umask(folder: Path) -> None:
    for mask in (0o000, 0o022, 0o077, 0o777):
        with umask(mask):
            path = folder / f"{mask:o}"
            with opened(path, os.O_CREAT | os.O_WRONLY, 0o777):
                pass
            os.mkdir(folder / f"d{mask:o}", 0o777)
        assert bits(path) == bits(folder / f"d{mask:o}") == 0o777 & ~mask


def test_a_new_file_belongs_to_who_made_it(folder: Path) -> None:
    folder.chmod(0o777)
    forked(lambda: Path("f").touch(), uid=NOBODY, gid=NOBODY, cwd=folder)
    forked(lambda: Path("d").mkdir(), uid=NOBODY, gid=NOBODY, cwd=folder)
    for name in ("f", "d"):
        st = (folder / name).stat()
        assert (st.st_uid, st.st_gid) == (NOBODY, NOBODY)


def test_a_descriptor_writes_though_the_mode_forbids_it(folder: Path) -> None:
    folder.chmod(0o777)

    def work() -> bytes:
        with opened("f", os.O_CREAT | os.O_RDWR, 0o000) as fd:
            os.write(fd, b"mine")
            return os.pread(fd, 10, 0)

    assert forked(work, uid=NOBODY, cwd=folder) == b"mine"
    assert code_as(NOBODY, folder, os.open, "f", os.O_RDONLY) == "EACCES"


def test_exclusive(folder: Path) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(folder / "f", flags))
    assert code(os.open, folder / "f", flags) == "EEXIST"
    os.symlink("nowhere", folder / "link")
    assert code(os.open, folder / "link", flags) == "EEXIST"
    assert not (folder / "nowhere").exists()
    assert code(os.open, folder, flags) == "EEXIST"


def test_exclusive_has_one_winner(folder: Path) -> None:
    script = (
        "import os, sys\nwon = 0\nfor i in range(200):\n  try:\n"
        "    os.close(os.open(f'{sys.argv[1]}/{i}', os.O_CREAT | os.O_EXCL | os.O_WRONLY)); won += 1\n"
        "  except FileExistsError: pass\nprint(won)"
    )
    racers = [subprocess.Popen(["python3", "-c", script, folder], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    won = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(won) == 200
    assert len(names(folder)) == 200


def test_truncate_on_open(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"x" * 100_000)
    with opened(path, os.O_RDONLY) as reader:
        with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
            assert os.fstat(fd).st_size == os.fstat(reader).st_size == path.stat().st_size == 0
            os.write(fd, b"new")
        assert os.pread(reader, 10, 0) == b"new"


def test_kinds_and_flags(folder: Path) -> None:
    (folder / "f").touch()
    os.symlink("f", folder / "link")
    os.symlink("loop", folder / "loop")
    assert code(os.open, folder, os.O_WRONLY) == code(os.open, folder, os.O_RDWR) == "EISDIR"
    assert code(os.open, folder, os.O_RDONLY | os.O_CREAT) == "EISDIR"
    assert code(os.open, folder / "f", os.O_RDONLY | os.O_DIRECTORY) == "ENOTDIR"
    assert code(os.open, folder / "link", os.O_RDONLY | os.O_NOFOLLOW) == "ELOOP"
    assert code(os.open, folder / "loop", os.O_RDONLY) == "ELOOP"
    assert code(os.open, folder / "nothing", os.O_RDONLY) == "ENOENT"
    assert code(os.open, folder / "nothing" / "f", os.O_CREAT | os.O_WRONLY) == "ENOENT"
    with opened(folder / "f", os.O_PATH) as fd:
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        assert code(os.read, fd, 1) == "EBADF"
    with opened(folder / "f", os.O_RDONLY) as fd:
        assert code(os.write, fd, b"x") == "EBADF"
        assert code(os.ftruncate, fd, 0) == "EINVAL"
    with opened(folder / "f", os.O_WRONLY) as fd:
        assert code(os.read, fd, 1) == "EBADF"
    with opened(folder / "f", os.O_RDWR | os.O_SYNC) as fd:
        assert os.write(fd, b"synced") == 6


def test_two_appenders_tear_nothing(folder: Path) -> None:
    """Lines of two processes, each whole, none lost, each process's in order."""
    path, each = folder / "log", 400
    path.touch()
    script = (
        "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
        "for i in range(int(sys.argv[3])):\n"
        "  line = f'{sys.argv[2]} {i} '.encode()\n  line += b'x' * (17 * i % 900) + b'\\n'\n"
        "  assert os.write(fd, line) == len(line)\n"
    )
    writers = [subprocess.Popen(["python3", "-c", script, path, who, str(each)]) for who in "ab"]
    assert [w.wait(60) for w in writers] == [0, 0]
    lines = path.read_bytes().splitlines()
    for who in ("a", "b"):
        mine = [line for line in lines if line.startswith(who.encode())]
        assert [int(line.split()[1]) for line in mine] == list(range(each))
        assert all(line == b"%s %d " % (who.encode(), i) + b"x" * (17 * i % 900) for i, line in enumerate(mine))
    assert len(lines) == 2 * each


def test_append_ignores_the_offset(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"0123456789")
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        os.lseek(fd, 2, os.SEEK_SET)
        os.write(fd, b"A")
        assert os.lseek(fd, 0, os.SEEK_CUR) == 11
        os.ftruncate(fd, 4)
        os.write(fd, b"B")
    assert path.read_bytes() == b"0123B"


def test_unlinked_but_open(folder: Path) -> None:
    path = folder / "f"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"still here")
        path.unlink()
        assert names(folder) == []
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 100, 0) == b"still here"
        os.pwrite(fd, b"HERE", 6)
        os.ftruncate(fd, 12)
        os.fchmod(fd, 0o600)
        os.utime(fd, ns=(5, 7))
        os.fsync(fd)
        st = os.fstat(fd)
        assert (st.st_size, st.st_mtime_ns, st.st_mode & 0o7777) == (12, 7, 0o600)
        path.write_bytes(b"another file")
        assert os.pread(fd, 100, 0) == b"still HERE\0\0"
    assert path.read_bytes() == b"another file"


def test_a_closed_file_unlinked_while_a_reader_has_it(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"a" * 300_000)
    with opened(path, os.O_RDONLY) as fd:
        path.unlink()
        assert os.read(fd, 1 << 20) == b"a" * 300_000
    assert names(folder) == []


def test_replaced_but_open(folder: Path) -> None:
    (folder / "old").write_bytes(b"old")
    with opened(folder / "old", os.O_RDWR) as fd:
        (folder / "new").write_bytes(b"new")
        os.rename(folder / "new", folder / "old")
        assert os.pread(fd, 10, 0) == b"old"
        assert os.fstat(fd).st_nlink == 0
    assert (folder / "old").read_bytes() == b"new"


def test_removed_directory_that_somebody_is_in(folder: Path) -> None:
    (folder / "d").mkdir()
    with opened(folder / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        (folder / "d").rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        assert code(os.mkdir, "x", dir_fd=fd) == "ENOENT"
        assert code(os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=fd) == "ENOENT"


def test_without_a_name_from_the_start(folder: Path) -> None:
    """O_TMPFILE; the mount may say that it has none."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644)
    except OSError as e:
        assert e.errno in (errno.EOPNOTSUPP, errno.EISDIR)
        assert "plain" not in str(folder)
        return
    os.write(fd, b"hidden")
    assert names(folder) == []
    link_fd(fd, folder / "shown")
    os.close(fd)
    assert (folder / "shown").read_bytes() == b"hidden"


def test_python_temporary_files(folder: Path) -> None:
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as f:
        f.write(b"x" * 5000)
        f.seek(0)
        assert f.read() == b"x" * 5000
    with tempfile.NamedTemporaryFile(dir=folder) as f:
        f.write(b"y")
        f.flush()
        assert Path(f.name).read_bytes() == b"y"
    assert names(folder) == []


def test_a_thousand_descriptors(folder: Path) -> None:
    fds = []
    try:
        for i in range(1000):
            fds.append(os.open(folder / str(i % 100), os.O_RDWR | os.O_CREAT))
        for i, fd in enumerate(fds):
            os.pwrite(fd, b"%04d" % i, 4 * (i // 100))
    finally:
        for fd in fds:
            os.close(fd)
    assert (folder / "7").read_bytes() == b"".join(b"%04d" % i for i in range(7, 1000, 100))


@pytest.mark.parametrize("how", ["truncate", "ftruncate"])
def test_truncate(folder: Path, how: str) -> None:
    path = folder / "f"
    path.write_bytes(b"0123456789")
    with opened(path, os.O_RDWR) as fd:
        target = fd if how == "ftruncate" else path
        os.truncate(target, 4)
        os.truncate(target, 8)
        assert os.pread(fd, 100, 0) == b"0123\0\0\0\0"
        os.truncate(target, (1 << 40) + 5)
        assert os.fstat(fd).st_size == path.stat().st_size == (1 << 40) + 5
        assert os.pread(fd, 100, 1 << 40) == b"\0" * 5
        assert os.fstat(fd).st_blocks < 1000
        os.truncate(target, 0)
        assert os.read(fd, 10) == b""
        assert code(os.truncate, target, -1) == "EINVAL"
    assert code(os.truncate, folder, 0) == "EISDIR"
    assert code(os.truncate, folder / "nothing", 0) == "ENOENT"
    os.mkfifo(folder / "fifo")
    assert code(os.truncate, folder / "fifo", 0) == "EINVAL"


def test_past_the_largest_offset(folder: Path) -> None:
    with opened(folder / "f") as fd:
        assert code(os.pwrite, fd, b"x", (1 << 63) - 1) in ("EFBIG", "EINVAL")
        assert code(os.truncate, fd, (1 << 63) - 1) == "EFBIG"
        assert os.fstat(fd).st_size == 0
