"""A stream whose log is damaged is set aside: no writer appends to it until an operator or a repair lifts that.

The mark is `quarantine.json` in the stream's folder: which chunk, segment and offset, what was wrong, when. Reading
(`manifest inspect`, `verify`, restoring) stays possible.

Owner: the thread that replays the stream. A crash leaves the mark or not, whole either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError
from aof2.engine.manifest.format import ManifestIntegrityError

NAME: Final = "quarantine.json"


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    chunk_index: int | None = None
    segment_id: int | None = None
    offset: int | None = None
    since_ms: int
    gone: str = ""
    files: list[str] = []
    """Files that the records which cannot be replayed speak of, as far as that can be told."""

    @property
    def text(self) -> str:
        more = f"; they speak of {', '.join(self.files[:10])}" if self.files else ""
        rest = f" and {len(self.files) - 10} more" if len(self.files) > 10 else ""
        return self.what + (f"; {self.gone}" if self.gone else "") + more + rest


def quarantine(
    env: Env, directory: Path, error: ManifestIntegrityError, *, gone: str = "", files: Sequence[str] = ()
) -> Quarantine:
    """Sets the stream aside. A mark already there stays: the first damage found is the one to look at."""
    existing = read_quarantine(directory)
    if existing is not None and (existing.gone or not gone):
        return existing
    mark = Quarantine(
        what=error.what,
        chunk_index=error.chunk_index,
        segment_id=error.segment_id,
        offset=error.offset,
        since_ms=env.now_ms(),
        gone=gone,
        files=list(files),
    )
    env.replace_file(
        directory / NAME, msgspec.json.format(msgspec.json.encode(mark)) + b"\n", point="manifest.quarantine"
    )
    return mark


def read_quarantine(directory: Path) -> Quarantine | None:
    try:
        data = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=Quarantine)
    except msgspec.DecodeError:
        return Quarantine(what="the quarantine mark itself is unreadable", since_ms=0)


def refuse_if_quarantined(directory: Path) -> None:
    mark = read_quarantine(directory)
    if mark is not None:
        raise ReadOnlyError(f"{directory}: quarantined: {mark.what}; `aof2 verify --repair` mends it, or mount again")


def lift(env: Env, directory: Path) -> None:
    env.files.unlink(directory / NAME)
    env.files.fsync_dir(directory)
