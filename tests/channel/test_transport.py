"""How requests come, over io_uring or by read: told, the same to applications, and how either ends under load."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from aof2.fs.mountpoint import NO_DAEMON
from tests.channel.support import ALL_PRESENT, MIB, RANGED, Daemon, in_time, until

pytestmark = pytest.mark.timeout(120)
MNT_FORCE = 1
PARAMETER = Path("/sys/module/fuse/parameters/enable_uring")
LOAD = """
import os, sys
top = sys.argv[1]
mine = f"{top}/{os.getpid()}"
while True:
    try:
        with open(mine, "wb", buffering=0) as f:
            f.write(bytes(300_000))
        with open(mine, "rb", buffering=0) as f:
            f.read(4096)
        os.listdir(top)
        os.stat(mine)
        os.unlink(mine)
    except OSError:
        sys.exit(0)
"""


def loads(daemon: Daemon, n: int = 4) -> list[subprocess.Popen[bytes]]:
    started = [subprocess.Popen([sys.executable, "-c", LOAD, str(daemon.mount)]) for _ in range(n)]
    time.sleep(0.7)
    return started


def all_end(processes: list[subprocess.Popen[bytes]]) -> None:
    """None of them hangs in the kernel."""
    try:
        for process in processes:
            process.wait(10)
    finally:
        for process in processes:
            process.kill()


def test_it_is_told(daemon: Daemon, transport: str) -> None:
    cores = len(os.sched_getaffinity(0))
    assert daemon.info["transport"] in (f"io_uring, {cores} queues", "read: [mount] uring is off")
    assert daemon.info["transport"].startswith(transport)


def test_root_turns_it_on(start: Callable[..., Daemon], transport: str) -> None:
    if transport == "read":
        pytest.skip("nothing to turn on")
    PARAMETER.write_text("N")
    start()
    assert PARAMETER.read_text() == "Y\n"


def test_its_session_goes_before_those_that_compute(daemon: Daemon, transport: str) -> None:
    group = Path(f"/proc/{daemon.channel_pid}/autogroup")
    if transport == "read" or not group.exists() or os.geteuid() != 0:
        pytest.skip("over io_uring, as root, where the kernel groups sessions")
    assert group.read_text().rstrip().endswith("nice -10")


def test_a_mount_keeps_its_rings_when_the_kernel_offers_no_more(daemon: Daemon, transport: str) -> None:
    if transport == "read":
        pytest.skip("it has none")
    path = daemon.file("f", b"abc")
    PARAMETER.write_text("N")
    try:
        assert in_time(path.read_bytes) == b"abc"
        assert in_time(partial(os.listdir, daemon.mount)) == ["f"]
    finally:
        PARAMETER.write_text("Y")


@pytest.mark.parametrize("entries", [0, 64])
def test_more_requests_wait_than_there_are_entries(start: Callable[..., Daemon], entries: int) -> None:
    """Others go on meanwhile; with too few entries, once some are answered."""
    daemon = start(arguments=[f"--entries-max={entries}"])
    data = os.urandom(400 * 4096)
    path = daemon.file("held", data)
    daemon.file("other", b"abc")
    daemon.call("plan", name="held", mode=0, direct_io=True)
    fd = in_time(partial(os.open, path, os.O_RDONLY))
    daemon.call("hold", name="held")
    try:
        with ThreadPoolExecutor(400) as pool:
            got = [pool.submit(os.pread, fd, 4096, 4096 * i) for i in range(400)]
            seen: list[object] = []
            enough = 400 if not entries or not daemon.info["transport"].startswith("io_uring") else 64
            assert until(lambda: bool(seen.extend(daemon.ops("read")) or len(seen) >= enough), 20), len(seen)
            if enough == 400:
                assert in_time((daemon.mount / "other").read_bytes) == b"abc"
            daemon.call("unhold", name="held")
            assert [future.result(20) for future in got] == [data[4096 * i :][:4096] for i in range(400)]
    finally:
        os.close(fd)
    assert in_time((daemon.mount / "other").read_bytes) == b"abc"
    assert daemon.stderr() == ""


@pytest.mark.parametrize("plan", [{"mode": 0}, {"mode": RANGED, "flags": ALL_PRESENT, "grant": 1 << 40}])
def test_the_longest_requests(daemon: Daemon, plan: dict[str, int]) -> None:
    """1 MiB each, from several threads at once, of which each writes and reads again what is its own."""
    path = daemon.file("f", bytes(16 * MIB))
    daemon.call("plan", name="f", **plan, direct_io=True)
    fd = in_time(partial(os.open, path, os.O_RDWR))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            data = rng.randbytes(4096) * 256
            assert os.pwrite(fd, data, seed * MIB) == MIB
            assert os.pread(fd, MIB, seed * MIB) == data

    try:
        with ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(work, i) for i in range(16)]:
                future.result(60)
    finally:
        os.close(fd)
    longest = max((op[3] for op in daemon.ops("read", "write")), default=0)
    # Less a page: of buffers that begin in the middle of one.
    assert MIB - 4096 <= longest <= MIB if plan["mode"] == 0 else not longest
    assert daemon.stderr() == ""


def test_a_burst_of_long_requests_gives_its_memory_back(daemon: Daemon) -> None:
    """But for some of each core, which are kept for the next ones."""
    path = daemon.file("held", bytes(MIB))
    daemon.call("plan", name="held", mode=0, direct_io=True)
    fd = in_time(partial(os.open, path, os.O_RDWR))
    daemon.call("hold", name="held")
    n, kept = 300, 64 * len(os.sched_getaffinity(0))
    try:
        with ThreadPoolExecutor(n) as pool:
            got = [pool.submit(os.pread, fd, MIB, 0) for _ in range(n)]
            assert until(lambda: bool(daemon.ops("read")))
            daemon.call("unhold", name="held")
            assert all(future.result(60) == bytes(MIB) for future in got)
    finally:
        os.close(fd)
    status = Path(f"/proc/{daemon.channel_pid}/status")
    resident_kib = lambda: int(status.read_text().partition("VmRSS:")[2].split()[0])  # noqa: E731
    assert until(lambda: resident_kib() < (kept + 40) << 10), resident_kib()


def test_names_and_bytes_of_every_length(daemon: Daemon) -> None:
    """A request comes in parts over io_uring: none is cut, none is one too long."""
    for length in (1, 7, 8, 100, 255):
        name = "n" * length
        in_time(partial((daemon.mount / name).write_bytes, name.encode()))
        assert in_time((daemon.mount / name).read_bytes) == name.encode()
        assert in_time(partial(os.listdir, daemon.mount)) == [name]
        in_time(partial(os.unlink, daemon.mount / name))
    for size in (1, 4095, 4096, 4097, 131_071, 131_072, 131_073, MIB - 1, MIB, MIB + 1):
        path, data = daemon.mount / "f", os.urandom(size)
        in_time(partial(path.write_bytes, data))
        assert in_time(path.read_bytes) == data
    assert daemon.stderr() == ""


def test_an_interrupted_request_is_answered(daemon: Daemon) -> None:
    path = daemon.file("f", b"abc")
    daemon.call("hold", name="f")
    readers = [subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL) for _ in range(3)]
    assert until(lambda: bool(daemon.ops("read")))
    for reader, what in zip(readers, (signal.SIGTERM, signal.SIGINT, signal.SIGKILL), strict=True):
        reader.send_signal(what)
    daemon.file("other", b"def")
    assert in_time((daemon.mount / "other").read_bytes) == b"def"
    daemon.call("unhold", name="f")
    all_end(readers)
    assert in_time(path.read_bytes) == b"abc"


@pytest.mark.parametrize("what", ["channel", "daemon", "abort"])
def test_an_end_under_load(daemon: Daemon, what: str) -> None:
    """Every caller gets an error, the process is gone at once, and the mount answers ENOTCONN."""
    processes = loads(daemon)
    if what == "channel":
        os.kill(daemon.channel_pid, signal.SIGKILL)
    elif what == "daemon":
        daemon.process.kill()
    else:
        with contextlib.suppress(OSError), open(daemon.mount / "busy", "wb"):  # so that only the connection goes
            ctypes.CDLL(None).umount2(os.fsencode(daemon.mount), MNT_FORCE)
    all_end(processes)
    assert until(lambda: not daemon.channel_alive(), 5)
    with pytest.raises(OSError) as caught:
        in_time(partial(os.listdir, daemon.mount), 5)
    assert caught.value.errno in NO_DAEMON


def test_umount_under_load(daemon: Daemon) -> None:
    """Lazily: it ends with the last caller."""
    processes = loads(daemon)
    subprocess.run(["umount", "-l", daemon.mount], check=True, timeout=10)
    for process in processes:
        process.kill()
    all_end(processes)
    assert daemon.process.wait(10) == 0, daemon.stderr()
    assert not daemon.channel_alive()
    assert daemon.stderr() == ""


def test_an_end_while_requests_wait(daemon: Daemon) -> None:
    """Of those that the daemon has, and of those that no entry was left for."""
    path = daemon.file("held", bytes(200 * 4096))
    daemon.call("plan", name="held", mode=0, direct_io=True)
    fd = in_time(partial(os.open, path, os.O_RDONLY))
    daemon.call("hold", name="held")
    codes: list[int | None] = []

    def one(i: int) -> None:
        try:
            os.pread(fd, 4096, 4096 * i)
        except OSError as e:
            codes.append(e.errno)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(200)]
    for thread in threads:
        thread.start()
    assert until(lambda: bool(daemon.ops("read")))
    os.kill(daemon.channel_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with contextlib.suppress(OSError):  # it asks the mount
        os.close(fd)
    # Canceled: one that the kernel was about to put into an entry.
    assert set(codes) <= NO_DAEMON
    assert len(codes) == 200
    assert until(lambda: not daemon.channel_alive(), 5)
