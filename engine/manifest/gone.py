"""What a damaged or missing chunk took along: which records, and what can still be read around them.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.manifest.examine import Examined, examine, survey
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, RECORD_HEADER_LEN, LogPosition

ASIDE_DIR: Final = "quarantine"
_PAYLOAD_LEN_AT: Final = 4


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """Records that cannot be replayed: `first` is the first of them, `last` the last where the log tells (else None).

    `readable` of them are whole behind the damage, and cannot be applied without what is missing before them.
    """

    chunk_index: int
    first: int
    last: int | None
    readable: int

    @property
    def text(self) -> str:
        last = "the end" if self.last is None else str(self.last)
        which = f"record {self.first}" if self.last == self.first else f"records {self.first} to {last}"
        rest = f", {self.readable} of them readable behind the damage and not applied" if self.readable else ""
        return f"{which} of the log (chunk {self.chunk_index} on) cannot be replayed{rest}"


def behind_damage(examined: Examined) -> Iterator[tuple[int, bytes]]:
    """(type, payload) of records of a damaged chunk behind its first fault, as far as they can be made out."""
    try:
        data = examined.where.read()
    except (Aof2Error, OSError):
        return
    pos = native.manifest_scan(data, CHUNK_HEADER_LEN).pos
    while pos + RECORD_HEADER_LEN <= len(data):
        length = int.from_bytes(data[pos + _PAYLOAD_LEN_AT : pos + _PAYLOAD_LEN_AT + 4], "little")
        pos += RECORD_HEADER_LEN + length
        if not length or length % 8 or pos >= len(data):
            return
        scan = native.manifest_scan(data, pos)
        for offset, kind, size in zip(scan.rows.offset, scan.rows.type, scan.rows.payload_len, strict=True):
            at = offset + RECORD_HEADER_LEN
            yield kind, data[at : at + size]
        pos = scan.pos


def find_gone(directory: Path, position: LogPosition | None) -> Gone:
    """What a replay that came to `position` could not go on with."""
    first = position.ordinal if position else 0
    chunk_index = position.chunk_index if position else 0
    last: int | None = None
    readable = 0
    for examined in examine(survey(directory), chunk_index):
        if examined.chunk is None or not examined.whole:
            last = None
            readable += sum(1 for _ in behind_damage(examined))
            continue
        end = examined.chunk.end_position.ordinal
        if end > first:
            readable += examined.chunk.count
            last = end - 1
    if last is not None and last < first:
        last = None
    return Gone(chunk_index=chunk_index, first=first, last=last, readable=readable)


def set_aside(env: Env, state_dir: Path, stream: str, path: Path) -> Path:
    """Moves a damaged file out of the way, where nothing reads it and an operator can look at it."""
    folder = state_dir / ASIDE_DIR / stream
    env.make_dirs(folder)
    kept = folder / f"{path.name}.{env.now_ms()}"
    while os.path.lexists(kept):
        kept = kept.with_name(kept.name + "_")
    env.files.rename(path, kept)
    env.files.fsync_dir(folder)
    env.files.fsync_dir(path.parent)
    return kept
