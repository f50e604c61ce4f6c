"""state_dir on a disk without a free inode or byte: removing, evicting, unmounting and the next mount work all the
same, and nothing that was acknowledged is lost. Real filesystems in a file, of 4,000 inodes and of 400 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loop import LoopDisk, loop_disk
from tests.support.mount import MountedVolume, mounted_volume, until

DISK_BYTES = 400 << 20
INODES = 4000
MODES = {"passthrough": [], "ranged": ["nopassthrough"]}
GRAVE = ("ERROR", "CRITICAL", "RAW")


@contextlib.contextmanager
def on_small_disk(
    tmp_path: Path, mode: str, *, inodes: int = 0, hot_bytes: str = "256MiB", timeout_s: float = 240
) -> Iterator[tuple[MountedVolume, LoopDisk]]:
    """A mount whose state is on such a disk, and its remote elsewhere."""
    with (
        loop_disk(tmp_path, size_bytes=DISK_BYTES, inodes=inodes) as disk,
        mounted_volume(
            disk.path / "v",
            options=MODES[mode],
            timeout_s=timeout_s,
            remote={"url": f"file://{tmp_path / 'remote'}"},
            cache={"hot_bytes": hot_bytes},
        ) as volume,
    ):
        yield volume, disk


def fill_with_files(volume: MountedVolume, most: int = 10_000, prefix: str = "f") -> dict[str, bytes]:
    """New files until there is no more; those whose close was answered."""
    made = {}
    for n in range(most):
        data = b"%d " % n * 20
        try:
            (volume.path / f"{prefix}{n}").write_bytes(data)
        except OSError as e:
            assert e.errno == errno.ENOSPC, e
            break
        made[f"{prefix}{n}"] = data
    return made


@contextlib.contextmanager
def nothing_becomes_clean(tmp_path: Path) -> Iterator[None]:
    """The remote is away: what is here cannot make way."""
    (tmp_path / "remote").rename(tmp_path / "elsewhere")
    try:
        yield
    finally:
        (tmp_path / "elsewhere").rename(tmp_path / "remote")


def some_files(volume: MountedVolume, count: int = 60) -> dict[str, bytes]:
    made = fill_with_files(volume, count)
    assert len(made) == count
    return made


def names(volume: MountedVolume) -> set[str]:
    return set(os.listdir(volume.path))


def is_full_for_new(volume: MountedVolume, files: dict[str, bytes]) -> None:
    """ENOSPC, once what was made ahead is used, and every clean file has made way."""
    for n in range(1100):
        path = volume.path / f"more{n}"
        try:
            path.write_bytes(bytes(1 << 20))
        except OSError as e:
            assert e.errno == errno.ENOSPC, e
            with contextlib.suppress(FileNotFoundError):  # the name may have come, and its bytes not
                path.unlink()
            return
        files[path.name] = bytes(1 << 20)
    pytest.fail("there is no end to it")


def no_grave_words(volume: MountedVolume) -> None:
    assert not [line for line in volume.log() if line["level"] in GRAVE], volume.log_tail()


def put_through(volume: MountedVolume, files: dict[str, bytes], *, killed: bool = False) -> None:
    """Everything that must work on a full disk."""
    assert names(volume) == set(files)
    gone = sorted(files)[::3]
    for name in gone:
        (volume.path / name).unlink()
        del files[name]
    assert names(volume) == set(files)
    if killed:
        volume.kill()
        volume.mount()
        assert names(volume) == set(files)
    volume.evict(volume.path)
    assert names(volume) == set(files)
    for name in sorted(files)[:20]:
        assert (volume.path / name).read_bytes() == files[name]
    volume.umount()
    volume.mount()
    assert names(volume) == set(files)
    for name, data in files.items():
        assert (volume.path / name).read_bytes() == data
    no_grave_words(volume)


def is_clean(volume: MountedVolume) -> None:
    volume.umount()
    verified = volume.aof2("verify", "--remote")
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("mode", list(MODES))
def test_inodes_filled_by_files(tmp_path: Path, mode: str) -> None:
    with on_small_disk(tmp_path, mode, inodes=INODES) as (volume, disk):
        disk.take_inodes(leave=400)
        with nothing_becomes_clean(tmp_path):
            files = fill_with_files(volume)
            assert len(files) > 200
            assert os.statvfs(volume.path).f_favail == 0
        put_through(volume, files)
        disk.give_back()
        until(lambda: os.statvfs(volume.path).f_favail > 1000)
        assert len(fill_with_files(volume, 50, "new")) == 50  # by itself, without a remount
        is_clean(volume)


@pytest.mark.parametrize("mode", list(MODES))
def test_inodes_taken_by_others(tmp_path: Path, mode: str) -> None:
    with on_small_disk(tmp_path, mode, inodes=INODES) as (volume, disk):
        files = some_files(volume)
        volume.done("wait", volume.path)
        with nothing_becomes_clean(tmp_path):
            (volume.path / "pinned").write_bytes(b"not in the remote")
            files["pinned"] = b"not in the remote"
            disk.take_inodes()
            assert disk.free_inodes() == 0
            is_full_for_new(volume, files)
        put_through(volume, files, killed=True)
        is_clean(volume)


@pytest.mark.parametrize("mode", list(MODES))
def test_bytes_taken_by_others(tmp_path: Path, mode: str) -> None:
    with on_small_disk(tmp_path, mode) as (volume, disk):
        files = some_files(volume)
        disk.take_bytes()
        assert disk.refuses(64 << 10)
        is_full_for_new(volume, files)
        put_through(volume, files, killed=True)
        disk.give_back()
        until(lambda: disk.free_bytes() > 100 << 20)
        (volume.path / "again").write_bytes(b"again" * 100_000)
        is_clean(volume)


def test_bytes_filled_by_appends(tmp_path: Path) -> None:
    """A writer that the disk stops; what it wrote before is there, and gone when it is removed."""
    with on_small_disk(tmp_path, "passthrough", hot_bytes="2GiB") as (volume, disk):
        files = some_files(volume)
        disk.take_bytes(leave=40 << 20)
        block = os.urandom(1 << 20)
        written = 0
        with pytest.raises(OSError), open(volume.path / "large", "wb", buffering=0) as f:
            while written < 1 << 30:
                written += f.write(block)
        files["large"] = (volume.path / "large").read_bytes()
        assert len(files["large"]) >= written
        put_through(volume, files)
        for name in files:
            (volume.path / name).unlink()
        assert names(volume) == set()
        is_clean(volume)


def test_filled_by_the_log(tmp_path: Path) -> None:
    """Renames without end while the remote is away, so that no log file may go."""
    with on_small_disk(tmp_path, "passthrough") as (volume, disk):
        files = some_files(volume, 20)
        volume.done("wait", volume.path)
        disk.take_bytes(leave=30 << 20)
        long = "n" * 200
        with nothing_becomes_clean(tmp_path), pytest.raises(OSError) as e:
            for n in range(1_000_000):
                os.rename(volume.path / "f0", volume.path / f"{long}{n % 7}")
                os.rename(volume.path / f"{long}{n % 7}", volume.path / "f0")
        assert e.value.errno == errno.ENOSPC
        for name in names(volume) - set(files):
            files[name] = files.pop("f0")
        put_through(volume, files, killed=True)
        is_clean(volume)


@pytest.mark.parametrize("taken_by", ["the stream", "others"])
def test_a_stream_on_a_full_disk(tmp_path: Path, taken_by: str) -> None:
    """A write fails, with nothing of it taken; what was acknowledged is there, and when there is room it goes on."""
    line = b"x" * 99_999 + b"\n"
    streams = {"events": {"kind": "append", "segment_bytes": "8MiB", "seal_after": "1h"}}
    with (
        loop_disk(tmp_path, size_bytes=DISK_BYTES) as disk,
        mounted_volume(
            disk.path / "v",
            tenants=streams,
            timeout_s=240,
            remote={"url": f"file://{tmp_path / 'remote'}", "timeout": "2s"},
            cache={"hot_bytes": "1GiB"},
        ) as volume,
    ):
        stream = volume.path / "clicks"
        stream.mkdir()
        fd, count = os.open(stream / "_append", os.O_WRONLY), 0
        with nothing_becomes_clean(tmp_path):
            if taken_by == "others":
                os.write(fd, line)
                count += 1
                disk.take_bytes()
            with pytest.raises(OSError) as e:
                while True:
                    assert os.write(fd, line) == len(line)
                    count += 1
            assert e.value.errno == errno.ENOSPC
        if taken_by == "others":
            disk.give_back()
        until(lambda: writes(fd, b"after\n"), "there is room again")
        os.close(fd)
        volume.kill()
        volume.remount()
        volume.done("wait", stream)
        found = b"".join(path.read_bytes() for path in sorted(stream.glob("0*.jsonl")))
        assert found == line * count + b"after\n"


def writes(fd: int, data: bytes) -> bool:
    try:
        return os.write(fd, data) == len(data)
    except OSError as e:
        assert e.errno == errno.ENOSPC
        return False
