"""Streams through a real mount: written by shells and programs, killed, evicted, restored, removed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.segment.reader import SegmentReader
from aof2.fs.bench.seaweed import REGION
from tests.support.mount import MountedVolume, mounted_volume, until
from tests.support.seaweed import running_seaweed

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


def test_writers_that_are_there_before_the_mount_is(volume: MountedVolume) -> None:
    """The kernel asks while the daemon still looks at what the last one left."""
    stream = volume.path / "clicks"
    stream.mkdir()
    before = [b"before %d %s\n" % (n, b"x" * 100) for n in range(2000)]
    with (stream / "_append").open("wb", buffering=0) as f:
        for line in before:
            f.write(line)
    volume.kill()
    answered: list[bytes] = []
    stop = threading.Event()

    def write() -> None:
        fd, n = -1, 0
        while not stop.is_set():
            with contextlib.suppress(OSError):  # not there yet
                if fd < 0:
                    fd = os.open(stream / "_append", os.O_WRONLY | os.O_APPEND)
                os.write(fd, b"after %d\n" % n)
                answered.append(b"after %d\n" % n)
                n += 1
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        volume.remount()
        until(lambda: len(answered) > 100)
    finally:
        stop.set()
        writer.join()
    volume.done("seal", stream)
    assert sealed(stream) == b"".join(before + answered)


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


def test_on_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away while segments seal, asked for what was evicted, and all that is left of the machine in the end."""
    (tmp_path / "weed").mkdir()
    with running_seaweed(tmp_path / "weed") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        remote = {"url": f"s3://{server.bucket}/streams", "endpoint_url": server.endpoint_url, "region": REGION}
        with mounted_volume(tmp_path / "v", tenants=TENANTS, remote=remote) as volume:
            stream = volume.path / "clicks"
            stream.mkdir()
            written = b"".join(b"%d some words\n" % n for n in range(10_000))
            (stream / "_append").write_bytes(written)
            server.stop()
            volume.done("seal", stream)
            assert sealed(stream) == written
            server.start()
            until(lambda: volume.aof2("wait", volume.mountpoint).returncode == 0)
            volume.evict(stream)
            assert sealed(stream) == written
            volume.kill()
            shutil.rmtree(volume.state_dir)
            volume.done("restore", "--from", remote["url"])
            volume.remount()
            assert b"".join(raw_records(stream, tmp_path)) == sealed(stream) == written
            volume.umount()
            volume.done("verify", "--remote")


