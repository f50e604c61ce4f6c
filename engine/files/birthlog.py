"""The birth log: files that the channel created by itself, until the catalog knows them.

`births/<tenant id>-<number>.log`, a file a tenant and mount, written by the channel alone, record by record, before it
answers; FORMATS.md has the layout. The daemon folds records into the catalog a moment later, with how far it got in the
same commit, so every record is folded once, whatever ends when.

Invariants
- A fold names its position; recovery starts behind it. What a later operation did to a file is never undone.
- A record that fails its checksum is the torn end: nothing behind it was answered.

Owner: the daemon reads, recovery removes. A crash leaves records that recovery folds before anything else is served.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error
from aof2.engine.namespace import nodes

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

RECORD: Final = struct.Struct("<IIHHIQQIIQQI12x")
BORN: Final = 1
RELEASED: Final = 2
DROPPED: Final = 1
POSITION: Final = "births"  # a counter of the stream: log number << 40 | offset
POSITION_SHIFT: Final = 40
BATCH_FILES: Final = 256
INO_MASK: Final = (1 << INO_STREAM_SHIFT) - 1


class Birth(NamedTuple):
    ino: int
    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    time_ns: int
    fh: int
    flags: int
    end: int


class Release(NamedTuple):
    ino: int
    fh: int
    dropped: bool
    end: int


def log_name(stream_id: int, number: int) -> str:
    return f"{stream_id}-{number}.log"


def parse(data: bytes, offset: int = 0, *, check: bool = False) -> Iterator[Birth | Release]:
    """The records in `data`, which starts at `offset` of the log; ends at the first that is cut or fails its check."""
    at = 0
    while at + RECORD.size <= len(data):
        size, crc, kind, name_len, mode, ino, parent, uid, gid, time_ns, fh, flags = RECORD.unpack_from(data, at)
        if size < RECORD.size or at + size > len(data) or RECORD.size + name_len > size:
            return
        if check and zlib.crc32(data[at + 8 : at + size]) != crc:
            return
        end = offset + at + size
        if kind == BORN:
            name = data[at + RECORD.size : at + RECORD.size + name_len]
            yield Birth(ino, parent, name, mode, uid, gid, time_ns, fh, flags, end)
        elif kind == RELEASED:
            yield Release(ino, fh, bool(flags & DROPPED), end)
        at += size


def reserve_inos(b: Batch, *, count: int) -> int:
    """Inode numbers for files that are not born yet; the first."""
    return b.stream_id << INO_STREAM_SHIFT | b.next_id("ino", step=count)


def fold(
    b: Batch, births: Sequence[Birth], *, position: int, chunk_bytes: int, after: int | None = None
) -> list[InodeRow | None]:
    """Files that exist already, made known: one commit for many. None for one whose place is gone or taken. `after`:
    the position that the catalog must have, or an earlier group would be passed over."""
    if after is not None and (b.get(t.COUNTERS, POSITION) or 0) != after:
        raise os_error(errno.ENOSPC)  # only a full disk refuses one group and takes the next
    touched: dict[int, int] = {}
    rows = [_fold_one(b, birth, touched, chunk_bytes) for birth in births]
    for parent, time_ns in touched.items():
        above = nodes.directory(b, parent)
        now_ns = max(time_ns, above.mtime_ns)
        b.put(t.INODES, parent, msgspec.structs.replace(above, mtime_ns=now_ns, ctime_ns=max(now_ns, above.ctime_ns)))
    if births:
        last = max(birth.ino for birth in births) & INO_MASK
        if last > (b.get(t.COUNTERS, "ino") or 0):
            b.put(t.COUNTERS, "ino", last)  # the grant itself was lost with the power
    b.put(t.COUNTERS, POSITION, position)
    return rows


def _fold_one(b: Batch, birth: Birth, touched: dict[int, int], chunk_bytes: int) -> InodeRow | None:
    if b.get(t.INODES, birth.ino) is not None:
        return None
    try:
        nodes.check_free(b, birth.parent, birth.name)
    except OSError as e:
        log.critical("a new file lost its place", extra={"ino": birth.ino, "error": str(e)})
        return None
    time_ns = birth.time_ns
    row = InodeRow(
        birth.ino,
        stat.S_IFREG | stat.S_IMODE(birth.mode),
        birth.uid,
        birth.gid,
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        atime_ns=time_ns,
        generation=1,
        parent=birth.parent,
        last_name=birth.name,
    )
    b.put(t.INODES, birth.ino, row)
    nodes.put_entry(b, birth.parent, birth.name, row)
    objects.create(b, birth.ino, 1, chunk_bytes=chunk_bytes)
    touched[birth.parent] = max(time_ns, touched.get(birth.parent, 0))
    return row


def recover_births(volume: Volume, stream_ids: Iterable[int]) -> int:
    """Folds what the last mount left in these tenants' birth logs, and removes them; how many files. Blocks."""
    folder = volume.state_dir / "births"
    found = 0
    done: list[Path] = []
    for stream_id in stream_ids:
        for number, path in _logs(folder, stream_id):
            found += _recover_one(volume, stream_id, number, path)
            done.append(path)
    if done:
        volume.writer.flush()  # the manifest log has it durably before the birth log goes
        for path in done:
            volume.env.files.unlink(path)
    if found:
        log.info("new files recovered", extra={"files": found})
    return found


def _logs(folder: Path, stream_id: int) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    names = [name.removesuffix(".log").split("-") for name in os.listdir(folder)]  # noqa: PTH208
    numbers = sorted(int(part[1]) for part in names if len(part) == 2 and part[0] == str(stream_id))
    return [(number, folder / log_name(stream_id, number)) for number in numbers]


def waiting(view: View, state_dir: Path, stream_id: int) -> list[Birth]:
    """Files of a tenant that the catalog does not know yet: those of a daemon that ended before it could say so."""
    logs = _logs(state_dir / "births", stream_id)
    return [birth for number, path in logs for birth in _unfolded(view, stream_id, number, path)]


def _unfolded(view: View, stream_id: int, number: int, path: Path) -> list[Birth]:
    position = view.get(stream_id, t.COUNTERS, POSITION) or 0
    if position >> POSITION_SHIFT > number:
        return []
    start = position & (1 << POSITION_SHIFT) - 1 if position >> POSITION_SHIFT == number else 0
    return [r for r in parse(path.read_bytes()[start:], start, check=True) if isinstance(r, Birth)]


def _recover_one(volume: Volume, stream_id: int, number: int, path: Path) -> int:
    with volume.catalog.view() as view:
        births = _unfolded(view, stream_id, number, path)
    chunk_bytes = volume.settings.engine.chunk_bytes
    for first in range(0, len(births), BATCH_FILES):
        group = births[first : first + BATCH_FILES]
        at = number << POSITION_SHIFT | group[-1].end
        volume.writer.call(stream_id, partial(fold, births=group, position=at, chunk_bytes=chunk_bytes))
    return len(births)
