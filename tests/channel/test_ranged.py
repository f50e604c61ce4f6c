"""Ranged nodes: reads and writes the channel answers by itself, and those it does not."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.channel.support import ALL_PRESENT, MIB, PASSTHROUGH, RANGED, STILL, SUID, Daemon, in_time, until

pytestmark = pytest.mark.timeout(90)
BLOCKS = 8


def ranged(daemon: Daemon, name: str = "f", **plan: object) -> Path:
    """A file of eight blocks served by ranges."""
    path = daemon.file(name, os.urandom(BLOCKS * MIB))
    daemon.call("plan", name=name, **{"mode": RANGED, "block_bytes": MIB, "block_count": BLOCKS, **plan})
    return path


def pread(path: Path, size: int, offset: int) -> bytes:
    """Without read-ahead, so that only these blocks are asked for."""

    def work() -> bytes:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    return bytes(in_time(work))


def pwrite(path: Path, data: bytes, offset: int) -> int:
    def work() -> int:
        fd = os.open(path, os.O_WRONLY)
        try:
            return os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    return int(in_time(work))


def test_present_blocks_are_answered_here_and_others_forwarded(daemon: Daemon) -> None:
    path = ranged(daemon, present=[[0, 2], [4, 1]])
    data = (daemon.root / "f").read_bytes()
    for offset, size, forwarded in [
        (0, 4096, False),
        (MIB - 4096, 8192, False),
        (2 * MIB - 4096, 8192, True),
        (2 * MIB + 65536, 4096, True),
        (4 * MIB, 4096, False),
        (5 * MIB, 4096, True),
        (BLOCKS * MIB - 4096, 4096, True),
    ]:
        assert pread(path, size, offset) == data[offset : offset + size]
        assert bool(daemon.ops("read")) == forwarded, (offset, size)


def copied_bytes(daemon: Daemon) -> int:
    """What the channel read into its own memory."""
    counters = dict(line.split(": ") for line in Path(f"/proc/{daemon.channel_pid}/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.parametrize("size", [BLOCKS * MIB, BLOCKS * MIB - 4095])
def test_long_answers_of_a_still_file_are_not_copied(daemon: Daemon, size: int) -> None:
    """Written, that is: a ring has a place of its own for them."""
    path = ranged(daemon, flags=ALL_PRESENT | STILL)
    os.truncate(daemon.root / "f", size)
    data = (daemon.root / "f").read_bytes()
    for still in (True, False):
        before = copied_bytes(daemon)
        fd = in_time(lambda: os.open(path, os.O_RDONLY))
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not still:
                daemon.call("clear", name="f", first=0, count=0)
            assert b"".join(in_time(partial(os.pread, fd, MIB, at)) for at in range(0, size, MIB)) == data
        finally:
            os.close(fd)
        copied = copied_bytes(daemon) - before
        written = daemon.info["transport"].startswith("read")
        assert copied < 2 * MIB if still and written else copied >= size, (still, copied)


def test_blocks_that_arrive_while_it_is_open(daemon: Daemon) -> None:
    path = ranged(daemon)
    fd = in_time(lambda: os.open(path, os.O_RDONLY))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        in_time(lambda: os.pread(fd, 4096, 0))
        assert daemon.ops("read")
        daemon.call("blocks", name="f", first=0, count=BLOCKS)
        data = in_time(lambda: os.pread(fd, BLOCKS * MIB, 4096))
        assert data == (daemon.root / "f").read_bytes()[4096:]
        assert not daemon.ops("read")
    finally:
        os.close(fd)


def test_reads_of_blocks_that_are_coming_wait_for_them(daemon: Daemon) -> None:
    path = ranged(daemon)
    data = (daemon.root / "f").read_bytes()
    fd = in_time(lambda: os.open(path, os.O_RDONLY))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        daemon.call("coming", name="f", first=2, count=3)
        threading.Timer(0.01, lambda: daemon.call("blocks", name="f", first=2, count=3)).start()
        assert in_time(lambda: os.pread(fd, 8192, 3 * MIB - 4096)) == data[3 * MIB - 4096 : 3 * MIB + 4096]
        assert not daemon.ops("read")
        daemon.call("coming", name="f", first=6, count=1)
        assert in_time(lambda: os.pread(fd, 4096, 6 * MIB)) == data[6 * MIB : 6 * MIB + 4096]
        assert daemon.ops("read"), "what does not come is asked for"
        in_time(lambda: os.pread(fd, 8192, 6 * MIB - 4096))
        assert daemon.ops("read"), "part of it is not even announced"
    finally:
        os.close(fd)


def test_many_who_wait_do_not_stop_the_others(daemon: Daemon) -> None:
    path = ranged(daemon, present=[[0, 1]])
    fds = [in_time(lambda: os.open(path, os.O_RDONLY)) for _ in range(12)]
    for fd in fds:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        daemon.call("coming", name="f", first=1, count=7)
        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(os.pread, fd, 4096, (1 + n % 7) * MIB) for n, fd in enumerate(fds)]
            for _ in range(20):
                assert len(in_time(lambda: os.pread(fds[0], 4096, 0))) == 4096
            assert all(len(w.result(20)) == 4096 for w in waiting)
    finally:
        for fd in fds:
            os.close(fd)


def test_the_mask_grows(daemon: Daemon) -> None:
    path = ranged(daemon, block_count=1, block_bytes=4096)
    daemon.call("blocks", name="f", first=0, count=1)
    fd = in_time(lambda: os.open(path, os.O_RDONLY))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        in_time(lambda: os.pread(fd, 4096, 5 * MIB))
        assert daemon.ops("read"), "past the mask is absent"
        daemon.call("blocks", name="f", first=0, count=BLOCKS * MIB // 4096)
        in_time(lambda: os.pread(fd, 4096, 6 * MIB))
        assert not daemon.ops("read")
    finally:
        os.close(fd)


def test_all_present_needs_no_mask_and_ends_where_the_file_ends(daemon: Daemon) -> None:
    path = ranged(daemon, flags=ALL_PRESENT, block_bytes=0, block_count=0)
    with open(daemon.root / "f", "ab") as f:
        f.write(b"tail")
    assert in_time(path.read_bytes) == (daemon.root / "f").read_bytes()
    assert not daemon.ops("read")


def test_a_mask_past_all_room_means_the_daemon_is_asked(daemon: Daemon) -> None:
    path = ranged(daemon, block_bytes=1, block_count=1 << 62, present=[[0, BLOCKS * MIB], [1 << 61, 1 << 61]])
    assert pread(path, 4096, 0) == (daemon.root / "f").read_bytes()[:4096]
    daemon.ops()
    path = ranged(daemon, "g", block_bytes=1, block_count=1 << 62)
    assert pread(path, 4096, 0) == (daemon.root / "g").read_bytes()[:4096]
    assert daemon.ops("read")


def test_writes_within_the_budget(daemon: Daemon) -> None:
    path = ranged(daemon, present=[[0, 3]], grant=10_000)
    fd = in_time(lambda: os.open(path, os.O_RDWR))
    try:
        assert in_time(lambda: os.pwrite(fd, b"a" * 4096, 100)) == 4096
        assert in_time(lambda: os.pwrite(fd, b"b" * 4096, MIB - 10)) == 4096
        assert not daemon.ops("write")
        assert daemon.call("collect", name="f") == {
            "bytes": 8192,
            "left": 10_000 - 8192,
            "ranges": [[0, 2]],
            "untracked": False,
        }
        assert daemon.call("collect", name="f")["ranges"] == []
        in_time(lambda: os.pwrite(fd, b"c" * 3000, 200))
        assert daemon.ops("write") == [["write", "f", 200, 3000, False]], "the budget is used up"
        daemon.call("grant", name="f", n=1 << 20)
        in_time(lambda: os.pwrite(fd, b"d" * 100, 3 * MIB))
        assert daemon.ops("write") == [["write", "f", 3 * MIB, 100, False]], "not a block that is here"
        in_time(lambda: os.pwrite(fd, b"e" * 100, 2 * MIB))
        assert not daemon.ops("write")
        assert daemon.call("collect", name="f")["ranges"] == [[2, 1]]
        data = (daemon.root / "f").read_bytes()
        assert data[100:104] == b"aaaa"
        assert data[200:204] == b"cccc"
        assert data[MIB - 10 : MIB + 4086] == b"b" * 4096
        assert data[2 * MIB : 2 * MIB + 100] == b"e" * 100
        assert in_time(lambda: os.pread(fd, 4, 200)) == b"cccc"
    finally:
        os.close(fd)


def test_a_new_file_grows_under_a_budget(daemon: Daemon) -> None:
    daemon.call("plan", name="new", mode=RANGED, flags=ALL_PRESENT, block_bytes=MIB, grant=64 * MIB)
    in_time(lambda: (daemon.mount / "new").write_bytes(b"n" * (3 * MIB + 7)))
    assert not daemon.ops("write")
    assert (daemon.root / "new").read_bytes() == b"n" * (3 * MIB + 7)
    assert in_time(lambda: os.stat(daemon.mount / "new").st_size) == 3 * MIB + 7


def test_writes_without_block_size_are_counted_only(daemon: Daemon) -> None:
    path = ranged(daemon, flags=ALL_PRESENT, block_bytes=0, grant=MIB)
    with in_time(lambda: open(path, "r+b", buffering=0)) as f:
        in_time(lambda: f.write(b"x" * 10))
        collected = daemon.call("collect", name="f")
        assert collected == {"bytes": 10, "left": MIB - 10, "ranges": [], "untracked": True}


def test_many_ranges_are_all_told(daemon: Daemon) -> None:
    path = ranged(daemon, flags=ALL_PRESENT, block_bytes=512, grant=1 << 30)
    count = 5000
    fd = in_time(lambda: os.open(path, os.O_RDWR))

    def work() -> None:
        for i in range(count):
            os.pwrite(fd, b"x", i * 1024)

    try:
        in_time(work)
        assert daemon.call("collect", name="f")["ranges"] == [[2 * i, 1] for i in range(count)]
        assert daemon.call("collect", name="f")["ranges"] == []
    finally:
        os.close(fd)


def test_another_users_write_to_a_suid_file_reaches_the_daemon_with_notice(daemon: Daemon, everyones: Path) -> None:
    other = Daemon(everyones, allow_other=True)
    try:
        path = ranged(other, flags=ALL_PRESENT | SUID, grant=64 * MIB)
        os.chmod(other.root, 0o755)
        os.chmod(other.root / "f", 0o4777)
        pwrite(path, b"root", 0)
        assert not other.ops("write"), "root keeps them"
        script = f"import os; os.pwrite(os.open({str(path)!r}, os.O_WRONLY), b'them', 0)"
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        subprocess.run(["/usr/bin/python3", "-c", script], **nobody, check=True, timeout=20)  # type: ignore[call-overload]
        assert other.ops("write") == [["write", "f", 0, 4, True]]
        assert (other.root / "f").read_bytes()[:4] == b"them"
    finally:
        other.close()


def test_clear_answers_at_once_when_nobody_reads(daemon: Daemon) -> None:
    path = ranged(daemon, present=[[0, BLOCKS]])
    fd = in_time(lambda: os.open(path, os.O_RDONLY))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        in_time(lambda: os.pread(fd, 4096, MIB))
        daemon.call("clear", name="f", first=1, count=1)
        daemon.call("clear", name="nobody", first=1, count=1 << 40)
        in_time(lambda: os.pread(fd, 4096, MIB + 8192))
        assert daemon.ops("read")
        in_time(lambda: os.pread(fd, 4096, 2 * MIB))
        assert not daemon.ops("read")
    finally:
        os.close(fd)


@pytest.fixture
def slow(start: Callable[..., Daemon]) -> tuple[Daemon, Daemon]:
    """Two mounts: the files behind the second lie in the first, whose daemon can hold a read up."""
    below = start()
    above_folder = below.mount.parent / "above"
    above_folder.mkdir()
    (above_folder / "root").symlink_to(below.mount)
    return below, Daemon(above_folder)


def test_clear_waits_for_a_read_in_progress(slow: tuple[Daemon, Daemon]) -> None:
    below, above = slow
    try:
        below.file("f", b"x" * (2 * MIB))
        below.call("hold", name="f")
        above.call("plan", name="f", mode=RANGED, block_bytes=MIB, block_count=2, present=[[0, 2]])
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(pread(above.mount / "f", 4096, 0)))
        reader.start()
        assert until(lambda: bool(below.ops("read")))
        first = above.start("clear", name="f", first=0, count=1)
        second = above.start("clear", name="f", first=1, count=1)
        assert above.call("dump"), "the channel is not held up"
        assert not until(lambda: len(above._answers) < 2, 0.3), "both still wait"
        below.call("unhold", name="f")
        first()
        second()
        reader.join(10)
        assert got == [b"x" * 4096]
        assert not above.ops("read")
    finally:
        above.close()


def test_a_node_dropped_in_use_lives_until_the_read_ends(slow: tuple[Daemon, Daemon]) -> None:
    below, above = slow
    try:
        below.file("f", b"x" * MIB)
        below.call("hold", name="f")
        above.call("plan", name="f", mode=RANGED, block_bytes=MIB, block_count=1, present=[[0, 1]])
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(pread(above.mount / "f", 4096, 0)))
        reader.start()
        assert until(lambda: bool(below.ops("read")))
        above.call("drop", name="f")
        above.call("clear", name="f", first=0, count=1)
        below.call("unhold", name="f")
        reader.join(10)
        assert got == [b"x" * 4096]
    finally:
        above.close()


def test_lseek_on_passthrough_files_and_what_takes_room_is_the_daemons(daemon: Daemon) -> None:
    path = daemon.file("f", b"d" * MIB)
    daemon.file("g", b"")
    for name in "fg":
        daemon.call("plan", name=name, mode=PASSTHROUGH)

    def work() -> None:
        with open(path, "r+b") as f, open(daemon.mount / "g", "r+b") as g:
            os.posix_fallocate(f.fileno(), 0, 2 * MIB)  # the C library writes where it is refused
            assert os.stat(path).st_size == 2 * MIB
            assert os.copy_file_range(f.fileno(), g.fileno(), MIB, 0, 4 * MIB) == MIB  # as does the kernel
            assert os.lseek(f.fileno(), 0, os.SEEK_HOLE) == os.lseek(open_below.fileno(), 0, os.SEEK_HOLE)
            assert os.lseek(g.fileno(), 0, os.SEEK_DATA) == 4 * MIB
            with pytest.raises(OSError) as error:
                os.lseek(f.fileno(), 3 * MIB, os.SEEK_DATA)
            assert error.value.errno == errno.ENXIO

    with open(daemon.root / "f", "rb") as open_below:
        in_time(work)
    assert (daemon.root / "g").read_bytes() == bytes(4 * MIB) + b"d" * MIB
    assert {call[0] for call in daemon.call("upcalls")} - {47} == {43, 53}


def test_the_same_on_ranged_files_is_the_daemons(daemon: Daemon) -> None:
    path = ranged(daemon, present=[[0, BLOCKS]])
    whole = ranged(daemon, "whole", flags=ALL_PRESENT)

    def work() -> None:
        with open(path, "r+b") as f, open(whole, "r+b") as w:
            assert os.lseek(w.fileno(), 0, os.SEEK_HOLE) == BLOCKS * MIB
            for call in (
                lambda: os.lseek(f.fileno(), 0, os.SEEK_HOLE),
                lambda: os.posix_fallocate(f.fileno(), 0, 9 * MIB),
                lambda: os.copy_file_range(f.fileno(), w.fileno(), 10),
            ):
                try:
                    call()
                except OSError as e:
                    assert e.errno == errno.EOPNOTSUPP

    in_time(work)
    seen = daemon.call("upcalls")
    assert [call[:2] for call in seen][:3] in ([[46, "f"], [43, "f"], [53, "f"]], [[46, "f"], [43, "f"], [47, "f"]])
    assert all(call[3] == os.geteuid() for call in seen)


def test_long_answers_go_around_the_socket(daemon: Daemon) -> None:
    path = daemon.file("f", os.urandom(BLOCKS * MIB + 5))
    daemon.call("plan", name="f", mode=0, hand_over=True)
    data = (daemon.root / "f").read_bytes()
    for size, offset in ((MIB, 0), (MIB, BLOCKS * MIB - 4096), (1, 1), (100, BLOCKS * MIB + 100)):
        assert pread(path, size, offset) == data[offset : offset + size]
    with ThreadPoolExecutor(8) as readers:
        wanted = [(offset % BLOCKS) * MIB + 4096 for offset in range(64)]
        for offset, got in zip(wanted, readers.map(partial(pread, path, MIB), wanted), strict=True):
            assert got == data[offset : offset + MIB]
    reads = daemon.ops("read")
    assert max(size for _, _, _, size in reads) == MIB
    assert daemon.call("handed_over") == len(reads) > 4
    assert not answers_held(daemon)
    assert daemon.stderr() == ""


def test_a_long_answer_of_another_slot_is_an_error(daemon: Daemon) -> None:
    path = daemon.file("f", os.urandom(MIB))
    daemon.call("plan", name="f", mode=0, hand_over=True)
    for wrong in (700 + 77, 512, 699, 700 + 256, 999):
        daemon.call("misdirect", code=wrong)
        with pytest.raises(OSError) as error:
            pread(path, MIB, 0)
        assert error.value.errno == errno.EIO, "not one that the kernel refuses: the reader would wait for ever"
    daemon.call("misdirect", code=0)
    assert pread(path, MIB, 0) == (daemon.root / "f").read_bytes()
    assert not answers_held(daemon), "those that were passed over are closed"


def test_more_long_answers_on_their_way_than_slots(daemon: Daemon) -> None:
    size, count = 16384, 400
    path = daemon.file("f", os.urandom(size * count))
    data = (daemon.root / "f").read_bytes()
    daemon.call("plan", name="f", mode=0, hand_over=True, direct_io=True)  # else the kernel sends few at a time
    daemon.call("hold", name="f")
    with ThreadPoolExecutor(count) as readers:
        got = [readers.submit(pread, path, size, i * size) for i in range(count)]
        asked: list[object] = []
        assert until(lambda: bool(asked.extend(daemon.ops("read")) or len(asked) == count), 20), len(asked)
        os.kill(daemon.channel_pid, signal.SIGSTOP)
        try:
            daemon.call("unhold", name="f")
            assert until(lambda: daemon.call("handed_over") == count)
        finally:
            os.kill(daemon.channel_pid, signal.SIGCONT)
        for i, answer in enumerate(got):
            assert answer.result() == data[i * size :][:size]
    assert not answers_held(daemon)
    assert daemon.stderr() == ""


def answers_held(daemon: Daemon) -> int:
    return sum("aof2-answer" in name for name in daemon.channel_files())


def test_look_ups_of_xattrs(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    daemon.call("xattr", name="f", key="user.mine", value="yes")
    capability = struct.pack("<5I", 0x02000000, 1 << 10, 0, 0, 0)  # cap_net_bind_service, as setcap writes it
    daemon.call("xattr", name="f", key="security.capability", value=capability.decode("latin-1"))

    def get(key: str) -> bytes | int | None:
        try:
            return os.getxattr(path, key)
        except OSError as e:
            return e.errno

    assert in_time(lambda: get("user.mine")) == b"yes"
    assert ["getxattr", "f", "user.mine"] in daemon.ops("getxattr")
    for key in ("security.selinux", "security.capability", "system.posix_acl_access", "system.posix_acl_default"):
        assert in_time(lambda key=key: get(key)) in (errno.ENODATA, errno.EOPNOTSUPP)
    assert not daemon.ops("getxattr")
    daemon.call("caps", name="f", on=True)
    assert in_time(lambda: get("security.capability")) == capability
    daemon.call("caps", name="f", on=False)
    assert in_time(lambda: get("security.capability")) == errno.ENODATA


def test_ioctl_is_refused_without_being_switched_off(daemon: Daemon) -> None:
    import fcntl

    path = daemon.file("f", b"abc")

    def work() -> int | None:
        with open(path, "rb") as f:
            try:
                fcntl.ioctl(f, 0x80086601, bytearray(8))  # FS_IOC_GETFLAGS
            except OSError as e:
                return e.errno
        return 0

    assert [in_time(work), in_time(work)] == [errno.ENOTTY] * 2


def test_tmpfile_is_asked_of_the_daemon(daemon: Daemon) -> None:
    with pytest.raises(OSError) as error:
        in_time(lambda: os.open(daemon.mount, os.O_TMPFILE | os.O_RDWR))
    assert error.value.errno == errno.EOPNOTSUPP
    assert [call[0] for call in daemon.call("upcalls")] == [51]


def test_invalidation(daemon: Daemon) -> None:
    path = daemon.file("f", b"old")
    assert in_time(path.read_bytes) == b"old"
    assert os.stat(path).st_size == 3
    (daemon.root / "f").write_bytes(b"newer")
    assert os.stat(path).st_size == 3, "the kernel may keep attributes for a minute"
    daemon.call("invalidate_attr", name="f")
    assert until(lambda: os.stat(path).st_size == 5)
    assert in_time(path.read_bytes) == b"newer"
    (daemon.root / "f").unlink()
    daemon.call("invalidate_entry", name="f")
    assert until(lambda: not path.exists())
