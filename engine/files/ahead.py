"""Uploads ahead of a seal: the chunks of a large file set off as they are hashed, while the next ones still are.

    hashed ── named, and said to be on its way (a commit) ── put ──┐
    … the other chunks are hashed, the file is synced, the seal is recorded ── the job finds them there, or on their way

What was not begun when the seal is recorded is the job's. So is what failed: a job has retries, and this has none.

Invariants
- Only content that is neither in the remote nor on its way sets off.
- A blob here is named by no row before the seal that took its id is recorded, and the publication after it. Where the
  file is written to or removed meanwhile, its uploads end within a few MiB; what is there by then is found by its
  content at the next seal, or cleared away as an upload that was given up.
- A chunk that is not what was hashed is no blob: the upload checks each byte against the hash (`tiering/publish.py`).

Owner: the trio thread; chunks are told by the thread that hashes. A crash leaves uploads without an end in the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import objects
from aof2.engine.aio import Tasks, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState
from aof2.engine.errors import Aof2Error
from aof2.engine.files.state import OpenFile
from aof2.engine.tiering.hashing import ChunkDigest
from aof2.engine.tiering.publish import CHUNKS_AT_ONCE, Target

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("ahead.begun", "ahead.put")


class Ahead:
    """The uploads ahead of one seal. `tasks`: where they run; `go_on` is asked every few MiB, on any thread."""

    def __init__(self, volume: Volume, file: OpenFile, tasks: Tasks, go_on: Callable[[], bool]) -> None:
        self.ids: dict[int, int] = {}  # chunk index → id, of those that the log knows to be on their way
        self._volume = volume
        self._file = file
        self._key = file.key
        self._attempt = file.seal_attempt
        self._tasks = tasks
        self._go_on = go_on
        self._token = trio.lowlevel.current_trio_token()
        self._hashed: deque[tuple[int, ChunkDigest]] = deque()
        self._running = 0
        self._naming = 0  # commits under way that give ids
        self._named = trio.Event()
        self._open = True  # further chunks may set off
        self._over = False  # the rows tell whether it is sealed

    def hashed(self, index: int, digest: ChunkDigest) -> None:
        """From the thread that hashes."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._take, index, digest)

    async def over(self) -> None:
        """All chunks are hashed: no other sets off, and `ids` are all there are."""
        self._open = False
        self._hashed.clear()
        while self._naming:
            self._named = trio.Event()
            await self._named.wait()

    def ended(self) -> None:
        """The seal is recorded, or will not be: then nothing of this is wanted."""
        self._open = False
        self._over = True

    def _take(self, index: int, digest: ChunkDigest) -> None:
        if not self._open:
            return
        self._hashed.append((index, digest))
        if self._running < CHUNKS_AT_ONCE and self._tasks.begin(self._run):
            self._running += 1

    async def _run(self) -> None:
        """One of a few tasks that take the next chunk until there is none."""
        try:
            while self._hashed:
                await self._upload(*self._hashed.popleft())
        except (Aof2Error, OSError) as e:
            self._open = False
            self._hashed.clear()
            log.info("chunks are uploaded after the seal", extra={"ino": self._key[1], "error": str(e)})
        finally:
            self._running -= 1

    async def _upload(self, index: int, digest: ChunkDigest) -> None:
        stream_id, ino, generation = self._key
        publisher, env = self._volume.publisher, self._volume.env
        if publisher.is_begun(stream_id, digest.sha256):
            return
        begun = partial(
            objects.ahead_begun,
            tenant=self._file.tenant,
            ino=ino,
            generation=generation,
            index=index,
            sha256=digest.sha256,
        )
        self._naming += 1
        try:
            with trio.CancelScope(shield=True):
                ids, key = await result_of(self._volume.writer.submit(stream_id, begun))
            self.ids[index] = ids.chunk_id
        finally:
            self._naming -= 1
            self._named.set()
        env.failpoint("ahead.begun")
        settings = self._volume.settings.tenants.get(self._file.tenant)
        target = Target(
            stream_id,
            self._file.tenant,
            ObjectRow(ino, generation, ObjectState.DIRTY, chunk_bytes=self._volume.settings.engine.chunk_bytes),
            settings.compression if settings is not None else "none",
            is_wanted=self._is_wanted,
            announced=frozenset({key}),
        )
        chunk = ChunkRow(
            ids.chunk_id,
            ino,
            generation,
            index,
            digest.length,
            digest.sha256,
            digest.crc64,
            digest.block_crcs,
            holes=digest.holes,
        )
        await publisher.put_ahead(target, chunk, ids.checkpoint_id)
        env.failpoint("ahead.put")

    def _is_wanted(self) -> bool:
        """On any thread."""
        if not self._go_on():
            return False
        if not self._over:
            return self._file.seal_attempt == self._attempt
        with self._volume.catalog.view() as view:
            row = view.get(self._key[0], t.OBJECTS, self._key[1:])
        return row is not None and row.state == ObjectState.SEALED
