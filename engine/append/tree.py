"""The names of a stream's directory, as they are read: rows of the catalog, and what is made up between them.

Invariant: a listing has each name once, in order, whatever page it is asked for.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aof2.engine import namespace
from aof2.engine.append import names
from aof2.engine.append.names import Tag
from aof2.engine.append.streams import Streams
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.kinds.catalogued import Catalogued
from aof2.engine.kinds.kind import Answers, Told

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

PAGE = 1024


class StreamTree(Catalogued):
    """Directories of streams, to look at."""

    def __init__(self, volume: Volume, tenants: Mapping[int, str], streams: Streams) -> None:
        super().__init__(volume, tenants)
        self.streams = streams

    # -- which directory -----------------------------------------------------------------------------------------

    def _is_stream(self, row: InodeRow) -> bool:
        is_top = row.ino == namespace.root_ino(stream_of(row.ino))
        return stat.S_ISDIR(row.mode) and not is_top and row.last_name != names.SEGMENTS

    def _is_segments_dir(self, row: InodeRow) -> bool:
        return stat.S_ISDIR(row.mode) and row.last_name == names.SEGMENTS

    def _ext(self, ino: int) -> str:
        return self.streams.settings(stream_of(ino)).ext

    def _is_reserved(self, ino: int, name: bytes) -> bool:
        """Whether no stream may have this name."""
        ext = self._ext(ino)
        return name in (names.APPEND, names.tail_name(ext), names.SEGMENTS) or names.is_payload_name(name, ext)

    # -- names: reading ----------------------------------------------------------------------------------------

    def answers(self, stream_id: int) -> Answers:
        return Answers.NOTHING

    def row(self, ino: int) -> InodeRow:
        of = names.made_up(ino)
        return super().row(ino) if of is None else self._made_up(of, super().row(of.of))

    def _made_up(self, what: names.MadeUp, of: InodeRow) -> InodeRow:
        if what.tag is Tag.APPEND:
            return names.append_row(of)
        if what.tag is Tag.TAIL:
            stream = self.streams.known(of.ino)
            if stream is None:
                return names.tail_row(of, 0, 0)
            return names.tail_row(of, stream.committed_logical - stream.position.next_logical, stream.committed_ns)
        return names.raw_row(of, super().row(names.payload_ino(of.ino)))

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        made_up = self._find_made_up(parent, name)
        return super().find(parent, name) if made_up is None else made_up

    def _find_made_up(self, parent: int, name: bytes) -> InodeRow | None:
        if name in (names.APPEND, names.tail_name(self._ext(parent))):
            above = super().row(parent)
            tag = Tag.APPEND if name == names.APPEND else Tag.TAIL
            return self._made_up(names.MadeUp(tag, parent), above) if self._is_stream(above) else None
        if name.endswith(names.RAW_SUFFIX) and self._is_segments_dir(super().row(parent)):
            index = super().find(parent, name.removesuffix(names.RAW_SUFFIX) + names.INDEX_SUFFIX)
            return self._made_up(names.MadeUp(Tag.RAW, index.ino), index) if index is not None else None
        return None

    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        above = super().row(ino)
        found = super().entries(ino, after, count)
        if self._is_segments_dir(above):
            found += [(self._raw_of(name), row) for name, row in found]
            if after is not None and after.endswith(names.INDEX_SUFFIX):
                found.append((self._raw_of(after), above))  # right behind its index
            found = [(name, row) for name, _ in found if (row := self.find(ino, name)) is not None]
        elif self._is_stream(above):
            last = found[-1][0] if len(found) == count else None
            made_up = [(name, self.find(ino, name)) for name in (names.APPEND, names.tail_name(self._ext(ino)))]
            found += [(name, row) for name, row in made_up if row is not None and (last is None or name < last)]
        return [(name, row) for name, row in sorted(found) if after is None or name > after][:count]

    def _raw_of(self, index: bytes) -> bytes:
        return index.removesuffix(names.INDEX_SUFFIX) + names.RAW_SUFFIX

    def told(self, row: InodeRow) -> Told:
        of = names.made_up(row.ino)
        if of is None or of.tag is not Tag.TAIL:
            return Told()
        stream = self.streams.known(of.of)
        if stream is not None:
            stream.tail_told = True
        return Told(changing=True)

    def payloads(self, ino: int) -> list[InodeRow]:
        """Payload files of a stream, in order."""
        found: list[tuple[bytes, InodeRow]] = []
        while page := super().entries(ino, found[-1][0] if found else None, PAGE):
            found += page
        return [row for name, row in found if names.is_payload_name(name, self._ext(ino))]

    def is_stream(self, ino: int) -> bool:
        return names.made_up(ino) is None and self._is_stream(super().row(ino))
