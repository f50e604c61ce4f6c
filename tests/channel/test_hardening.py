"""Messages that lie, tables that are full, sockets that are small: on a channel built with the sanitizers."""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.channel.support import (
    ALL_PRESENT,
    MIB,
    PASSTHROUGH,
    RANGED,
    TOP,
    Daemon,
    compiled,
    in_time,
    mounted,
    until,
)

pytestmark = pytest.mark.timeout(120)
SOURCES = sorted((TOP / "native" / "channel").glob("*.c"))


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("asan") / "channel", SOURCES, "address,undefined")


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("tsan") / "channel", SOURCES, "thread")


@pytest.fixture
def tough(start: Callable[..., Daemon], checked: Path) -> Iterator[Daemon]:
    """Everything still works at the end, and no sanitizer has said a word."""
    daemon = start(channel=str(checked))
    yield daemon
    assert in_time((daemon.file("still", b"works")).read_bytes) == b"works"
    path = daemon.file("passed", b"through")
    daemon.call("plan", name="passed", mode=PASSTHROUGH)
    assert in_time(path.read_bytes) == b"through"
    assert "ERROR" not in daemon.stderr()
    assert "runtime error" not in daemon.stderr()


def control(kind: int, *parts: bytes) -> str:
    return (struct.pack("<HHI", kind, 0, 0) + b"".join(parts)).hex()


def test_control_messages_that_lie(tough: Daemon) -> None:
    u64 = struct.Struct("<Q").pack
    big = u64(2**64 - 1)
    messages = [
        "",
        "00",
        control(0),
        control(99, big * 4),
        control(1, u64(5)),  # NODE, cut short
        control(1, u64(5), struct.pack("<II", 7, 0), big, big),  # an unknown mode
        control(1, u64(5), struct.pack("<II", RANGED, 0), big, big),  # no descriptor
        control(2, u64(5), u64(6)),  # HANDLE, cut short
        control(3, u64(5), big, big),
        control(4, u64(5), big, big),
        control(3, u64(5), big, u64(0)),
        control(5, u64(5), big),
        control(6, u64(77)),
        control(7, u64(77)),
        control(9, u64(12345), struct.pack("<i", 0)),  # an answer nobody waits for
        control(9, u64(12345), struct.pack("<i", 1)),
        control(9, u64(12345), struct.pack("<i", -(2**31))),
        control(6, u64(5)) + "00",
        control(18, u64(5), big, struct.pack("<I", 0)),  # BYTES, cut short
        control(18, u64(5), big, struct.pack("<II", 256, 5)),  # no such slot
        control(18, u64(5), big, struct.pack("<II", 2**32 - 1, 5)),
        control(18, u64(5), big, struct.pack("<II", 0, MIB + 1)),  # longer than any answer
        control(18, u64(5), big, struct.pack("<II", 0, 2**32 - 1)),
        control(18, u64(5), big, struct.pack("<II", 0, 5)) + "00",
        "ff" * 70_000,
    ]
    for message in messages:
        for fds in (0, 1, 3):
            if message or not fds:
                tough.call("raw", where="control", data=message, fds=fds)
    tough.call("raw", where="control", data=control(7, u64(5)))  # with a descriptor one of them was a NODE
    assert tough.call("dump") == []
    assert until(lambda: "that is none" in tough.stderr())
    node = tough.call("info")
    assert node["pid"] == tough.channel_pid
    assert tough.channel_files().count("/dev/null") <= 2, "no descriptor was kept (stdin, stdout)"


def test_replies_that_lie(tough: Daemon) -> None:
    header = struct.Struct("=IiQ").pack
    for message in (
        "",
        "00",
        header(16, 0, 2**40).hex(),
        header(4, 0, 2).hex(),
        header(2**32 - 1, 0, 2).hex(),
        header(16, -(2**31), 6).hex(),
        *(header(16, -error, 2**40).hex() for error in (600, 699, 700, 955, 956, 999, 1000)),
        header(16, 5, 0).hex(),  # a notification nobody knows
        (header(16 + 200_000, 0, 2**50) + bytes(200_000)).hex(),
    ):
        tough.call("raw", where="fuse", data=message)
        assert in_time(lambda: os.listdir(tough.mount)) is not None


