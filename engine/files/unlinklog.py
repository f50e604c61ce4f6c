"""The unlink log: names that were removed, until the catalog knows.

`births/<tenant id>.<number>.unlinks`, a file a tenant and mount. The daemon writes a record before it answers, and
folds records into the catalog a moment later, many in one commit, with how far it got in the same commit: `rm -rf`
does not wait for a commit a file. FORMATS.md has the layout.

Invariants
- Only the one name of a regular file that nobody has open is removed this way. Anybody who could see the difference has
  the log folded first (`unlinks.py`).
- A fold names its position; recovery starts behind it. A name that means another inode by then is left alone.
- A record that fails its checksum is the torn end: nothing behind it was answered.

Owner: the daemon writes, recovery removes. A crash leaves records that recovery folds before anything else is served.
"""

from __future__ import annotations

import errno
import logging
import re
import struct
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

RECORD: Final = struct.Struct("<IHHQQQ")  # crc32 of everything behind it, name_len, reserved, parent, ino, time_ns
POSITION: Final = "unlinks"  # a counter of the stream: log number << 40 | offset
POSITION_SHIFT: Final = 40
BATCH_FILES: Final = 256
_NAME: Final = re.compile(r"(\d+)\.(\d+)\.unlinks")


class Unlink(NamedTuple):
    parent: int
    name: bytes
    ino: int
    time_ns: int
    end: int


def log_name(stream_id: int, number: int) -> str:
    return f"{stream_id}.{number}.unlinks"


def pack(parent: int, name: bytes, ino: int, time_ns: int) -> bytes:
    body = RECORD.pack(0, len(name), 0, parent, ino, time_ns)[4:] + name
    return zlib.crc32(body).to_bytes(4, "little") + body


def parse(data: bytes, offset: int = 0) -> Iterator[Unlink]:
    """The records in `data`, which starts at `offset` of the log; ends at the first that is cut or fails its check."""
    at = 0
    while at + RECORD.size <= len(data):
        crc, name_len, _, parent, ino, time_ns = RECORD.unpack_from(data, at)
        end = at + RECORD.size + name_len
        if end > len(data) or zlib.crc32(data[at + 4 : end]) != crc:
            return
        yield Unlink(parent, data[at + RECORD.size : end], ino, time_ns, offset + end)
        at = end


def fold(
    b: Batch,
    unlinks: Sequence[Unlink],
    *,
    position: int,
    is_open: Callable[[int], bool] = lambda _: False,
    after: int | None = None,
) -> list[InodeRow]:
    """Names that are gone already, removed: one commit for many. The inodes as they are then. `after`: the position
    that the catalog must have, or an earlier group would be passed over."""
    if after is not None and (b.get(t.COUNTERS, POSITION) or 0) != after:
        raise os_error(errno.ENOSPC)  # only a full disk refuses one group and takes the next
    rows = []
    for one in unlinks:
        entry = b.get(t.DENTRIES, (one.parent, one.name))
        if entry is not None and entry.ino == one.ino:
            above = b.get(t.INODES, one.parent)
            b.now_ns = max(one.time_ns, above.mtime_ns if above is not None else 0)  # as was told meanwhile
            rows.append(namespace.unlink(b, one.parent, one.name, is_open=is_open))
    b.put(t.COUNTERS, POSITION, position)
    return rows


def recover_unlinks(volume: Volume, stream_ids: Container[int]) -> int:
    """Folds what the last mount left in unlink logs of these tenants, and removes those. After births; blocks."""
    done: list[Path] = []
    found = 0
    for number, stream_id, path in _logs(volume.state_dir / "births"):
        if stream_id in stream_ids:
            found += _recover_one(volume, stream_id, number, path)
            done.append(path)
    if done:
        volume.writer.flush()  # the manifest log has it durably before this one goes
        for path in done:
            volume.env.files.unlink(path)
    if found:
        log.info("unlinks recovered", extra={"files": found})
    return found


def _logs(folder: Path) -> list[tuple[int, int, Path]]:
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[2]), int(match[1]), path) for match, path in found if match)


def _recover_one(volume: Volume, stream_id: int, number: int, path: Path) -> int:
    with volume.catalog.view() as view:
        position = view.get(stream_id, t.COUNTERS, POSITION) or 0
    if position >> POSITION_SHIFT > number:
        return 0
    start = position & (1 << POSITION_SHIFT) - 1 if position >> POSITION_SHIFT == number else 0
    unlinks = list(parse(path.read_bytes()[start:], start))
    for first in range(0, len(unlinks), BATCH_FILES):
        group = unlinks[first : first + BATCH_FILES]
        at = number << POSITION_SHIFT | group[-1].end
        volume.writer.call(stream_id, partial(fold, unlinks=group, position=at))
    return len(unlinks)
