"""A Zipf trace of whole-file reads through a mount whose cache holds a tenth of the data, beside textbook LRU.

A miss is a fetch from the remote: files are one block at most, so each costs exactly one. What the kernel has of a file
is dropped after each read: only the cache is to be seen. Textbook LRU gets the same files, trace and bytes, from the
same first state: what was read last during the warm-up.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.recency.traces import TextbookLru, zipf
from tests.support.mount import MountedVolume

PAGE = 4096


class Outcome(NamedTuple):
    """Shares of the accesses that found their file here."""

    mount: float
    lru: float


class Trace:
    """Files in a mount, and reads of them."""

    def __init__(self, volume: MountedVolume, *, files: int, hot_bytes: int, share: float = 0.1, seed: int = 1) -> None:
        self._volume = volume
        self._hot_bytes = hot_bytes
        self._rng = random.Random(seed)
        mean_pages = hot_bytes / share / files / PAGE
        self._sizes = [PAGE * round(self._rng.uniform(0.2, 1.8) * mean_pages) for _ in range(files)]
        assert max(self._sizes) <= 1 << 20, "one block a file"
        self._fetched_before = 0

    @property
    def data_bytes(self) -> int:
        return sum(self._sizes)

    def _path(self, name: int) -> Path:
        return self._volume.path / f"d{name % 50}" / f"f{name}"

    def write(self) -> None:
        for n in range(min(50, len(self._sizes))):
            (self._volume.path / f"d{n}").mkdir()
        for name, size in enumerate(self._sizes):
            self._path(name).write_bytes(self._content(name, size))
        waited = self._volume.aof2("wait", self._volume.path, timeout_s=600)
        assert waited.returncode == 0, waited.stderr

    def _content(self, name: int, size: int) -> bytes:
        return (b"%08d" % name) * (size // 8)

    def read(self, name: int) -> None:
        fd = os.open(self._path(name), os.O_RDONLY)
        try:
            data = os.read(fd, 2 << 20)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        assert len(data) == self._sizes[name]
        assert data[:8] == data[-8:] == b"%08d" % name

    def misses(self) -> int:
        """Fetches so far, of all mounts."""
        text = (self._volume.mountpoint / ".aof2" / "metrics").read_text()
        found = re.search(r'^aof2_hydrations_total\{[^}]*result="ok"[^}]*\} (\S+)', text, re.MULTILINE)
        return self._fetched_before + int(float(found[1])) if found else self._fetched_before

    def remount(self) -> None:
        self._fetched_before = self.misses()
        ended = self._volume.aof2("umount", timeout_s=600)
        assert ended.returncode == 0, ended.stderr
        self._volume.remount()

    def run(self, accesses: int, *, s: float = 1.0, say: Callable[[str], None] = lambda _: None) -> Outcome:
        """Warms up with a third of the accesses, then counts, with a remount in the middle."""
        trace = zipf(len(self._sizes), accesses + accesses // 3, s=s, seed=self._rng.randrange(1 << 30))
        lru = TextbookLru(self._hot_bytes, self._sizes)
        warm_up, counted = trace[: accesses // 3], trace[accesses // 3 :]
        self._read_all(warm_up, lru)
        before = self.misses()
        found = self._read_all(counted[: accesses // 2], lru)
        half = 1 - (self.misses() - before) / (accesses // 2)
        say(f"first half: {half:.4f}, textbook LRU {found / (accesses // 2):.4f}")
        self.remount()
        found += self._read_all(counted[accesses // 2 :], lru)
        return Outcome(1 - (self.misses() - before) / accesses, found / accesses)

    def _read_all(self, names: Sequence[int], lru: TextbookLru) -> int:
        found = 0
        for name in names:
            self.read(name)
            found += lru.access(name)
        return found

    def disk_bytes(self) -> int:
        """What hot_cache takes on the disk."""
        return sum(p.stat().st_blocks * 512 for p in (self._volume.state_dir / "hot_cache").rglob("*") if p.is_file())
