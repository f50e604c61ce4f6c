"""What stays in the cache of a mount: what is used, also across a remount; what finds no room is served from memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.recency import Trace
from tests.support.mount import MountedVolume, mounted_volume, until

MIB = 1 << 20
HOT = 64 * MIB
TENANTS = {"default": {"kind": "files", "compression": "none"}}


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    """A cache of 64 MiB, the smallest there is."""
    with mounted_volume(tmp_path, tenants=TENANTS, cache={"hot_bytes": "64MiB"}, timeout_s=180) as v:
        yield v
        assert v.complaints() == []


def make(volume: MountedVolume, name: str, size: int = MIB) -> Path:
    path = volume.path / name
    path.write_bytes(os.urandom(size))
    return path


def read(path: Path) -> bytes:
    """All of it, from the mount: what the kernel remembers of it is dropped before and after."""
    with open(path, "rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = b"".join(iter(lambda: f.read(MIB), b""))
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return data


def is_here(path: Path) -> bool:
    return float(os.getxattr(path, "user.aof2.residency")) == 1.0


def facts(volume: MountedVolume) -> dict[str, int]:
    return volume.json("status")["mount"]  # type: ignore[no-any-return]


def hot_bytes(volume: MountedVolume) -> int:
    """What the cache takes on the disk."""
    files = (volume.state_dir / "hot_cache").rglob("*")
    return sum(p.stat().st_blocks * 512 for p in files if p.is_file())


def test_what_was_just_written_and_what_is_used_stays(volume: MountedVolume) -> None:
    """140 MiB of files through 64: those written first go first, but for those that are read now and then."""
    used = [make(volume, f"used{n}") for n in range(4)]
    for n in range(140):
        make(volume, f"f{n}")
        read(used[n % 4])
        if n % 20 == 19:
            volume.done("wait", volume.path)
    volume.done("wait", volume.path)
    until(lambda: hot_bytes(volume) <= HOT, "what was written past the limit makes way, with no further request")
    assert [path.name for path in used if not is_here(path)] == []
    here = [n for n in range(140) if is_here(volume.path / f"f{n}")]
    assert here[-20:] == list(range(120, 140)), "what was just written"
    assert all(n > 60 for n in here), f"what was written first: {here}"


def test_a_scan_does_not_push_out_what_was_used_twice_also_across_a_remount(volume: MountedVolume) -> None:
    names = [make(volume, f"f{n}") for n in range(100)]
    volume.done("wait", volume.path)
    hot = names[:20]
    for _ in range(2):
        for path in hot:
            read(path)
    volume.umount()
    volume.remount()
    for path in names[20:]:
        read(path)
    assert [path.name for path in hot if not is_here(path)] == []


def test_a_zipf_trace_with_a_remount_hits_as_often_as_with_lru(volume: MountedVolume) -> None:
    """The short version of `scripts/torture recency`."""
    trace = Trace(volume, files=700, hot_bytes=HOT, share=0.2)
    trace.write()
    outcome = trace.run(600)
    assert outcome.mount >= outcome.lru - 0.03
    assert trace.disk_bytes() <= HOT


@contextlib.contextmanager
def crowded(volume: MountedVolume) -> Iterator[None]:
    """No room: nearly everything the cache holds is open, and not sealed while it is."""
    with contextlib.ExitStack() as stack:
        for n in range(20):
            stack.enter_context(open(make(volume, f"used{n}", 3 * MIB), "rb"))
        yield


def test_without_room_reads_are_served_from_memory(volume: MountedVolume) -> None:
    cold = make(volume, "cold", 10 * MIB + 4321)
    data = read(cold)
    volume.done("wait", cold)
    volume.evict(cold)
    with crowded(volume):
        check_it_is_served_from_memory(volume, cold, data)


def check_it_is_served_from_memory(volume: MountedVolume, cold: Path, data: bytes) -> None:
    before = facts(volume)
    assert read(cold) == data
    first = facts(volume)
    assert first["page_cache_misses"] > before["page_cache_misses"]
    assert first["hydrated_bytes"] - before["hydrated_bytes"] < 2 * len(data), "each block about once"
    assert 4 * MIB < first["page_cache_bytes"] <= 16 * MIB
    for _ in range(3):
        assert read(cold) == data
    again = facts(volume)
    assert again["page_cache_hits"] - first["page_cache_hits"] >= 3 * 6
    assert again["hydrated_bytes"] == first["hydrated_bytes"], "the remote is not asked again"
    metrics = (volume.mountpoint / ".aof2" / "metrics").read_text()
    assert f"aof2_page_cache_hits_total {float(again['page_cache_hits'])}" in metrics


def test_a_file_larger_than_memory_and_room_is_read_all_the_same(volume: MountedVolume) -> None:
    """40 MiB through 16 MiB of PageCache: memory holds, and what is fetched ahead does not push itself out."""
    cold = make(volume, "cold", 40 * MIB)
    data = read(cold)
    volume.done("wait", cold)
    volume.evict(cold)
    with crowded(volume):
        before = facts(volume)["hydrated_bytes"]
        assert read(cold) == data
        after = facts(volume)
    assert after["page_cache_bytes"] <= 16 * MIB
    assert after["hydrated_bytes"] - before < 1.5 * len(data)