def test_notifications_that_lie(tough: Daemon) -> None:
    header = struct.Struct("=IiQ").pack
    for message in (
        "",
        "00",
        header(16, 2, 0).hex(),  # INVAL_INODE without a body
        header(16, 99, 0).hex(),
        header(16, 0, 4).hex(),  # a reply
        header(16, -5, 4).hex(),
        header(17, 2, 0).hex(),
        (header(16 + 24, 2, 0) + struct.pack("=Qqq", 2**63, -(2**62), 2**62)).hex(),
        (header(16 + 16, 3, 0) + struct.pack("=QII", 1, 2**31, 0)).hex(),
        "ff" * 100_000,
    ):
        tough.call("raw", where="notify", data=message)
    assert until(lambda: "a notification of" in tough.stderr())


def test_random_bytes_on_every_socket(tough: Daemon) -> None:
    rng = random.Random(7)
    for i in range(600):
        data = bytearray(rng.randbytes(rng.choice([1, 8, 16, 24, 40, 48, 64, 200])))
        where = ("control", "notify", "fuse")[i % 3]
        if where == "control" and len(data) >= 8:
            data[:8] = struct.pack("<HHI", rng.randrange(19), 0, i)
        if where == "fuse" and len(data) >= 16:
            data[:16] = struct.pack("=IiQ", len(data), 0, 2**62 + i)
        if where == "notify" and len(data) >= 16:
            data[:16] = struct.pack("=IiQ", len(data), rng.randrange(2, 7), 0)
        tough.call("raw", where=where, data=data.hex())


def test_more_open_files_than_room(start: Callable[..., Daemon], checked: Path) -> None:
    daemon = start(channel=str(checked), arguments=["--handles-max=4", "--nodes-max=3"])
    for name in "abcde":
        daemon.file(name, b"data of " + name.encode())
        daemon.call("plan", name=name, mode=PASSTHROUGH)

    def open_all(names: str) -> list[int]:
        out = []
        for name in names:
            try:
                out.append(os.open(daemon.mount / name, os.O_RDONLY))
            except OSError as e:
                assert e.errno == errno.ENFILE
        return out

    fds = in_time(lambda: open_all("abcde"))
    assert len(fds) == 3
    assert [os.pread(fd, 100, 0) for fd in fds] == [b"data of a", b"data of b", b"data of c"]
    for fd in fds:
        os.close(fd)
    assert until(lambda: not daemon.call("dump"))
    fds = in_time(lambda: open_all("cde"))
    assert len(fds) == 3
    for fd in fds:
        os.close(fd)
    assert "ERROR" not in daemon.stderr()


def test_no_room_to_remember_requests(start: Callable[..., Daemon], checked: Path) -> None:
    daemon = start(channel=str(checked), arguments=["--pending-max=1"])
    path = daemon.file("f", b"abc")
    daemon.call("plan", name="f", mode=RANGED, flags=ALL_PRESENT)
    for _ in range(50):
        assert in_time(path.read_bytes) == b"abc"


def test_more_descriptors_than_allowed(start: Callable[..., Daemon], checked: Path) -> None:
    """NODE arrives without its descriptor: the file is served by the daemon instead."""
    daemon = start(channel=str(checked))
    subprocess.run(["prlimit", f"--pid={daemon.channel_pid}", "--nofile=12:12"], check=True, timeout=10)
    opened = []
    for i in range(20):
        path = daemon.file(f"f{i}", b"%d" % i)
        daemon.call("plan", name=f"f{i}", mode=RANGED, flags=ALL_PRESENT)
        opened.append(in_time(lambda path=path: open(path, "rb")))
    assert [in_time(f.read) for f in opened] == [b"%d" % i for i in range(20)]
    for f in opened:
        f.close()
    assert [code for _, code in daemon.call("refused")][:5] == [errno.EMFILE] * 5
    assert "ERROR" not in daemon.stderr()


