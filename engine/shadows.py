"""`[manifest] shadow`: every stream's tier state kept a second time, as JSON beside its log, and compared with that.

    manifest/<stream>/shadow.json   (FORMATS.md)

The JSON is folded by code of its own (`manifest/shadow.py`) from the records as they are committed. Every second the
segments that changed are compared with what the catalog folded from the same records; those that differ are counted in
manifest_shadow_divergence and named in the log once. 0 is what it should be.

Invariants
- Both sides are looked at on the writer thread, after a commit: they have seen the same records.
- A file that is behind the log is brought up to it from the log; where that begins later, or there is no file, the
  shadow begins with what the catalog says, and is compared from there on.

Owner: `observe` and comparing are the catalog thread's, the rest is one task of the volume. A crash leaves the file of
the last save. It costs memory for every segment: for finding out whether the log can be trusted, not for every day.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import entries_of, load_pending
from aof2.engine.catalog.writer import StreamState
from aof2.engine.errors import Aof2Error, FatalIOError, ReadOnlyError
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.shadow import ShadowState, as_json

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

COMPARE_EVERY_S: Final = 1.0
NAMED_MAX: Final = 20


class _Shadow:
    """One stream's."""

    def __init__(self, stream: StreamState, state: ShadowState) -> None:
        self.stream = stream
        self.state = state
        self.touched: set[int] = set()
        self.divergent: set[int] = set()
        self.unsaved = True

    def observe(self, kind: int, segment_id: int, payload: bytes) -> None:
        self.state.observe(kind, segment_id, payload)
        self.touched.add(segment_id)
        self.unsaved = True


class Shadows:
    """Of one volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._shadows: dict[int, _Shadow] = {}

    def attach(self) -> None:
        """A shadow for every stream that has none yet. Blocks; before anything is written to it."""
        for stream in self._volume.target.streams.values():
            if stream.stream_id not in self._shadows:
                shadow = _Shadow(stream, self._begin(stream))
                shadow.touched.update(shadow.state.segment_ids)
                self._shadows[stream.stream_id] = shadow
                stream.observe = shadow.observe

    def _begin(self, stream: StreamState) -> ShadowState:
        directory = self._directory(stream.stream_id)
        try:
            state = ShadowState.load(directory)
            if state.position is not None:
                _catch_up(state, directory, state.position)
                return state
        except (Aof2Error, OSError) as e:
            log.info("a shadow begins anew", extra={"stream_id": stream.stream_id, "error": str(e)})
        with self._volume.catalog.view() as view:
            pending = load_pending(view, stream.stream_id).pending_uploads
            return ShadowState.of(entries_of(view, stream.stream_id), pending)

    def _directory(self, stream_id: int) -> Path:
        return self._volume.manifest_dir / str(stream_id)

    # -- comparing ---------------------------------------------------------------------------------------------

    @property
    def divergence(self) -> int:
        return sum(len(shadow.divergent) for shadow in self._shadows.values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):  # compared later
                await self.compare()
            await trio.sleep(COMPARE_EVERY_S)

    async def compare(self) -> None:
        """Looks at what changed since the last time."""
        for shadow in self._shadows.values():
            if shadow.touched:
                await self._between_groups(shadow, self._compare)

    async def _between_groups(self, shadow: _Shadow, work: Callable[[_Shadow], None]) -> None:
        """On the writer thread, after a commit: log and rows stand still."""

        def after(b: Batch) -> None:
            b.after_commit.append(partial(work, shadow))

        await result_of(self._volume.writer.submit(shadow.stream.stream_id, after))

    def _compare(self, shadow: _Shadow) -> None:
        touched, shadow.touched = shadow.touched, set()
        stream_id = shadow.stream.stream_id
        with self._volume.catalog.view() as view:
            fold = shadow.stream.fold
            fold.view = view
            for segment_id in touched:
                entry = fold.entries.get(segment_id)
                theirs = None if entry is None else as_json(entry)
                if shadow.state.segments.get(str(segment_id)) == theirs:
                    shadow.divergent.discard(segment_id)
                elif segment_id not in shadow.divergent:
                    shadow.divergent.add(segment_id)
                    if len(shadow.divergent) <= NAMED_MAX:
                        log.error("shadow and log disagree", extra={"stream_id": stream_id, "segment_id": segment_id})
            fold.entries.clear()
            fold.view = None

    # -- keeping -----------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """The files say what the shadows say now."""
        for shadow in self._shadows.values():
            if shadow.unsaved:
                await self._between_groups(shadow, self._save)

    def _save(self, shadow: _Shadow) -> None:
        shadow.unsaved = False
        shadow.state.position = shadow.stream.log.position
        shadow.state.save(self._volume.env, self._directory(shadow.stream.stream_id))


def _catch_up(state: ShadowState, directory: Path, position: LogPosition) -> None:
    """The records that were committed after the file was saved."""
    for chunk in Stream(directory).read(position):
        first = max(0, position.ordinal - chunk.header.base_record)
        data = bytes(chunk.data)
        rows = zip(*(column[first : chunk.count].tolist() for column in chunk.rows), strict=True)
        for offset, kind, _, length, segment_id, _, _ in rows:
            state.observe(kind, segment_id, data[offset + 40 : offset + 40 + length])
