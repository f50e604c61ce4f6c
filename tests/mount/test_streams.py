"""Streams through a real mount: written by shells and programs, killed, evicted, restored, removed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.segment.reader import SegmentReader
from tests.support.mount import MountedVolume, mounted_volume, until

TENANTS = {
    "events": {"kind": "append", "segment_bytes": "64KiB", "seal_after": "1h"},
    "default": {"kind": "files"},
}


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    with mounted_volume(tmp_path, tenants=TENANTS) as made:
        yield made
        assert made.complaints() == []


def payloads(stream: Path) -> list[Path]:
    return sorted(path for path in stream.iterdir() if path.name[0].isdigit())


def sealed(stream: Path) -> bytes:
    """All payload files, one behind the other: each begins where the last one ended."""
    out = b""
    for path in payloads(stream):
        data = path.read_bytes()
        assert int(path.stem) == len(out)
        assert path.stat().st_size == len(data)
        out += data
    return out


def everything(stream: Path) -> bytes:
    return sealed(stream) + (stream / "_tail.jsonl").read_bytes()


def raw_records(stream: Path, scratch: Path) -> list[bytes]:
    """Every record of the raw segments, by a reader of the format alone."""
    found: list[tuple[int, bytes]] = []
    for path in (stream / ".segments").glob("*.seg"):
        copy = scratch / path.name
        shutil.copyfile(path, copy)
        assert copy.stat().st_size == path.stat().st_size
        with SegmentReader(Env(), copy) as reader:
            assert reader.sealed
            reader.verify()
            found += [(record.logical_offset, bytes(record.payload)) for record in reader.records()]
    return [payload for _, payload in sorted(found)]


def committed(stream: Path) -> None:
    fd = os.open(stream / "_append", os.O_WRONLY)
    os.fsync(fd)
    os.close(fd)


def seal(volume: MountedVolume, stream: Path) -> None:
    volume.done("wait", stream)


def test_a_shell_and_a_program_write_lines(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    assert sorted(os.listdir(stream)) == [".segments", "_append", "_tail.jsonl"]
    for n in range(3):
        subprocess.run(["sh", "-c", f"echo line {n} >> {stream}/_append"], check=True)
    with (stream / "_append").open("w") as f:
        f.write("by a program\nunfinished")
    until(lambda: (stream / "_tail.jsonl").read_bytes().endswith(b"unfinished\n"))
    expected = b"line 0\nline 1\nline 2\nby a program\nunfinished\n"
    committed(stream)
    assert (stream / "_tail.jsonl").read_bytes() == expected
    until(lambda: (stream / "_tail.jsonl").stat().st_size == len(expected))
    assert not (stream / "00000000000000000000.jsonl").exists()  # the kernel remembers that
    seal(volume, stream)
    assert (stream / "00000000000000000000.jsonl").read_bytes() == expected
    assert (stream / "_tail.jsonl").read_bytes() == b""
    assert raw_records(stream, tmp_path) == expected.splitlines(keepends=True)


def test_many_processes_and_a_kill(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    writer = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
        "for n in range(400):\n"
        "    os.write(fd, b'%s %d %s\\n' % (sys.argv[2].encode(), n, b'x' * 100))\n"
    )
    command = [sys.executable, "-c", writer, str(stream / "_append")]
    writers = [subprocess.Popen([*command, str(n)]) for n in range(8)]
    assert [one.wait() for one in writers] == [0] * 8
    volume.kill()
    volume.remount()
    lines = everything(stream).splitlines()
    assert len(lines) == 3200
    for n in range(8):
        mine = [line for line in lines if line.startswith(b"%d " % n)]
        assert [int(line.split()[1]) for line in mine] == list(range(400))
    with (stream / "_append").open("ab") as f:
        f.write(b"after\n")
    seal(volume, stream)
    assert sealed(stream).splitlines() == [*lines, b"after"]
    assert b"".join(raw_records(stream, tmp_path)) == sealed(stream)


def test_what_is_sealed_is_refused_to_writers(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    (stream / "_append").write_bytes(b"one\n")
    seal(volume, stream)
    path = payloads(stream)[0]
    for refused in (lambda: path.open("r+b"), lambda: os.truncate(path, 0), lambda: (stream / "new").touch()):
        with pytest.raises(OSError) as e:
            refused()
        assert e.value.errno == errno.EPERM
    with pytest.raises(PermissionError):
        path.rename(stream / "other")
    assert path.read_bytes() == b"one\n"


def test_a_stream_is_moved_and_removed(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    (stream / "deep" / "er").mkdir(parents=True)
    (stream / "_append").write_bytes(b"one\n" * 20_000)
    (stream / "deep" / "er" / "_append").write_bytes(b"two\n")
    moved = stream.rename(volume.path / "moved")
    committed(moved)
    assert everything(moved) == b"one\n" * 20_000
    until(lambda: len(payloads(moved)) == 800_000 // (64 << 10))  # what appears meanwhile, rm does not know of
    assert (moved / "_tail.jsonl").stat().st_size
    subprocess.run(["rm", "-r", str(moved)], check=True, stdin=subprocess.DEVNULL)
    assert os.listdir(volume.path) == []
    assert volume.aof2("verify").returncode == 0


def test_evicted_streams_come_back_and_verify_is_clean(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    written = b"".join(b"%d some words\n" % n for n in range(20_000))
    (stream / "_append").write_bytes(written)
    assert os.getxattr(stream, "user.aof2.durable") == b"0"
    seal(volume, stream)
    assert os.getxattr(stream, "user.aof2.durable") == b"1"
    assert {os.getxattr(path, "user.aof2.durable") for path in payloads(stream)} == {b"1"}
    volume.evict(stream)
    assert {os.getxattr(path, "user.aof2.residency") for path in payloads(stream)} == {b"0.000"}
    assert sealed(stream) == written
    volume.evict(stream)
    assert b"".join(raw_records(stream, tmp_path)) == written
    assert volume.aof2("verify", "--remote").returncode == 0
    volume.umount()
    assert volume.aof2("verify", "--remote").returncode == 0
    volume.remount()
    assert sealed(stream) == written


def test_a_restored_volume_has_every_sealed_segment(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    written = b"".join(b"%d some words\n" % n for n in range(20_000))
    (stream / "_append").write_bytes(written)
    volume.umount()
    shutil.rmtree(volume.state_dir)
    volume.done("restore", "--from", f"file://{volume.remote}")
    volume.remount()
    assert sealed(stream) == written
    (stream / "_append").write_bytes(b"more\n")
    seal(volume, stream)
    assert sealed(stream) == written + b"more\n"


def test_a_removed_segment_comes_back_with_its_index(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    (stream / "_append").write_bytes(b"one\ntwo\n")
    seal(volume, stream)
    path = payloads(stream)[0]
    path.unlink()
    assert os.listdir(stream / ".segments") == []
    volume.done("undelete", path)
    assert path.read_bytes() == b"one\ntwo\n"
    assert raw_records(stream, tmp_path) == [b"one\n", b"two\n"]
    assert volume.aof2("verify").returncode == 0
