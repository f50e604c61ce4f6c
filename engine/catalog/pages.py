"""Rows of one stream, copied page by page: what a snapshot is made of.

LMDB reuses no page that a reader may still look at, so a reader that takes long makes the file grow with each
commit. Here each page has a transaction of its own, for some milliseconds; what was changed meanwhile is corrected
afterwards, in one more: the log between the first page and that last transaction tells which rows these are.

Invariants
- A row that no commit touched between the first page and the end is the same in both; any other is taken from the end.
- Every commit that the last transaction can see is in the log by then. What the log has beyond it does no harm.

Owner: the thread that takes the snapshot, one at a time a stream. A crash leaves nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import zstandard

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import mutations_in
from aof2.engine.catalog.store import View
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition
from aof2.engine.manifest.reader import Stream

PAGE_ROWS: Final = 4096
PAGE_BYTES: Final = 1 << 20
ROW_HEAD: Final = Struct("<II")

OpenView = Callable[[], AbstractContextManager[View]]
Changed = Mapping[bytes, bytes | None]


class _Page(NamedTuple):
    last: bytes  # the key of its last row; "" of the last page, behind which there is nothing
    rows: bytes  # compressed


Pages = deque[_Page]


def copy(opened: OpenView, database: str, prefix: bytes) -> Pages:
    """The rows whose keys start with `prefix`, which the copies do without; each page as it is in a view of its own."""
    pages: Pages = deque()
    start = prefix
    compressor = zstandard.ZstdCompressor(level=1)
    while start:
        with opened() as view:
            rows, last = _read_page(view, database, prefix, start)
        pages.append(_Page(last[len(prefix) :], compressor.compress(rows)))
        start = last and last + b"\0"
    return pages


def _read_page(view: View, database: str, prefix: bytes, start: bytes) -> tuple[bytearray, bytes]:
    """The rows from `start` on, and the key of the last of them, if there may be more."""
    rows, cut = bytearray(), len(prefix)
    for number, (key, value) in enumerate(view.raw_scan(database, prefix, start), 1):
        rows += ROW_HEAD.pack(len(key) - cut, len(value)) + key[cut:] + value
        if number >= PAGE_ROWS or len(rows) >= PAGE_BYTES:
            return rows, key
    return rows, b""


def merged(pages: Pages, changed: Changed) -> Iterator[bytes]:
    """The rows in order, some at a time, with what was changed; None are rows that are gone. Uses the pages up."""
    keys, at = sorted(changed), 0
    decompressor = zstandard.ZstdDecompressor()
    while pages:
        page = pages.popleft()
        rows = decompressor.decompress(page.rows)
        end = bisect_right(keys, page.last, at) if page.last else len(keys)
        yield _merge(rows, {key: changed[key] for key in keys[at:end]}) if at < end else rows
        at = end


def _merge(rows: bytes, changed: Changed) -> bytes:
    now: dict[bytes, bytes | None] = {**dict(split(rows)), **changed}
    return b"".join(ROW_HEAD.pack(len(k), len(v)) + k + v for k, v in sorted(now.items()) if v is not None)


def split(rows: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(rows):
        key_len, row_len = ROW_HEAD.unpack_from(rows, at)
        at += ROW_HEAD.size + key_len + row_len
        yield rows[at - row_len - key_len : at - row_len], rows[at - row_len : at]


class Touched:
    """What the log says was changed since some place in it."""

    def __init__(self, directory: Path, since: LogPosition) -> None:
        self.rows: dict[str, set[bytes]] = {}  # by database, keys without their stream
        self.segments: set[int] = set()
        self._directory = directory
        self._at = since

    def read_on(self) -> None:
        """To the log's end of this moment. ManifestIntegrityError where it cannot be read."""
        at = self._at
        for chunk in Stream(self._directory).read(at):
            records = list(chunk.records(chunk.goes_on_at(at)))
            self.segments.update(r.segment_id for r in records if r.segment_id != LOG_SEGMENT_ID)
            for number, key, _ in mutations_in((r.type_id, r.payload) for r in records):
                self.rows.setdefault(t.DATABASES[number], set()).add(key)
            self._at = chunk.end_position
