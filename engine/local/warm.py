"""warm/: chunks that left hot_cache, compressed, on the same disk: `warm/<tenant>/<chunk_id>.blob`.

A chunk that is evicted from hot_cache and compresses well is kept here as a blob (the same format as in the remote),
up to `warm_bytes`; which makes way is the policy's to say (`recency`). Reading one back costs no request. Everything
here is also in the remote, so a warm blob may go at any time.

Invariants
- A warm blob is named by its row (`ResidencyRow.warm_bytes`) only after it is whole and synced.
- The row says that it is gone before the file goes. So a crash leaves an orphan file at most, replaced when met.
- Bytes used never pass the limit: room is made before a blob is written.

Owner: blocking; called on the evictor's worker thread (writing) and on readers' (reading). A lock guards policy
and counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aof2.engine.blob.reader import BlobReader
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ChunkRow
from aof2.engine.env import Env
from aof2.engine.fds import opened
from aof2.engine.local.hot import read_exactly
from aof2.engine.locks import ThreadLock
from aof2.engine.recency import EvictionPolicy
from aof2.engine.tiering.hashing import block_crc

# A blob that is not at least this much smaller is not worth keeping: the remote has it.
WORTH_RATIO: Final = 0.8
LEVEL: Final = 1
PROBE_BLOCKS: Final = 4
CRASH_POINTS: Final = ("warm.written",)

Slot = tuple[int, int]  # stream id, chunk id


def _key(slot: Slot) -> int:
    """A slot as the policy knows it."""
    return slot[0] << INO_STREAM_SHIFT | slot[1]


def _slot(key: int) -> Slot:
    return key >> INO_STREAM_SHIFT, key & (1 << INO_STREAM_SHIFT) - 1


@dataclass(eq=False)
class WarmStore:
    """The folder of warm blobs and how full it is. `lock` guards `policy`, also while `tiering/recent.py` saves it."""

    env: Env
    root: Path
    limit_bytes: int
    policy: EvictionPolicy
    lock: ThreadLock
    tenants: Callable[[], dict[int, str]]
    block_bytes: int
    used_bytes: int = 0
    dropped: int = 0  # blobs given up since the start
    dropped_bytes: int = 0

    def path(self, tenant: str, chunk_id: int) -> Path:
        return self.root / tenant / f"{chunk_id}.blob"

    def restore(self, rows: Iterable[tuple[Slot, int]]) -> None:
        """The blobs of earlier runs, with their lengths: counted, in the order that was saved."""
        with self.lock:
            here: set[int] = set()
            for slot, stored_bytes in rows:
                key = _key(slot)
                here.add(key)
                self.policy.admit_old(key, stored_bytes)
                self.policy.sized(key, stored_bytes)
                self.used_bytes += stored_bytes
            for key in list(self.policy.in_order()):
                if key not in here:
                    self.policy.forget(key)

    def victims(self, size_bytes: int) -> list[Slot]:
        """The blobs that must go for so many bytes to fit."""
        with self.lock:
            over = self.used_bytes + size_bytes - self.limit_bytes
            out: list[Slot] = []
            if over > 0:
                for key in self.policy.in_order():
                    out.append(_slot(key))
                    over -= self.policy.units_of(key)
                    if over <= 0:
                        break
            return out

    def drop(self, slots: list[Slot]) -> None:
        """The rows say they are gone: so do the files."""
        for slot in slots:
            with self.lock:
                stored = self.policy.units_of(_key(slot))
                self.policy.forget(_key(slot))
                self.used_bytes -= stored
                self.dropped += bool(stored)
                self.dropped_bytes += stored
            tenant = self.tenants().get(slot[0])
            if stored and tenant is not None:
                with contextlib.suppress(FileNotFoundError):
                    self.env.files.unlink(self.path(tenant, slot[1]))

    def stage(
        self, tenant: str, chunk: ChunkRow, source_fd: int, offset: int, admit: Callable[[], None] = lambda: None
    ) -> int | None:
        """Writes the chunk's blob, synced, if it compresses well and fits at all; its length. Not yet counted.

        `admit` is called once, when the first blocks have shown that it pays; CorruptError may come before or after.
        """
        if chunk.length == 0 or chunk.length * WORTH_RATIO > self.limit_bytes:
            return None
        path = self.path(tenant, chunk.chunk_id)
        self.env.make_dirs(path.parent)
        with contextlib.suppress(FileNotFoundError):
            self.env.files.unlink(path)
        with self.env.files.closing(self.env.files.create(path)) as fd:
            stored = self._write(fd, chunk, source_fd, offset, admit)
            if stored is not None:
                self.env.files.fsync(fd)
                self.env.failpoint("warm.written")
                return stored
        self.env.files.unlink(path)
        return None

    def _write(self, fd: int, chunk: ChunkRow, source_fd: int, offset: int, admit: Callable[[], None]) -> int | None:
        at = 0

        def sink(data: bytes | bytearray | memoryview) -> None:
            nonlocal at
            self.env.files.pwrite(fd, data, at)
            at += len(data)

        writer = BlobWriter(
            sink,
            chunk_id=chunk.chunk_id,
            generation=chunk.generation,
            block_bytes=self.block_bytes,
            level=LEVEL,
            sha256=chunk.sha256,
        )
        for index, start in enumerate(range(0, chunk.length, self.block_bytes)):
            if chunk.holes >> index & 1:
                writer.add_hole(min(self.block_bytes, chunk.length - start))
                continue
            block = read_exactly(source_fd, offset + start, min(self.block_bytes, chunk.length - start))
            writer.add_block(block, block_crc(chunk.block_crcs, index))
            if index == PROBE_BLOCKS - 1:
                if at > PROBE_BLOCKS * self.block_bytes * WORTH_RATIO:
                    return None  # four blocks in it does not pay: the rest will hardly either
                admit()
        footer = writer.finish()
        if footer.blob_len > chunk.length * WORTH_RATIO:
            return None
        if footer.frame_count < PROBE_BLOCKS:
            admit()
        return footer.blob_len

    def count(self, slot: Slot, stored_bytes: int) -> None:
        """Its row is committed: it is here."""
        with self.lock:
            self.policy.sized(_key(slot), stored_bytes)
            self.used_bytes += stored_bytes

    def has(self, slot: Slot) -> bool:
        with self.lock:
            return _key(slot) in self.policy

    def blocks(self, tenant: str, chunk: ChunkRow, slot: Slot, first: int, count: int) -> list[bytes]:
        """Blocks of a warm chunk, verified; CorruptError or FileNotFoundError when it cannot be trusted."""
        with self.lock:
            if _key(slot) in self.policy:
                self.policy.used(_key(slot))
        path = self.path(tenant, chunk.chunk_id)
        with opened(path) as fd:
            size = os.fstat(fd).st_size

            def pread(at: int, length: int) -> bytes:
                return os.pread(fd, length, at)

            reader = BlobReader(pread, size, chunk_id=chunk.chunk_id, sha256=chunk.sha256, path=str(path))
            return [reader.read_block(index) for index in range(first, first + count)]