def test_small_sockets_mean_small_requests(start: Callable[..., Daemon]) -> None:
    daemon = start(arguments=["--reply-room=300000"])
    assert daemon.info["max_write"] < 300_000
    assert daemon.info["max_write"] % 4096 == 0
    path = daemon.mount / "f"
    data = os.urandom(2 * MIB + 5)
    in_time(lambda: path.write_bytes(data))
    assert in_time(path.read_bytes) == data


def stress(daemon: Daemon, seconds: float) -> None:
    """Readers and writers on ranged and passthrough files and one whose answers are handed over, while masks, budgets
    and notifications change."""
    data = os.urandom(4 * MIB)
    ranged = daemon.file("r", data)
    passed = daemon.file("p", data)
    handed = daemon.file("h", data)
    daemon.call("plan", name="h", mode=0, hand_over=True)
    daemon.call("plan", name="r", mode=RANGED, block_bytes=65536, block_count=64, present=[[0, 64]], grant=1 << 40)
    daemon.call("plan", name="p", mode=PASSTHROUGH)
    stop = threading.Event()
    failed: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            path = (passed, ranged, handed)[seed % 3]
            try:
                with open(path, "r+b", buffering=0) as f:
                    for _ in range(10):
                        offset = rng.randrange(len(data) - 8192)
                        got = os.pread(f.fileno(), 8192, offset)
                        if got != data[offset : offset + 8192]:
                            failed.append((str(path), offset))
                        os.pwrite(f.fileno(), data[offset : offset + 4096], offset)
                    os.lseek(f.fileno(), 0, os.SEEK_HOLE)
            except OSError as e:
                if e.errno != errno.EOPNOTSUPP:
                    failed.append(e)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    threading.Timer(seconds, stop.set).start()
    rng = random.Random(1)
    while not stop.is_set():
        first, count = rng.randrange(64), rng.randrange(1, 8)
        daemon.call("clear", name="r", first=first, count=count)
        daemon.call("collect", name="r")
        daemon.call("invalidate_inode", name="r")
        daemon.call("blocks", name="r", first=first, count=count)
        daemon.call("dump")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert failed == []


def test_stress(start: Callable[..., Daemon], checked: Path) -> None:
    daemon = start(channel=str(checked))
    stress(daemon, 4)
    assert daemon.stderr() == ""


def test_stress_without_races(
    start: Callable[..., Daemon], raced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request's place is used for its answer, which the daemon gives after it received what these sent.
    (tmp_path / "suppressions").write_text("race:^forward$\nrace:^event_send2$\n")
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={tmp_path / 'suppressions'}")
    daemon = start(channel=str(raced))
    stress(daemon, 4)
    assert daemon.stderr() == ""


@pytest.mark.parametrize(
    ("offered", "transport"),
    [
        ("N", "read: /sys/module/fuse/parameters/enable_uring is N and only root may change it"),
        ("Y", "io_uring, "),
    ],
)
def test_as_another_user_through_fusermount3(everyones: Path, offered: str, transport: str) -> None:
    """In a mount namespace where /dev/fuse is everyone's, as on most machines; the channel runs as nobody."""
    parameter = Path("/sys/module/fuse/parameters/enable_uring")
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or not parameter.exists():
        pytest.skip("takes root to set up, and FUSE over io_uring in the kernel")
    before = parameter.read_text()
    parameter.write_text(offered)
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", TOP / "tests/channel/as_nobody.sh", everyones],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=TOP,
        env={**os.environ, "PYTHON": str(TOP / ".venv/bin/python")},
    )
    parameter.write_text(before)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passthrough False" in result.stdout
    assert f"transport {transport}" in result.stdout
    assert "read b'hello'" in result.stdout
    assert "refused [[2, 1]]" in result.stdout, "no passthrough, so served by preads"
    assert "ops []" in result.stdout
    assert not mounted(everyones / "d" / "mnt")