def test_what_a_lost_machine_had_not_sealed_is_all_that_is_lost(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    (stream / "_append").write_bytes(b"durable\n" * 10)
    volume.done("wait", stream)
    (stream / "_append").write_bytes(b"lost\n")
    committed(stream)
    assert volume.aof2("verify").returncode == 0  # with a segment that is open
    volume.kill()
    assert volume.aof2("verify").returncode == 0
    shutil.rmtree(volume.state_dir)
    volume.done("restore", "--from", f"file://{volume.remote}")
    volume.remount()
    assert everything(stream) == b"durable\n" * 10
    (stream / "_append").write_bytes(b"again\n")
    seal(volume, stream)
    assert sealed(stream) == b"durable\n" * 10 + b"again\n"
    assert volume.aof2("verify", "--remote").returncode == 0


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


def test_verbs_end_and_cut_a_stream(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    for n in range(3):
        (stream / "_append").write_bytes(b"%d\n" % n * 10)
        assert volume.json("seal", stream)["segments"] == 1
    assert "sealed already" in volume.done("seal", stream)
    assert [path.stem for path in payloads(stream)] == [f"{n:020d}" for n in (0, 20, 40)]
    volume.done("wait", stream)
    reader = payloads(stream)[0].open("rb")
    done = volume.json("truncate", stream, "--before", 39)
    assert (done["segments"], done["bytes"], done["first_offset"]) == (1, 20, 20)
    assert reader.read() == b"0\n" * 10  # open before, it is read to its end
    reader.close()
    assert [path.stem for path in payloads(stream)] == [f"{n:020d}" for n in (20, 40)]
    (stream / "_append").write_bytes(b"gone\n")
    done = volume.json("truncate", stream, "--tail")
    assert (done["bytes"], done["first_offset"]) == (5, 20)
    (stream / "_append").write_bytes(b"next\n")
    volume.done("seal", stream)
    assert payloads(stream)[-1].name == f"{60:020d}.jsonl"
    volume.done("undelete", stream / f"{0:020d}.jsonl")
    assert sealed(stream) == b"0\n" * 10 + b"1\n" * 10 + b"2\n" * 10 + b"next\n"
    for wrong in (("seal", volume.path), ("seal", payloads(stream)[0]), ("truncate", stream)):
        assert volume.aof2(*wrong).returncode in (1, 2)
    assert volume.aof2("verify", "--remote").returncode == 0


def test_an_ext_id_is_its_process_s(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    with pytest.raises(PermissionError):
        os.setxattr(stream / "_append", "user.aof2.ext_id", b"7")  # not open
    fd = os.open(stream / "_append", os.O_WRONLY)
    os.write(fd, b"none\n")
    os.setxattr(fd, "user.aof2.ext_id", b"7")
    assert os.getxattr(stream / "_append", "user.aof2.ext_id") == b"7"
    os.write(fd, b"seven\n")
    subprocess.run(["sh", "-c", f"echo other >> {stream}/_append"], check=True)
    os.write(fd, b"seven\n")
    os.close(fd)
    volume.done("seal", stream)
    [raw] = (stream / ".segments").glob("*.seg")
    shutil.copyfile(raw, tmp_path / raw.name)
    with SegmentReader(Env(), tmp_path / raw.name) as reader:
        found = [(bytes(record.payload), record.ext_id) for record in reader.records()]
    assert found == [(b"none\n", 0), (b"seven\n", 7), (b"other\n", 0), (b"seven\n", 7)]


def test_a_tail_is_followed_across_seals(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    reader = os.open(stream / "_tail.jsonl", os.O_RDONLY)
    seen, written = b"", b""
    for n in range(6):
        line = b"%d " % n + b"y" * 1000 + b"\n"
        (stream / "_append").write_bytes(line * 10)
        written += line * 10
        committed(stream)
        if n % 2:
            volume.done("seal", stream)
        while part := os.read(reader, 1 << 16):
            seen += part
    os.close(reader)
    assert seen == written


def test_fifty_writers_at_once(volume: MountedVolume, tmp_path: Path) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    script = f"for n in $(seq 40); do echo $1 $n; done >> {stream}/_append"
    writers = [subprocess.Popen(["sh", "-c", script, "sh", str(n)]) for n in range(50)]
    assert [one.wait() for one in writers] == [0] * 50
    volume.done("seal", stream)
    lines = sealed(stream).splitlines(keepends=True)
    assert sorted(lines) == sorted(b"%d %d\n" % (w, n) for w in range(50) for n in range(1, 41))
    assert raw_records(stream, tmp_path) == lines


def test_a_writer_killed_before_its_newline_leaves_a_line(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    script = (
        "import os, sys, time; os.write(os.open(sys.argv[1], 1), b'whole\\nbegun'); print(flush=True); time.sleep(99)"
    )
    command = [sys.executable, "-c", script, str(stream / "_append")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        committed(stream)
        assert everything(stream) == b"whole\n"
        writer.kill()
    until(lambda: everything(stream) == b"whole\nbegun\n")


def test_a_remote_that_is_away_holds_up_no_seal(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    away = volume.remote.rename(volume.root / "away")
    volume.remote.write_text("not a directory")
    (stream / "_append").write_bytes(b"one\n" * 40_000)
    volume.done("seal", stream)
    assert sealed(stream) == b"one\n" * 40_000
    volume.remote.unlink()
    away.rename(volume.remote)
    volume.done("wait", stream)
    assert os.getxattr(stream, "user.aof2.durable") == b"1"
    # The log of the daemon says so.
    (volume.state_dir / "daemon.log").write_text("")


def test_a_plain_umount_seals_what_the_channel_appended(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    with (stream / "_append").open("ab", buffering=0) as f:
        for n in range(500):
            f.write(b"%d\n" % n)
    subprocess.run(["umount", str(volume.mountpoint)], check=True)
    until(lambda: not volume.pids(), "the daemon goes on")
    assert not list((volume.state_dir / "segments").rglob("*.seg"))
    volume.remount()
    assert sealed(stream) == b"".join(b"%d\n" % n for n in range(500))
    (volume.state_dir / "daemon.log").write_text("")  # it says what was not uploaded


def test_the_log_tells_a_segment_s_history(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    (stream / "_append").write_bytes(b"one\n")
    seal(volume, stream)
    volume.evict(stream)
    assert sealed(stream) == b"one\n"
    steps = [step["event"] for step in volume.json("why", payloads(stream)[0])["steps"]]
    assert steps[:2] == ["SegmentOpened", "SealSegment"]
    assert {"UploadDone", "LocalEvicted", "HydrationStarted"} <= set(steps)
    records = [json.loads(line) for line in volume.done("manifest", "inspect", "events", "--json").splitlines()]
    [raw] = (stream / ".segments").glob("*.seg")
    sealed_as = [r["payload"] for r in records if r["type"] == "SealSegment" and r["segment_id"] == int(raw.stem)]
    with SegmentReader(Env(), raw) as reader:
        footer = reader.footer
    assert footer is not None
    [payload] = sealed_as
    assert payload["durable_bytes"] == footer.durable_bytes
    assert payload["coordinator_watermark"] == footer.coordinator_watermark
    assert not payload["flush_failure"]


def test_damage_in_the_remote_is_found_and_mended_from_here(volume: MountedVolume) -> None:
    stream = volume.path / "clicks"
    stream.mkdir()
    written = b"".join(b"%d some words\n" % n for n in range(20_000))
    (stream / "_append").write_bytes(written)
    seal(volume, stream)
    volume.umount()
    blobs = [path for path in (volume.remote / "checkpoints").rglob("*.blob") if path.stat().st_size > 1000]
    for path in blobs:
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(data)
    found = volume.aof2("verify", "--remote")
    assert found.returncode == 4
    assert all(path.name in found.stderr for path in blobs)
    assert volume.aof2("verify", "--remote", "--repair").returncode == 1
    assert volume.aof2("verify", "--remote").returncode == 0
    volume.remount()
    volume.evict(stream)
    assert sealed(stream) == written
