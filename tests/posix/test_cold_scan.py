"""`user.aof2.cold_scan`: reads through the mount that fill no cache, under the tenant's limiter."""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.posix.helpers import code
from tests.support.mount import MountedVolume, mounted_volume

MIB = 1 << 20
SIZE = 9 * MIB + 4321
COLD = "user.aof2.cold_scan"


def metrics(volume: MountedVolume) -> dict[str, float]:
    text = (volume.mountpoint / ".aof2" / "metrics").read_text()
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}


def cold_bytes(volume: MountedVolume) -> int:
    return int(metrics(volume)['remote_bytes_read_total{mode="cold_scan"}'])


def cached_bytes(volume: MountedVolume) -> tuple[float, float]:
    """hot_cache and PageCache."""
    now = metrics(volume)
    return now['aof2_tier_bytes{tier="hot"}'], now['aof2_tier_bytes{tier="page_cache"}']


def cold_file(volume: MountedVolume, path: Path, size: int = SIZE) -> bytes:
    """A file that only the remote has."""
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    volume.done("wait", path)
    volume.evict(path)
    assert os.getxattr(path, "user.aof2.residency") == b"0.000"
    return data


def test_a_cold_scan_fills_no_cache(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "file"
    data = cold_file(each_volume, path)
    os.setxattr(path, COLD, b"1")
    cached, cold = cached_bytes(each_volume), cold_bytes(each_volume)
    assert path.read_bytes() == data
    assert cached_bytes(each_volume) == cached
    assert cold_bytes(each_volume) - cold == SIZE, "a block was fetched twice, or not under the limiter"
    assert os.getxattr(path, "user.aof2.residency") == b"0.000"
    assert path.read_bytes() == data  # nothing was kept: it is fetched again
    assert cold_bytes(each_volume) - cold == 2 * SIZE


def test_pieces_and_mappings_of_a_cold_scan(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "file"
    data = cold_file(each_volume, path)
    os.setxattr(path, COLD, b"1")
    cached, cold = cached_bytes(each_volume), cold_bytes(each_volume)
    with open(path, "rb", buffering=0) as f:
        got = b"".join(iter(lambda: f.read(10_007), b""))
        assert got == data
        assert cold_bytes(each_volume) - cold == SIZE
        rng = random.Random(1)
        for at in (rng.randrange(SIZE) for _ in range(20)):
            assert os.pread(f.fileno(), 5000, at) == data[at : at + 5000]
        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
            assert m[:] == data
        assert os.pread(f.fileno(), 10, SIZE) == b""
    assert cached_bytes(each_volume) == cached


def test_below_a_directory_until_it_is_turned_off(each_volume: MountedVolume, each_here: Path) -> None:
    (each_here / "a" / "b").mkdir(parents=True)
    paths = [each_here / "a" / "b" / "cold", each_here / "a" / "b" / "off", each_here / "beside"]
    datas = [cold_file(each_volume, path, MIB + i) for i, path in enumerate(paths)]
    os.setxattr(each_here / "a", COLD, b"1")
    os.setxattr(paths[1], COLD, b"0")
    cold = cold_bytes(each_volume)
    for path, data in zip(paths, datas, strict=True):
        assert path.read_bytes() == data
    assert cold_bytes(each_volume) - cold == len(datas[0])
    os.removexattr(each_here / "a", COLD)
    assert paths[0].read_bytes() == datas[0]
    assert cold_bytes(each_volume) - cold == len(datas[0])


def settled_bytes(volume: MountedVolume) -> tuple[float, float]:
    """What the caches hold once the read-ahead of an earlier read has come in."""
    before = cached_bytes(volume)
    while True:
        time.sleep(0.5)
        now = cached_bytes(volume)
        if now == before:
            return now
        before = now


def test_what_is_here_is_read_from_here(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "file"
    data = cold_file(each_volume, path)
    with open(path, "rb", buffering=0) as f:  # some of it comes here
        assert os.pread(f.fileno(), MIB, 4 * MIB) == data[4 * MIB : 5 * MIB]
    os.setxattr(path, COLD, b"1")
    cached, cold = settled_bytes(each_volume), cold_bytes(each_volume)
    assert path.read_bytes() == data
    assert cached_bytes(each_volume) == cached
    assert cold_bytes(each_volume) - cold < SIZE
    each_volume.done("warm", path)
    cold = cold_bytes(each_volume)
    assert path.read_bytes() == data
    assert cold_bytes(each_volume) == cold


def test_a_cold_file_is_written_as_any_other(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "file"
    data = bytearray(cold_file(each_volume, path))
    os.setxattr(path, COLD, b"1")
    with open(path, "r+b", buffering=0) as f, open(path, "rb", buffering=0) as reader:
        os.pwrite(f.fileno(), b"changed", MIB - 3)
        data[MIB - 3 : MIB + 4] = b"changed"
        assert b"".join(iter(lambda: reader.read(MIB), b"")) == data
    assert path.read_bytes() == data


def test_the_attribute_is_an_attribute(each_volume: MountedVolume, each_here: Path) -> None:
    """Stored, listed and copied like others; on or off and nothing else."""
    path = each_here / "file"
    path.write_bytes(b"x")
    os.setxattr(path, COLD, b"1")
    assert os.getxattr(path, COLD) == b"1"
    assert os.listxattr(path) == [COLD]
    for wrong in (b"", b"yes", b"2", b"11"):
        assert code(os.setxattr, path, COLD, wrong) == "EINVAL"
    shutil.copy2(path, each_here / "copy")
    assert os.getxattr(each_here / "copy", COLD) == b"1"
    os.removexattr(path, COLD)
    assert code(os.getxattr, path, COLD) == "ENODATA"


@pytest.mark.parametrize("options", [[], ["nopassthrough"]])
def test_it_holds_after_a_remount(tmp_path: Path, options: list[str]) -> None:
    cache = {"cold_scan_bytes_per_s": "1GiB", "cold_scan_parallel": 1}
    with mounted_volume(tmp_path, options=options, cache=cache) as volume:
        paths = [volume.path / f"f{i}" for i in range(4)]
        datas = [cold_file(volume, path, 2 * MIB + i) for i, path in enumerate(paths)]
        os.setxattr(volume.path, COLD, b"1")
        volume.umount()
        volume.remount()
        cached = cached_bytes(volume)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(Path.read_bytes, paths)) == datas
        assert cached_bytes(volume) == cached
        assert cold_bytes(volume) == sum(map(len, datas))
        assert not volume.complaints()


def test_holes_of_a_cold_file_are_not_fetched(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "sparse"
    size = 150 * MIB + 77  # three chunks, the middle one a hole all over
    with open(path, "wb", buffering=0) as f:
        os.truncate(path, size)
        os.pwrite(f.fileno(), b"begin", 3 * MIB + 5)
        os.pwrite(f.fileno(), b"end", size - 3)
    each_volume.done("wait", path)
    each_volume.evict(path)
    os.setxattr(path, COLD, b"1")
    cached, cold = cached_bytes(each_volume), cold_bytes(each_volume)
    with open(path, "rb", buffering=0) as f:
        assert os.pread(f.fileno(), 20, 3 * MIB) == b"\0" * 5 + b"begin" + b"\0" * 10
        assert os.pread(f.fileno(), 20, size - 10) == b"\0" * 7 + b"end"
        assert not any(os.pread(f.fileno(), 2 * MIB, 80 * MIB))
        total = sum(len(part) - part.count(0) for part in iter(lambda: f.read(4 * MIB), b""))
        assert total == len(b"beginend")
    assert cached_bytes(each_volume) == cached
    assert cold_bytes(each_volume) - cold <= 4 * MIB
