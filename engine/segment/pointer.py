"""`current.sealed`: names the newest sealed segment of a stream, so that recovery starts there.

Invariants
- It is replaced as a whole (temp, fsync, rename, fsync of the folder), and only after the seal's own fsync: `publish`
  takes a SealedSegment, which exists only then. So it never names a segment that is not sealed.
- `publish` never moves it back to an older segment.
- Bad content is a reason, not an exception: the pointer is a short cut, everything it tells is also in the segments.

Owner: the thread that seals the stream's segments.

What a crash leaves behind: the old pointer or the new one, whole; perhaps `current.sealed.tmp`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment.format import POINTER_BYTES, Pointer, decode_pointer, encode_pointer
from aof2.engine.segment.model import POINTER_NAME, SealedSegment

CRASH_POINTS: Final = ("segment.pointer.temp", "segment.pointer.synced", "segment.pointer.renamed")


class NoPointer(StrEnum):
    """Why there is no pointer to go by."""

    MISSING = "missing"
    DAMAGED = "damaged"
    UNSUPPORTED = "written by a newer AOF2"


def load_pointer(directory: Path) -> Pointer | NoPointer:
    """The pointer of a stream's folder, or the reason to do without."""
    path = directory / POINTER_NAME
    try:
        with path.open("rb") as f:
            data = f.read(POINTER_BYTES + 1)
    except FileNotFoundError:
        return NoPointer.MISSING
    except OSError:
        return NoPointer.DAMAGED
    try:
        return decode_pointer(data, path=str(path))
    except CorruptError:
        return NoPointer.DAMAGED
    except UnsupportedError:
        return NoPointer.UNSUPPORTED


def store_pointer(env: Env, directory: Path, pointer: Pointer) -> None:
    """Replaces the pointer, whatever it was."""
    env.replace_file(directory / POINTER_NAME, encode_pointer(pointer), point="segment.pointer")


def publish(env: Env, directory: Path, sealed: SealedSegment, *, coordinator_watermark: int | None = None) -> bool:
    """Moves the pointer to a segment whose seal returned; False when it is already there or further.

    v2 keeps no watermark in its footer: give it here.
    """
    pointer = sealed.pointer
    if coordinator_watermark is not None:
        pointer = Pointer(pointer.segment_id, coordinator_watermark, pointer.durable_bytes)
    current = load_pointer(directory)
    if isinstance(current, Pointer) and current.segment_id >= pointer.segment_id:
        return False
    store_pointer(env, directory, pointer)
    return True
