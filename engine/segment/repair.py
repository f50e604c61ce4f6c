"""The changes recovery makes to a stream's folder: trim a torn tail, keep bytes that may matter, remove empty files.

Invariants
- What is cut off or removed is first saved beside the segment (`<segment_id>.seg.torn`, then `.torn.1`, …) when a whole
  record lies in it; a saved file is never overwritten by other bytes.
- Each step can be repeated: a crash between any two leaves a folder on which recovery does the rest.
- A trimmed file ends in zeros as long as a footer, like every unsealed file.

Owner: the thread that recovers the stream, before anything else opens it.

What a crash leaves behind: the tail untrimmed or trimmed; perhaps a `.torn` copy of a tail that is still there, or a
`.tmp`, which the next recovery removes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.segment.file import SEALED_MODE
from aof2.engine.segment.format import FOOTER_BYTES, Version
from aof2.engine.segment.model import ActiveSegment

TORN: Final = ".torn"  # in the name of what is put aside
CRASH_POINTS: Final = (
    "segment.recover.torn.temp",
    "segment.recover.torn.synced",
    "segment.recover.torn.renamed",
    "segment.recover.trimmed",
    "segment.recover.synced",
    "segment.recover.removed",
    "segment.recover.put_aside",
)


def sweep_temps(env: Env, directory: Path) -> None:
    """Removes what an interrupted replacement left."""
    for path in sorted(directory.glob("*.tmp")):
        env.files.unlink(path)


def trim(env: Env, active: ActiveSegment) -> None:
    """Cuts an unsealed file behind its last whole record, durably."""
    active.path.chmod(0o600)  # a seal that a crash undid may have made it read-only
    with env.files.closing(env.files.open_rw(active.path)) as fd:
        env.files.truncate(fd, active.end_offset)
        env.files.truncate(fd, active.end_offset + FOOTER_BYTES[Version(active.header.version)])
        env.failpoint("segment.recover.trimmed")
        env.files.fsync(fd)
    env.files.fsync_dir(active.path.parent)
    env.failpoint("segment.recover.synced")


def make_durable(env: Env, path: Path, *, sealed: bool) -> None:
    """Makes durable what recovery read, since it may have been in memory alone; a sealed file loses its write bit."""
    with env.files.closing(env.files.open_ro(path)) as fd:
        env.files.fsync(fd)
    env.files.fsync_dir(path.parent)
    if sealed:
        path.chmod(SEALED_MODE)


def save_torn(env: Env, path: Path, data: bytes) -> Path:
    """Writes bytes that are about to be cut off beside their segment."""
    target = _torn_path(path, data)
    if not target.exists():
        env.replace_file(target, data, point="segment.recover.torn")
    return target


def put_aside(env: Env, path: Path) -> Path:
    """Renames a file that is no segment any more but holds records."""
    target = _torn_path(path, None)
    env.files.rename(path, target)
    env.failpoint("segment.recover.put_aside")
    env.files.fsync_dir(path.parent)
    return target


def remove(env: Env, path: Path) -> None:
    """Removes a file that holds no record."""
    env.files.unlink(path)
    env.failpoint("segment.recover.removed")
    env.files.fsync_dir(path.parent)


def _torn_path(path: Path, data: bytes | None) -> Path:
    """The first name that is free, or already holds these bytes."""
    n = 0
    while True:
        target = path.with_name(f"{path.name}{TORN}" + (f".{n}" if n else ""))
        if not target.exists() or (data is not None and target.read_bytes() == data):
            return target
        n += 1
