"""Appending through the channel: what was acknowledged is in the segment once, whole and in order."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from aof2.engine.env import Env
from aof2.engine.kinds.kernel import PARTIAL_BYTES_MAX, Framing
from aof2.engine.segment.recovery import recover_stream
from tests.channel.appending import RECORD, Appending, acknowledged, check_lines, writers
from tests.channel.streams import HEADER, STREAM_INO, records, scanned, segments
from tests.channel.support import MIB, until

pytestmark = pytest.mark.timeout(120)


def test_lines_of_many_processes(append: Callable[..., Appending]) -> None:
    a = append()
    acked = acknowledged(writers(a.path, 4, 2000))
    assert acked == [2000] * 4
    assert a.asked_in_all(4) == [("release", 0)] * 4, "the daemon was asked for nothing else"
    state = a.taken()
    check_lines(a.payloads(), acked)
    assert state == scanned(segments(a.folder)[0], a.ino)
    assert a.daemon.stderr() == ""


def test_lines_by_pieces_of_many_processes(append: Callable[..., Appending]) -> None:
    a = append()
    acked = acknowledged(writers(a.path, 4, 1000, 3000, cut=True))
    assert a.asked_in_all(4) == [("release", 0)] * 4
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    check_lines(a.payloads(), acked)


def test_many_processes_fill_segments(append: Callable[..., Appending]) -> None:
    """And the daemon takes what does not fit, seals, and gives the next one."""
    a = append(segment_bytes=50_000, room_bytes=7_000)
    acked = acknowledged(writers(a.path, 4, 500, 500, cut=True))
    assert acked == [500] * 4
    assert a.taken() == scanned(segments(a.folder)[-1], a.ino)
    check_lines(a.payloads(), acked)
    assert len(segments(a.folder)) > 5
    state = recover_stream(Env(), a.folder, stream_id=STREAM_INO, full=True)
    assert state.active and not state.damaged and not state.unsealed
    assert state.total_record_count == 2000
    assert all(path.stat().st_size <= 50_000 for path in segments(a.folder))
    asked = [what for what, _ in a.asked()]
    assert asked.count("write") < 1500, "most were not forwarded"


def test_what_the_channel_writes_is_what_the_format_says(append: Callable[..., Appending]) -> None:
    a = append(base=1_000_000)
    fd = a.open()
    a.write(fd, b"one\ntwo\n")
    a.write(fd, b"three\n")
    assert a.asked() == []
    state = a.taken()
    assert state is not None
    found = records(segments(a.folder)[0])
    assert [bytes(r.payload) for r in found] == [b"one\n", b"two\n", b"three\n"]
    assert [r.logical_offset for r in found] == [1_000_000, 1_000_004, 1_000_008]
    assert [r.flags for r in found] == [0, 0, 0]
    assert len({r.ext_id for r in found}) == 1 and found[0].ext_id > 100, "the handle's"
    assert found[0].timestamp_ms <= found[2].timestamp_ms <= Env().now_ms()
    found_stream = recover_stream(Env(), a.folder, stream_id=STREAM_INO)
    assert found_stream.active is not None
    header = found_stream.active.header
    assert (header.version, header.stream_id, header.segment_id, header.ext_id) == (3, STREAM_INO, 1, 5)
    assert (header.base_offset, header.base_record_count, header.max_size) == (1_000_000, 0, 64 * MIB)
    assert header.creation_ts_ms == found[0].timestamp_ms
    assert state == (a.ino, 1, HEADER + 3 * RECORD + 14, 1_000_014, 3, found_stream.active.crc64, found[2].timestamp_ms)


def test_time_does_not_go_back(append: Callable[..., Appending]) -> None:
    """A clock that was set back: the last record's time, until it is later again."""
    later_ms = Env().now_ms() + 3_600_000
    a = append(last_ts_ms=later_ms)
    a.write(a.open(), b"one\ntwo\n")
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    assert [r.timestamp_ms for r in records(segments(a.folder)[0])] == [later_ms, later_ms]


def test_records_are_what_a_write_brought(append: Callable[..., Appending]) -> None:
    a = append(framing=Framing.RECORD, record_max=100_000)
    fd = a.open()
    wanted = [b"a", b"\n", b"no\nlines\nhere", os.urandom(100_000), b"\0" * 36]
    for data in wanted:
        a.write(fd, data)
    assert a.asked() == []
    a.write(fd, bytes(100_001))
    assert a.asked() == [("write", 100_001)], "longer than a record may be: the daemon's to say what becomes of it"
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    assert a.payloads() == [*wanted, bytes(100_001)]


def lines_of(data: bytes, record_max: int) -> tuple[list[bytes], bytes]:
    """The slow way: lines, cut at record_max; and what is left."""
    found, line = [], b""
    for i in range(len(data)):
        line += data[i : i + 1]
        if line.endswith(b"\n") or len(line) == record_max:
            found.append(line)
            line = b""
    return found, line


