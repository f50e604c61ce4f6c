"""Mounting, forwarding, passthrough, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.channel.support import MIB, PASSTHROUGH, Daemon, in_time, mounted, until

pytestmark = pytest.mark.timeout(90)


def error_of(work: Callable[[], object]) -> int | None:
    """Its errno. 0: none."""
    try:
        work()
    except OSError as e:
        return e.errno
    return 0


def test_a_mount_answers_through_the_daemon(daemon: Daemon) -> None:
    daemon.file("plain", b"hello")
    assert in_time(lambda: os.listdir(daemon.mount)) == ["plain"]
    assert in_time(lambda: (daemon.mount / "plain").read_bytes()) == b"hello"
    in_time(lambda: (daemon.mount / "new").write_bytes(b"x" * 300_000))
    assert (daemon.root / "new").read_bytes() == b"x" * 300_000
    assert {op[0] for op in daemon.ops()} >= {"open", "read", "create", "write", "release", "flush"}
    line = next(x for x in Path("/proc/self/mountinfo").read_text().splitlines() if f" {daemon.mount} " in x)
    assert " fuse.aof2 aof2 " in line
    assert "nosuid,nodev" in line
    assert "default_permissions" in line
    assert daemon.stderr() == ""


def test_what_the_kernel_was_told(daemon: Daemon) -> None:
    assert daemon.info["max_write"] == MIB
    assert daemon.info["passthrough"] is True
    major, minor = daemon.info["device"]
    assert Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb").read_text() == "1024\n"


def test_passthrough_reads_and_writes_the_backing_file(daemon: Daemon) -> None:
    path = daemon.file("f", os.urandom(3 * MIB))
    daemon.call("plan", name="f", mode=PASSTHROUGH)

    def work() -> None:
        with open(path, "r+b", buffering=0) as f:
            assert f.read() == (daemon.root / "f").read_bytes()
            f.seek(MIB)
            f.write(b"there")
            assert (daemon.root / "f").read_bytes()[MIB : MIB + 5] == b"there"
            with mmap.mmap(f.fileno(), 0) as m:
                m[:4] = b"mmap"
                assert m[MIB : MIB + 5] == b"there"
            f.seek(0, os.SEEK_END)
            f.write(b"grown")
        assert path.stat().st_size == 3 * MIB + 5

    in_time(work)
    assert (daemon.root / "f").read_bytes()[:4] == b"mmap"
    ops = {op[0] for op in daemon.ops()}
    assert ops >= {"open", "release"}
    assert not ops & {"read", "write", "flush"}


def test_a_created_file_is_passed_through(daemon: Daemon) -> None:
    daemon.call("plan", name="new", mode=PASSTHROUGH)

    def work() -> None:
        with open(daemon.mount / "new", "wb") as f, open(daemon.mount / "new", "rb") as again:
            f.write(b"one" * 1000)
            f.flush()
            assert again.read() == b"one" * 1000

    in_time(work)
    assert not daemon.ops("write", "read", "flush")


def test_one_backing_id_serves_all_opens_and_goes_with_the_last(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    daemon.call("plan", name="f", mode=PASSTHROUGH)

    def work() -> None:
        for _ in range(3):
            with open(path, "rb") as a, open(path, "r+b") as b:
                assert a.read() == b.read() == b"abc"
                assert len(daemon.call("dump")) == 2

    in_time(work)
    assert until(lambda: not daemon.call("dump"))
    assert until(lambda: str(daemon.root / "f") not in daemon.channel_files())


def test_a_dropped_file_can_be_leased_once_settled(daemon: Daemon) -> None:
    """A lease says that nobody can write: neither the channel's descriptor nor the kernel's backing file is left."""
    path = daemon.file("f", b"abc")
    daemon.call("plan", name="f", mode=PASSTHROUGH)
    for _ in range(20):
        in_time(lambda: path.write_bytes(b"def"))
        assert until(lambda: bool(daemon.ops("release")))
        daemon.call("caught_up")
        with open(daemon.root / "f", "rb") as f:
            fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def test_probe(daemon: Daemon, tmp_path: Path) -> None:
    daemon.call("info")
    (tmp_path / "file").write_bytes(b"")
    assert daemon.call("probe", path=str(tmp_path / "file")) == 0
    assert daemon.call("probe", path="/dev/null") != 0


def test_a_killed_daemon_leaves_enotconn_at_once(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    assert in_time(path.read_bytes) == b"abc"
    daemon.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert until(lambda: in_time(lambda: error_of(lambda: os.listdir(daemon.mount)), 2) == errno.ENOTCONN, 1)
    assert time.monotonic() - killed < 1
    assert in_time(lambda: error_of(lambda: os.stat(path)), 2) == errno.ENOTCONN
    assert mounted(daemon.mount), "files must not go into the folder below"
    assert until(lambda: not daemon.channel_alive(), 1)


def test_a_read_in_progress_ends_when_the_daemon_is_killed(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    daemon.call("hold", name="f")
    reader = subprocess.Popen(["cat", path], stderr=subprocess.DEVNULL)
    assert until(lambda: bool(daemon.ops("read")))
    daemon.process.kill()
    assert reader.wait(2) != 0
    assert until(lambda: not daemon.channel_alive(), 1)


@pytest.mark.parametrize("_again", range(3))
def test_a_notification_that_waits_for_a_page_does_not_keep_the_mount_alive(daemon: Daemon, _again: int) -> None:
    """Each of two threads sees that the daemon is gone: the first must not be cut short by the second."""
    path = daemon.file("f", b"abc")
    daemon.call("hold", name="f")
    reader = subprocess.Popen(["cat", path], stderr=subprocess.DEVNULL)
    assert until(lambda: bool(daemon.ops("read")))
    daemon.call("invalidate_inode", name="f")
    tasks = Path(f"/proc/{daemon.channel_pid}/task")
    stuck = lambda: any((t / "stat").read_text().rpartition(")")[2].split()[0] == "D" for t in tasks.iterdir())  # noqa: E731
    assert until(stuck), "the notify thread waits for the page"
    daemon.process.kill()
    assert reader.wait(2) != 0
    assert until(lambda: not daemon.channel_alive(), 1)


def test_umount_ends_channel_and_daemon(daemon: Daemon) -> None:
    daemon.file("f", b"abc")
    assert in_time((daemon.mount / "f").read_bytes) == b"abc"
    subprocess.run(["umount", daemon.mount], check=True, timeout=10)
    assert daemon.process.wait(5) == 0, daemon.stderr()
    assert not daemon.channel_alive()
    assert daemon.stderr() == ""


def test_a_mount_point_that_is_none(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import trio

    from aof2.fs.channel import open_channel
    from aof2.fs.channel_process import MountOptions
    from aof2.fs.channel_wire import ChannelError

    async def work() -> None:
        async with open_channel(tmp_path / "nowhere", MountOptions()):
            pass

    with pytest.raises(ChannelError, match=r"nowhere: not mounted: the mount point: No such file"):
        trio.run(work)


def test_a_channel_that_is_killed_is_an_error_and_leaves_a_dead_mount(daemon: Daemon) -> None:
    daemon.file("f", b"abc")
    os.kill(daemon.channel_pid, signal.SIGKILL)
    assert daemon.process.wait(5) != 0
    assert "the channel ended by itself" in daemon.stderr()
    assert mounted(daemon.mount)
    assert until(lambda: in_time(lambda: error_of(lambda: os.listdir(daemon.mount)), 2) == errno.ENOTCONN, 1)


def test_unmount_waits_for_what_is_open(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    with in_time(lambda: open(path, "rb", buffering=0)) as f:
        daemon.call("unmount")
        assert not mounted(daemon.mount)
        assert in_time(f.read) == b"abc"
        assert daemon.process.poll() is None
    assert daemon.process.wait(5) == 0, daemon.stderr()
    assert daemon.stderr() == ""


def test_an_end_without_umount_takes_the_mount_away(daemon: Daemon) -> None:
    daemon.file("f", b"abc")
    daemon.call("stop")
    assert daemon.process.wait(10) == 0, daemon.stderr()
    assert not mounted(daemon.mount)
    assert not daemon.channel_alive()


def test_read_only_and_noexec(start: Callable[..., Daemon]) -> None:
    daemon = start(read_only=True, noexec=True, fsname="my,own\\name")
    path = daemon.file("f", b"#!/bin/sh\n")
    os.chmod(daemon.root / "f", 0o755)
    assert in_time(lambda: error_of(lambda: open(path, "r+b"))) == errno.EROFS
    assert in_time(lambda: error_of(lambda: subprocess.run([path], check=False))) == errno.EACCES
    assert any(" my,own\\134name ro" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
