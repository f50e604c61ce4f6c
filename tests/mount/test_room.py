"""Passthrough writers and the room: held where it ends, never failed while more can come, and hot_bytes holds."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.room import MIB, command, content_hash, disk_bytes, random_file, run_all, sha256, watching
from tests.support.mount import MountedVolume, mounted_volume, until

HOT = 128 * MIB
LARGE = 256 * MIB
TAKES_LONG_S = 3.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_file(tmp_path_factory.mktemp("room") / "source", LARGE)


@contextlib.contextmanager
def volume_of(root: Path, *, timeout: str = "3s", **keys: str) -> Iterator[MountedVolume]:
    """`timeout`: how long the remote may stand still before no room can come."""
    cache = {"hot_bytes": f"{HOT // MIB}MiB"}
    tenants = {"default": {"kind": "files", **keys}}
    with mounted_volume(root, cache=cache, tenants=tenants, remote={"timeout": timeout}) as volume:
        if not volume.ask("status")["mount"]["brake"]:
            pytest.skip("passthrough writers cannot be held here")
        yield volume


def hot(volume: MountedVolume) -> Path:
    return volume.state_dir / "hot_cache"


def channel_pid(volume: MountedVolume) -> int:
    return next(p for p in volume.pids() if Path(f"/proc/{p}/comm").read_text().strip() == "aof2-channel")


def writer(path: Path, code: str, *args: object) -> subprocess.Popen[bytes]:
    """A process that writes: `code` finds the open descriptor as f. It says "at N" when it has written N bytes."""
    text = f"import os, sys\nf = os.open(sys.argv[1], {code.split(chr(10))[0]})\n" + "\n".join(code.split("\n")[1:])
    return subprocess.Popen([sys.executable, "-c", text, str(path), *map(str, args)], stdout=subprocess.PIPE)


ENDLESS = """os.O_WRONLY | os.O_CREAT
at = 0
while at < int(sys.argv[2]):
    at += os.pwrite(f, bytes([at >> 20 & 255]) * 262144, at)
    print("at", at, flush=True)
os.close(f)
"""


def acknowledged(process: subprocess.Popen[bytes]) -> int:
    """What a writer that ended had written."""
    lines = [line for line in process.communicate()[0].split(b"\n") if line.startswith(b"at")]
    return int(lines[-1].split()[1]) if lines else 0


def is_what_was_written(path: Path, size: int) -> None:
    with path.open("rb") as f:
        for at in range(0, size, 262144):
            assert f.read(262144) == bytes([at >> 20 & 255]) * 262144, f"at {at}"


def held(volume: MountedVolume, process: subprocess.Popen[bytes]) -> None:
    """Returns when the writer has come to the end of the room and stands still."""
    before, since = -1, time.monotonic()

    def stands() -> bool:
        nonlocal before, since
        now = disk_bytes(hot(volume))
        if now != before:
            before, since = now, time.monotonic()
        return now > HOT // 2 and time.monotonic() - since > 0.4

    until(stands, "the writer is never held")
    assert process.poll() is None


def test_files_larger_than_the_cache_at_once(tmp_path: Path, source: Path) -> None:
    tools = ("cp", "append", "dd")
    with volume_of(tmp_path) as volume:
        with watching(hot(volume)) as seen:
            run_all([command(tool, source, volume.path / tool) for tool in tools], 90)
        assert 0 < seen.most <= HOT and seen.looks > 20
        volume.done("wait", volume.path)
        paths = [volume.path / tool for tool in tools]
        volume.evict(*paths)
        expected = sha256(source)
        for tool, path in zip(tools, paths, strict=True):
            assert content_hash(tool, path) == expected, tool
        assert not volume.complaints()


def test_a_writer_goes_back_to_its_header(tmp_path: Path, source: Path) -> None:
    """Into chunks that are uploaded and punched: they come back first."""
    size = 256 * MIB
    patches = {3: b"header", 65 * MIB + 4095: b"x" * 5000, 150 * MIB: b"y" * (2 * MIB), size - 10: b"tail" * 10}
    with volume_of(tmp_path) as volume, source.open("rb") as data:
        path = volume.path / "a"
        with watching(hot(volume)) as seen:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            for at in range(0, size, MIB):
                os.pwrite(fd, data.read(MIB), at)
            for at, patch in patches.items():
                os.pwrite(fd, patch, at)
            os.fsync(fd)
            os.close(fd)
        assert seen.most <= HOT
        volume.done("wait", volume.path)
        volume.evict(path)
        expected = bytearray(source.read_bytes()[:size])
        for at, patch in patches.items():
            expected[at : at + len(patch)] = patch
        assert path.read_bytes() == bytes(expected)
        assert not volume.complaints()


# 1 MiB of a write is in memory that comes when the caller says so: it stands in the middle of the write until then.
STANDS_STILL = """
import ctypes, fcntl, mmap, os, struct, sys, threading
MIB, PAGE, USERFAULTFD = 1 << 20, 4096, 323
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
f = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for at in range(0, 20 * MIB, MIB):
    os.pwrite(f, b"a" * MIB, at)
