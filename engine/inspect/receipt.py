"""The receipt of a durable file: the position of its tenant's log at which it became so.

The log up to there, and the blobs that it names, restore the file as it is: its names, its attributes and the
publication of its bytes. So a follower that has got that far has the file, and can be asked whether it has.

Read backwards, from the end of the log here into the remote's copies, as far as it takes: the last commit about the
file's names or attributes, and the commit that published its bytes; whichever is later. Chunks that do not hold the
inode's number are passed over without a look at their records.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, Mutation, decode_event
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.inspect.paths import Place
from aof2.engine.manifest.batch import EventAssembler
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import COMMIT_SCHEMA_ID, LogPosition, RecordType
from aof2.engine.manifest.payloads import CustomEvent
from aof2.engine.manifest.reader import Chunk

Earlier = Callable[[int | None], Iterator[Chunk]]
DEPTH_MAX: Final = 4096
_NAMESPACE: Final = t.DB_NUMBER["namespace"]
_OF_INODE: Final = frozenset(table.tag for table in (t.INODES, t.XATTRS, t.LINKS))


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`ordinal` is the number of the stream's records up to there. Not `exact`: the beginning of the file's history is
    in no chunk that could be read, so it was durable here at the latest."""

    stream_id: int
    chunk_index: int
    chunk_offset: int
    ordinal: int
    exact: bool = True


class _Commit(NamedTuple):
    """A commit about the file: where it ends, whether it is about names or attributes, and the state it gave the
    object (None: no row of it)."""

    end: LogPosition
    named: bool
    state: ObjectState | None


def find_receipt(view: View, manifest_dir: Path, place: Place, earlier: Earlier | None = None) -> Receipt | None:
    """Of a file that is durable. None: nothing of it is in the log that can be read."""
    search = _Search(place, _line(view, place))
    found = survey(manifest_dir / str(place.tenant_id))
    chunks = found.chunks
    for where in reversed(chunks):
        found.chunks = [where]
        for examined in examine(found):
            if examined.chunk is not None and search.take(examined.chunk):
                return search.receipt(exact=True)
    for chunk in earlier(chunks[0].index if chunks else None) if earlier is not None else ():
        if search.take(chunk):
            return search.receipt(exact=True)
    return search.receipt(exact=False)


def _line(view: View, place: Place) -> set[int]:
    """The inode and the directories above it: each of their names is part of the file's path."""
    inos = {place.inode.ino}
    parent = place.inode.parent
    while parent not in inos and len(inos) < DEPTH_MAX:
        inos.add(parent)
        row = view.get(place.tenant_id, t.INODES, parent)
        parent = row.parent if row is not None else parent
    return inos


class _Search:
    """Fed with chunks, the newest first, until both commits are known."""

    def __init__(self, place: Place, line: set[int]) -> None:
        self._stream_id = place.tenant_id
        self._ino, self._generation = place.inode.ino, place.inode.generation
        self._line = line
        self._needle = self._ino.to_bytes(8, "big")
        self._named: LogPosition | None = None
        self._published: LogPosition | None = None
        self._is_begun = not self._generation  # of a file without bytes nothing is published

    def take(self, chunk: Chunk) -> bool:
        if self._needle not in bytes(chunk.data) and (self._named is not None or not self._names_in(chunk)):
            return False
        for commit in reversed(list(self._commits(chunk))):
            if commit.named and self._named is None:
                self._named = commit.end
            if commit.state is not None and not self._is_begun:
                if commit.state is ObjectState.PUBLISHED:
                    self._published = commit.end
                else:
                    self._is_begun = True
            if self._is_begun and self._named is not None:
                return True
        return False

    def _names_in(self, chunk: Chunk) -> bool:
        return any(ino.to_bytes(8, "big") in bytes(chunk.data) for ino in self._line)

    def receipt(self, *, exact: bool) -> Receipt | None:
        known = [position for position in (self._named, self._published) if position is not None]
        if not known:
            return None
        last = max(known, key=lambda position: position.ordinal)
        return Receipt(stream_id=self._stream_id, exact=exact, **last._asdict())

    def _commits(self, chunk: Chunk) -> Iterator[_Commit]:
        """Those about the file, in the order of the log; each ends behind its marker."""
        events, named, state = EventAssembler(), False, None
        touched = False
        for record in chunk.records():
            payload = record.decoded() if record.type_id == RecordType.CUSTOM_EVENT else None
            if not isinstance(payload, CustomEvent):
                continue
            if payload.schema_id == COMMIT_SCHEMA_ID:
                if touched:
                    at = record.chunk_offset + 40 + len(record.payload)
                    yield _Commit(LogPosition(chunk.index, at, record.ordinal + 1), named, state)
                named, state, touched = False, None, False
            elif payload.schema_id == EVENT_SCHEMA_ID:
                event = events.feed(payload.schema_id, payload.blob)
                for mutation in decode_event(event.body) if event is not None else ():
                    is_named, object_state = self._about(mutation)
                    named, state = named or is_named, object_state if object_state is not None else state
                    touched = touched or is_named or object_state is not None

    def _about(self, mutation: Mutation) -> tuple[bool, ObjectState | None]:
        number, key, value = mutation
        if number != _NAMESPACE:
            return False, None
        tag = key[:1]
        if tag in _OF_INODE:
            return key[1:9] == self._needle, None
        if tag == t.DENTRIES.tag:
            return value is not None and t.DENTRIES.decode(value).ino in self._line, None
        is_ours = tag == t.OBJECTS.tag and t.OBJECTS.unpack_key(key[1:]) == (self._ino, self._generation)
        return False, t.OBJECTS.decode(value).state if is_ours and value is not None else None
