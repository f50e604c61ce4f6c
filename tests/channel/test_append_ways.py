"""Whose the segment of a stream is, and what becomes of a write that finds no room or fails: nothing of it is there."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.kinds.kernel import PARTIAL_BYTES_MAX, AppendState
from aof2.engine.segment.recovery import recover_stream
from tests.channel.appending import RECORD, Appending, acknowledged, check_lines, writers
from tests.channel.streams import FOOTER, HEADER, STREAM_INO, scanned, segments
from tests.channel.support import MIB, TOP, Daemon, compiled, in_time, until

pytestmark = pytest.mark.timeout(120)
MNT_FORCE = 1


# -- room -----------------------------------------------------------------------------------------------------------


def test_room(append: Callable[..., Appending]) -> None:
    """What does not fit before its end, with a footer behind, is forwarded as a whole; with more room it goes on."""
    line = b"x" * 63 + b"\n"
    room = HEADER + 3 * (RECORD + 64) + FOOTER
    a = append(room_bytes=room, fails=errno.EDQUOT)
    fd = a.open()
    for _ in range(2):
        a.write(fd, line)
    with pytest.raises(OSError) as caught:
        a.write(fd, line * 2)
    assert caught.value.errno == errno.EDQUOT
    a.write(fd, line)
    with pytest.raises(OSError):
        a.write(fd, line)
    with pytest.raises(OSError):
        a.write(fd, b"\n")
    assert a.asked() == [("write", 128), ("write", 64), ("write", 1)]
    path = segments(a.folder)[0]
    assert scanned(path, a.ino).record_count == 3
    assert path.stat().st_size == room
    a.write(fd, b"begun")  # takes no room before it is a record
    a.call("append_room", room_end=room + RECORD + 63)
    with pytest.raises(OSError):
        a.write(fd, b"x" * 58 + b"\n")
    assert a.asked() == [("partial", 5), ("write", 59)]
    a.call("append_room", room_end=room + RECORD + 64)
    a.write(fd, line)
    a.call("append_room", room_end=10)  # never less
    assert a.taken() == scanned(path, a.ino)
    assert a.payloads() == [line] * 4
    assert path.stat().st_size == room + RECORD + 64


def test_the_first_record_finds_no_room(append: Callable[..., Appending]) -> None:
    a = append(room_bytes=HEADER + RECORD + FOOTER, fails=errno.ENOSPC)
    fd = a.open()
    with pytest.raises(OSError):
        a.write(fd, b"\n")
    assert segments(a.folder)[0].stat().st_size == 0
    state = a.taken()
    assert state == (a.ino, 1, 0, 0, 0, 0, 0)


# -- who has it -------------------------------------------------------------------------------------------------------


def test_taken_and_given(append: Callable[..., Appending]) -> None:
    a = append()
    fd = a.open()
    a.write(fd, b"one\ntw")
    files = a.daemon.channel_files()
    assert str(segments(a.folder)[0]) in files
    state = a.taken()
    assert state is not None and state.record_count == 1
    assert str(segments(a.folder)[0]) not in a.daemon.channel_files()
    assert a.taken() is None
    assert a.call("append_state") is None
    a.write(fd, b"o\nth")  # forwarded, and given back
    assert a.asked() == [("partial", 2), ("write", 4)]
    a.write(fd, b"ree\n")
    assert a.asked() == []
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    assert a.payloads() == [b"one\n", b"two\n", b"three\n"]


def test_it_is_told_once(append: Callable[..., Appending]) -> None:
    a = append()
    fd = a.open()
    a.write(fd, b"begun")
    assert a.call("appended") == []
    for _ in range(3):
        a.write(fd, b"line\n")
    (told,) = a.call("appended")
    assert AppendState(*told).record_count == 1
    assert a.call("append_state")[4] == 3
    assert a.call("appended") == []
    a.write(fd, b"4\n5\n")
    a.write(fd, b"6\n")
    (told,) = a.call("appended")
    assert AppendState(*told).record_count == 5
    a.taken()
    a.call("append_give")
    a.write(fd, b"7\n")
    (told,) = a.call("appended")
    assert AppendState(*told) == scanned(segments(a.folder)[0], a.ino)


def test_it_is_told_when_half_of_the_room_is_used(append: Callable[..., Appending]) -> None:
    a = append(room_bytes=HEADER + 8 * (RECORD + 64))
    fd = a.open()
    line = b"x" * 63 + b"\n"

    def told() -> list[int]:
        a.write(fd, line)
        return [AppendState(*state).record_count for state in a.call("appended")]

    assert [told() for _ in range(6)] == [[1], [], [], [4], [], []]
    a.call("append_room", room_end=HEADER + 20 * (RECORD + 64))
    assert [told() for _ in range(12)] == [*[[]] * 6, [13], *[[]] * 5]


def test_taken_and_given_under_its_writers(append: Callable[..., Appending]) -> None:
    a = append(segment_bytes=200_000)
    processes = writers(a.path, 4, 1500, cut=True)
    a.call("append_cycle", times=300)
    acked = acknowledged(processes)
    assert acked == [1500] * 4
    a.taken()
    check_lines(a.payloads(), acked)
    assert a.daemon.stderr() == ""


def test_what_is_given_twice_is_not_taken(append: Callable[..., Appending]) -> None:
    a = append()
    a.call("append_give")
    assert until(lambda: "it has one" in a.daemon.stderr())
    fd = a.open()
    a.write(fd, b"one\n")
    assert a.taken() is not None
    assert a.payloads() == [b"one\n"]
    assert a.daemon.channel_files().count(str(segments(a.folder)[0])) == 0


def test_a_line_that_finds_no_place_comes_back(append: Callable[..., Appending]) -> None:
    """Of a handle that is not there."""
    a = append()
    a.call("append_partial", fh=4711, data=b"lost".hex())
    assert a.asked() == [("partial", 4)]
    assert a.call("begun") == [b"lost".hex()]


def test_lines_of_a_mount_that_goes_under_its_writers(append: Callable[..., Appending]) -> None:
    """They are told before its end."""
    a = append()
    fd = a.open()
    a.write(fd, b"begun")
    ctypes.CDLL(None).umount2(os.fsencode(a.daemon.mount), MNT_FORCE)  # busy: only the connection goes
    a.opened.clear()
    with pytest.raises(OSError):
        in_time(partial(os.write, fd, b"x"))
    os.close(fd)
    assert a.daemon.process.wait(20) == 0
    assert (a.folder / "begun").read_bytes() == b"begun"


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_channel_that_is_killed(append: Callable[..., Appending]) -> None:
    """What was acknowledged is in the file; of each writer at most the line it was at besides."""
    a = append()
    processes = writers(a.path, 4, 1_000_000)
    for process in processes:
        assert process.stdout
        assert int(process.stdout.readline()) == 64
    os.kill(a.daemon.channel_pid, signal.SIGKILL)
    acked = acknowledged(processes)
    assert min(acked) >= 64 and max(acked) < 1_000_000
    state = recover_stream(Env(), a.folder, stream_id=STREAM_INO)
    assert state.active and not state.damaged
    check_lines(a.payloads(), acked, beyond=1)


def limit(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_write_that_fails_leaves_nothing(append: Callable[..., Appending]) -> None:
    """It is the daemon's, and so are those that follow, until it gave the segment again."""
    a = append(fails=errno.EFBIG)
    fd = a.open()
    a.write(fd, b"before\nbeg")
    path = segments(a.folder)[0]
    before = scanned(path, a.ino)
    limit(a.daemon.channel_pid, 150_000)
    data = b"un\n" + b"".join(b"%d\n" % i for i in range(100_000))
    with pytest.raises(OSError) as caught:
        in_time(partial(os.write, fd, data))
    assert caught.value.errno == errno.EFBIG
    assert a.asked() == [("partial", 3), ("write", len(data))]
    assert scanned(path, a.ino) == before
    assert path.stat().st_size == before.end + FOOTER
    limit(a.daemon.channel_pid, resource.RLIM_INFINITY)
    with pytest.raises(OSError):
        in_time(partial(os.write, fd, b"small\n"))
    a.call("append_room", room_end=64 * MIB)
    with pytest.raises(OSError):
        in_time(partial(os.write, fd, b"small\n"))
    assert scanned(path, a.ino) == before
    a.call("set", fails=0)
    a.write(fd, b"un\n")
    a.write(fd, data)
    a.taken()
    assert b"".join(a.payloads()) == b"before\nbegun\n" + data
    assert a.daemon.stderr() == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    image, folder = tmp_path / "disk", tmp_path / "small"
    folder.mkdir()
    with open(image, "wb") as f:
        f.truncate(8 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("no loop devices here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_full(start: Callable[..., Daemon], small_disk: Path) -> None:
    a = Appending(start(), small_disk / "segments", fails=errno.ENOSPC)
    fd = a.open()
    acked, data = 0, b"x" * 1000 + b"\n"
    with pytest.raises(OSError) as caught:
        for _ in range(20_000):
            a.write(fd, data * 9)
            acked += 9
    assert caught.value.errno == errno.ENOSPC
    path = segments(a.folder)[0]
    assert acked > 1000
    assert scanned(path, a.ino).record_count == acked
    assert a.payloads() == [data] * acked
    assert a.taken() == scanned(path, a.ino)
    a.close(fd)


# -- with the sanitizers --------------------------------------------------------------------------------------------

SOURCES = sorted((TOP / "native" / "channel").glob("*.c"))


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_under_sanitizers(
    append: Callable[..., Appending], tmp_path: Path, sanitizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers, and the segment changing hands under them."""
    # A request's place is used for its answer, which the daemon gives after it received what this sent.
    (tmp_path / "suppressions").write_text("race:^forward$\nrace:^event_send2$\n")
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={tmp_path / 'suppressions'}")
    built = compiled(tmp_path / "channel", SOURCES, sanitizer)
    a = append(daemon={"channel": str(built)}, segment_bytes=3 * MIB)
    processes = writers(a.path, 4, 300, 2000, cut=True)
    a.call("append_cycle", times=100)
    acked = acknowledged(processes)
    fd = a.open()
    a.write(fd, b"4:0:" + b"x" * PARTIAL_BYTES_MAX)
    a.write(fd, b"x" * 2 * MIB + b"\n")
    a.close(fd)
    a.asked_until("release")
    a.taken()
    found = a.payloads()
    check_lines(found, [*acked, 1])
    assert len(found[-1]) == 4 + PARTIAL_BYTES_MAX + 2 * MIB + 1
    assert a.daemon.stderr() == ""