fault = ctypes.CDLL(None).syscall(USERFAULTFD, os.O_CLOEXEC)
fcntl.ioctl(fault, UFFDIO_API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
memory = mmap.mmap(-1, MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[: MIB // 2] = b"b" * (MIB // 2)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(fault, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", base + MIB // 2, MIB // 2, 1, 0)))
write = threading.Thread(target=os.pwrite, args=(f, memory, 20 * MIB))
write.start()
os.read(fault, 32)  # the write has come to what is missing
print("stands", flush=True)
sys.stdin.readline()
rest = ctypes.create_string_buffer(b"c" * (MIB // 2))
copy = struct.pack("QQQQq", base + MIB // 2, ctypes.addressof(rest), MIB // 2, 0, 0)
fcntl.ioctl(fault, UFFDIO_COPY, bytearray(copy))
write.join()
os.close(f)
"""


def test_nothing_is_taken_under_a_write_that_takes_long(tmp_path: Path, source: Path) -> None:
    """A write waits for a core or the disk as long as it takes: it is over when it is over."""
    with volume_of(tmp_path) as volume:
        slow = subprocess.Popen(
            [sys.executable, "-c", STANDS_STILL, volume.path / "slow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert slow.stdout is not None and slow.stdout.readline() == b"stands\n"
        other = subprocess.Popen(command("cp", source, volume.path / "cp"))
        held(volume, other)
        time.sleep(TAKES_LONG_S)  # for what must not happen: that the chunk is taken
        assert slow.communicate(b"go on\n", timeout=90) and slow.returncode == 0
        assert other.wait(90) == 0
        volume.done("wait", volume.path)
        volume.evict(volume.path / "slow", volume.path / "cp")
        expected = b"a" * (20 * MIB) + b"b" * (MIB // 2) + b"c" * (MIB // 2)
        assert hashlib.sha256((volume.path / "slow").read_bytes()).digest() == hashlib.sha256(expected).digest()
        assert sha256(volume.path / "cp") == sha256(source)


def test_readers_wait_for_the_writer_of_what_is_not_here(tmp_path: Path, source: Path) -> None:
    with volume_of(tmp_path) as volume:
        path = volume.path / "a"
        process = writer(path, ENDLESS, 224 * MIB)
        until(lambda: disk_bytes(volume.remote) > 64 * MIB, "no part of it is uploaded")
        reader = subprocess.Popen(["sha256sum", path], stdout=subprocess.PIPE)
        size = acknowledged(process)
        assert process.returncode == 0 and size == 224 * MIB
        out, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert out.split()[0].decode() == sha256(path)
        is_what_was_written(path, size)
        assert not volume.complaints()


@pytest.mark.parametrize("flags", ["os.O_WRONLY", "os.O_RDWR"])
def test_enospc_only_when_no_room_can_come(tmp_path: Path, flags: str) -> None:
    """The remote is away past its deadline; and then it is back."""
    code = ENDLESS.replace("os.O_WRONLY", flags)
    with volume_of(tmp_path) as volume:
        volume.done("wait", volume.path)
        away = tmp_path / "away"
        volume.remote.rename(away)
        path = volume.path / "a"
        tried = f"try:\n    {code.split(chr(10), 1)[1].replace(chr(10), chr(10) + '    ')}"
        process = writer(
            path, f"{flags} | os.O_CREAT\n{tried}\nexcept OSError as e:\n    print('error', e.errno)", LARGE
        )
        out = process.communicate(timeout=60)[0].split(b"\n")
        assert f"error {errno.ENOSPC}".encode() in out
        size = int(next(line for line in reversed(out) if line.startswith(b"at")).split()[1])
        assert size > HOT // 2 and disk_bytes(hot(volume)) <= HOT
        away.rename(volume.remote)
        volume.done("wait", volume.path)
        is_what_was_written(path, size)


def test_a_held_writer_dies_of_sigkill_and_the_others_go_on(tmp_path: Path) -> None:
    with volume_of(tmp_path) as volume:
        volume.done("wait", volume.path)
        away = tmp_path / "away"
        volume.remote.rename(away)
        first = writer(volume.path / "a", ENDLESS, LARGE)
        held(volume, first)
        first.send_signal(signal.SIGKILL)
        size = acknowledged(first)
        away.rename(volume.remote)
        second = writer(volume.path / "b", ENDLESS, LARGE)
        assert acknowledged(second) == LARGE and second.returncode == 0
        volume.done("wait", volume.path)
        is_what_was_written(volume.path / "a", size)
        is_what_was_written(volume.path / "b", LARGE)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("who", ["daemon", "channel"])
def test_a_killed_daemon_lets_go_of_who_is_held(tmp_path: Path, who: str) -> None:
    with volume_of(tmp_path) as volume:
        process = writer(volume.path / "a", ENDLESS, LARGE)
        until(lambda: disk_bytes(hot(volume)) > HOT - 32 * MIB)
        if who == "daemon":
            volume.kill()
        else:
            os.kill(channel_pid(volume), signal.SIGKILL)
            until(lambda: not volume.pids(), "the daemon outlives its channel")
        size = acknowledged(process)
        assert size > HOT // 2
        subprocess.run(["umount", "-l", volume.mountpoint], check=True)
        volume.remount()
        is_what_was_written(volume.path / "a", size)
        volume.done("wait", volume.path)
        volume.evict(volume.path / "a")
        is_what_was_written(volume.path / "a", size)


def test_a_tenants_quota_holds(tmp_path: Path, source: Path) -> None:
    with volume_of(tmp_path, quota="80MiB") as volume:
        with watching(hot(volume) / "default") as seen:
            run_all([command("cp", source, volume.path / "a")], 60)
        assert seen.most <= 80 * MIB
        volume.done("wait", volume.path)
        volume.evict(volume.path / "a")
        assert sha256(volume.path / "a") == sha256(source)


def test_fallocate_and_copies_draw_on_the_room(tmp_path: Path, source: Path) -> None:
    with volume_of(tmp_path) as volume:
        free = os.statvfs(volume.path)
        assert free.f_bavail * free.f_frsize <= HOT
        with (volume.path / "a").open("wb") as f:
            with pytest.raises(OSError) as error:
                os.posix_fallocate(f.fileno(), 0, 2 * HOT)
            assert error.value.errno == errno.ENOSPC
            os.posix_fallocate(f.fileno(), 0, 32 * MIB)
            less = os.statvfs(volume.path)
            assert less.f_bavail * less.f_frsize <= free.f_bavail * free.f_frsize - 32 * MIB
        small = random_file(tmp_path / "small", 48 * MIB)
        run_all([command("cp", small, volume.path / "b")], 60)
        with watching(hot(volume)) as seen, (volume.path / "b").open("rb") as a, (volume.path / "c").open("wb") as b:
            while os.copy_file_range(a.fileno(), b.fileno(), 1 << 30):
                pass
        assert seen.most <= HOT
        assert sha256(volume.path / "c") == sha256(small)


@pytest.mark.parametrize("tool", ["copyfile", "splice", "sendfile"])
def test_what_the_kernel_does_not_report_is_held_too(tmp_path: Path, source: Path, tool: str) -> None:
    """Three times the room, and behind it another writer, whose writes are reported."""
    large = tmp_path / "large"
    large.write_bytes(source.read_bytes() + source.read_bytes()[: 3 * HOT - LARGE])
    with volume_of(tmp_path) as volume:
        with watching(hot(volume)) as seen:
            run_all([command(tool, large, volume.path / tool)], 90)
        assert 0 < seen.most <= HOT and seen.looks > 20
        run_all([command("cp", source, volume.path / "cp")], 60)
        volume.done("wait", volume.path)
        volume.evict(volume.path / tool, volume.path / "cp")
        assert sha256(volume.path / tool) == sha256(large)
        assert sha256(volume.path / "cp") == sha256(source)
        assert not volume.complaints()


def test_reported_and_silent_writers_at_once(tmp_path: Path, source: Path) -> None:
    tools = ("copyfile", "dd", "cp")  # of a silent writer only whole chunks make way: two of them could fill the room
    with volume_of(tmp_path, timeout="30s") as volume:  # beside other tests the disk stands still for seconds
        with watching(hot(volume)) as seen:
            run_all([command(tool, source, volume.path / tool) for tool in tools], 90)
        assert 0 < seen.most <= HOT
        volume.done("wait", volume.path)
        volume.evict(*(volume.path / tool for tool in tools))
        assert {sha256(volume.path / tool) for tool in tools} == {sha256(source)}
        assert not volume.complaints()


@pytest.mark.parametrize("tool", ["copyfile", "splice"])
def test_a_silent_writer_gets_enospc_only_when_no_room_can_come(tmp_path: Path, source: Path, tool: str) -> None:
    """The remote is away past its deadline; and then it is back, and nothing that was written is lost."""
    with volume_of(tmp_path) as volume:
        volume.done("wait", volume.path)
        away = tmp_path / "away"
        volume.remote.rename(away)
        path = volume.path / "a"
        done = subprocess.run(command(tool, source, path), capture_output=True, text=True, check=False, timeout=60)
        assert f"OSError: [Errno {errno.ENOSPC}]" in done.stderr
        size = path.stat().st_size
        assert size > HOT // 2 and disk_bytes(hot(volume)) <= HOT
        away.rename(volume.remote)
        volume.done("wait", volume.path)
        volume.evict(path)
        with path.open("rb") as got, source.open("rb") as expected:
            assert got.read() == expected.read(size)


def test_nothing_is_taken_under_a_silent_writer_that_does_not_write_at_the_end(tmp_path: Path, source: Path) -> None:
    """The file has its length before its bytes: where they go next is not known, so it must fit."""
    code = "os.O_WRONLY | os.O_CREAT\nos.ftruncate(f, int(sys.argv[3]))\ns = os.open(sys.argv[2], os.O_RDONLY)\n"
    code += "while n := os.sendfile(f, s, None, 1 << 22):\n    print('at', os.lseek(f, 0, 1), flush=True)"
    with volume_of(tmp_path) as volume:
        path = volume.path / "a"
        process = writer(path, code, source, LARGE)
        size = acknowledged(process)
        assert process.returncode == 1 and HOT // 2 < size < LARGE
        volume.done("wait", volume.path)
        volume.evict(path)
        with path.open("rb") as got, source.open("rb") as expected:
            assert got.read(size) == expected.read(size)


@pytest.mark.parametrize("tool", ["copyfile", "splice"])
def test_a_held_silent_writer_dies_of_a_signal_and_the_others_go_on(tmp_path: Path, source: Path, tool: str) -> None:
    with volume_of(tmp_path) as volume:
        volume.done("wait", volume.path)
        away = tmp_path / "away"
        volume.remote.rename(away)
        for name, number in (("a", signal.SIGKILL), ("b", signal.SIGTERM)):
            process = subprocess.Popen(command(tool, source, volume.path / name))
            held(volume, process)
            process.send_signal(number)
            assert process.wait(5) == -number
        away.rename(volume.remote)
        volume.done("wait", volume.path)
        run_all([command(tool, source, volume.path / "c"), command("cp", source, volume.path / "d")], 60)
        volume.done("wait", volume.path)
        assert sha256(volume.path / "c") == sha256(volume.path / "d") == sha256(source)
        size = (volume.path / "a").stat().st_size
        with (volume.path / "a").open("rb") as got, source.open("rb") as expected:
            assert got.read() == expected.read(size)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("who", ["daemon", "channel"])
def test_a_killed_daemon_lets_go_of_a_silent_writer(tmp_path: Path, source: Path, who: str) -> None:
    with volume_of(tmp_path) as volume:
        volume.done("wait", volume.path)
        volume.remote.rename(tmp_path / "away")
        process = subprocess.Popen(command("copyfile", source, volume.path / "a"), stderr=subprocess.DEVNULL)
        held(volume, process)
        if who == "daemon":
            volume.kill()
        else:
            os.kill(channel_pid(volume), signal.SIGKILL)
            until(lambda: not volume.pids(), "the daemon outlives its channel")
        process.wait(10)
        (tmp_path / "away").rename(volume.remote)
        subprocess.run(["umount", "-l", volume.mountpoint], check=True)
        volume.remount()
        size = (volume.path / "a").stat().st_size
        assert size > HOT // 2
        volume.done("wait", volume.path)
        volume.evict(volume.path / "a")
        with (volume.path / "a").open("rb") as got, source.open("rb") as expected:
            assert got.read() == expected.read(size)


def test_the_disk_keeps_its_free_space(tmp_path: Path) -> None:
    """hot_bytes would allow more than `min_free` of a small disk does."""
    image, disk = tmp_path / "image", tmp_path / "state"
    disk.mkdir()
    with image.open("wb") as f:
        f.truncate(400 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, check=False).returncode:
        pytest.skip("no loop devices here")
    least = 1 << 62
    try:
        with mounted_volume(tmp_path, cache={"hot_bytes": "1GiB", "min_free": "200MiB"}) as volume:
            free_bytes = lambda: os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize  # noqa: E731
            process = writer(volume.path / "a", ENDLESS, LARGE)
            while process.poll() is None:
                least = min(least, free_bytes())
                time.sleep(0.005)
                space = os.statvfs(volume.path)
                assert space.f_bavail * space.f_frsize <= 400 * MIB
            assert acknowledged(process) == LARGE and process.returncode == 0
            is_what_was_written(volume.path / "a", LARGE)
            volume.umount()
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
    assert least > 195 * MIB, "the log and the catalog also live there"