@pytest.mark.parametrize("record_max", [1, 5, 64, 1000, 16 << 20])
def test_lines_cut_everywhere(append: Callable[..., Appending], record_max: int) -> None:
    """Binary data by pieces of every length: the records are the same."""
    rng = random.Random(record_max)
    data = b"".join(rng.randbytes(rng.randrange(120)).replace(b"\n", b"?") + b"\n" for _ in range(60))
    a = append(record_max=record_max)
    fd, wanted = a.open(), b""
    for piece in [1, 2, 3, 7, 64, 119, 120, 121, 500, len(data)]:
        for at in range(0, len(data), piece):
            a.write(fd, data[at : at + piece])
        wanted += data
    assert a.asked() == []
    a.close(fd)
    found, left = lines_of(wanted, record_max)
    assert left == b""
    assert a.asked_until("release") == [("release", 0)]
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    assert a.payloads() == found


def test_two_handles_do_not_mix_their_lines(append: Callable[..., Appending]) -> None:
    a = append()
    one, two = a.open(), a.open()
    for fd, data in ((one, b"a"), (two, b"b"), (one, b"aa\naaa"), (two, b"b\n"), (one, b"a\n")):
        a.write(fd, data)
    a.taken()
    assert a.payloads() == [b"aaa\n", b"bb\n", b"aaaa\n"]


@pytest.mark.parametrize("length", [1, 4096, PARTIAL_BYTES_MAX - 1, PARTIAL_BYTES_MAX])
def test_a_line_that_is_not_ended_comes_with_the_close(append: Callable[..., Appending], length: int) -> None:
    a = append()
    fd, data = a.open(), os.urandom(length).replace(b"\n", b"?")
    a.write(fd, b"whole\n" + data[: length // 2])
    a.write(fd, data[length // 2 :])
    assert a.asked() == []
    a.close(fd)
    assert a.asked_until("release") == [("partial", length), ("release", length)]
    assert until(lambda: len(a.payloads()) == 2)
    a.taken()
    assert a.payloads() == [b"whole\n", data + b"\n"]


def test_a_line_too_long_to_be_kept(append: Callable[..., Appending]) -> None:
    """The daemon has it, and gives the handle back when the line has ended."""
    a = append()
    fd = a.open()
    a.write(fd, b"x" * PARTIAL_BYTES_MAX)
    assert a.asked() == []
    a.write(fd, b"y")
    assert a.asked() == [("partial", PARTIAL_BYTES_MAX), ("write", 1)]
    a.write(fd, b"z" * 10)
    assert a.asked() == [("write", 10)], "the daemon's, which has what was before"
    a.write(fd, b"end\nnext")
    assert a.asked() == [("write", 8)]
    a.write(fd, b" line\n")
    assert a.asked() == [], "the channel's again"
    a.taken()
    assert a.payloads() == [b"x" * PARTIAL_BYTES_MAX + b"y" + b"z" * 10 + b"end\n", b"next line\n"]


def test_long_lines(append: Callable[..., Appending]) -> None:
    """A MiB at a time and more, in pieces and whole; some are longer than a record."""
    a = append(record_max=MIB + 5000)
    fd, rng, wanted = a.open(), random.Random(5), b""
    for length in (MIB - 1, MIB, MIB + 1, 3 * MIB, 10, 200_000, 50_000):
        data = rng.randbytes(length).replace(b"\n", b"?") + b"\n"
        a.write(fd, data)
        wanted += data
    data = b"".join(b"%d\n" % i for i in range(200_000))  # more lines than go into one piece
    a.write(fd, data)
    wanted += data
    a.taken()
    assert b"".join(a.payloads()) == wanted
    assert max(map(len, a.payloads())) <= MIB + 5000
    assert all(p.endswith(b"\n") or len(p) == MIB + 5000 for p in a.payloads())


def test_nothing_but_newlines(append: Callable[..., Appending]) -> None:
    """37 bytes in the file for each byte of a write."""
    a = append()
    a.write(a.open(), b"\n" * MIB)
    assert a.taken() == scanned(segments(a.folder)[0], a.ino)
    assert a.payloads() == [b"\n"] * MIB
    assert a.asked() == []


def test_a_handle_has_its_ext_id(append: Callable[..., Appending]) -> None:
    a = append()
    fd = a.open()
    a.write(fd, b"one\n")
    fh = records(segments(a.folder)[0])[0].ext_id  # the daemon gives the handle's number
    a.call("append_handle", fh=fh, ext_id=2**64 - 1)
    a.write(fd, b"two\n")
    a.call("append_handle", fh=fh, ext_id=3, forwards=True)
    a.write(fd, b"three\n")
    assert a.asked() == [("write", 6)]
    a.taken()
    assert [r.ext_id for r in records(segments(a.folder)[0])] == [fh, 2**64 - 1, 9]
