"""Which files the records behind a damaged place speak of.

The records that are gone cannot tell; those around them can: a commit that could not be applied names the inodes and
directory entries it was about. Paths are those of the rows as far as they replayed.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Mutation, mutations_in
from aof2.engine.catalog.store import View
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.gone import behind_damage

FILES_MAX: Final = 100
_INODES: Final = (t.INODES.number, t.INODES.tag)
_OBJECTS: Final = (t.OBJECTS.number, t.OBJECTS.tag)
_DENTRIES: Final = (t.DENTRIES.number, t.DENTRIES.tag)


def touched_files(view: View, directory: Path, stream_id: int, position: LogPosition | None) -> list[str]:
    """Paths within the tenant, at most FILES_MAX, that commits from `position` on speak of."""
    inos: dict[int, None] = {}
    names: dict[tuple[int, bytes], None] = {}
    for number, key, _ in _mutations(directory, position):
        match (number, key[:1]):
            case table if table == _INODES:
                inos[t.INODES.unpack_key(key[1:])] = None
            case table if table == _OBJECTS:
                inos[t.OBJECTS.unpack_key(key[1:])[0]] = None
            case table if table == _DENTRIES:
                names[t.DENTRIES.unpack_key(key[1:])] = None
        if len(inos) + len(names) > 10 * FILES_MAX:
            break
    found = {path_of(view, stream_id, parent, name) for parent, name in names}
    for ino in inos:
        row = view.get(stream_id, t.INODES, ino)
        if row is not None and row.last_name:
            found.add(path_of(view, stream_id, row.parent, row.last_name))
    return sorted(found)[:FILES_MAX]


def path_of(
    view: View, stream_id: int, parent: int, name: bytes, newer: Mapping[int, tuple[int, bytes]] | None = None
) -> str:
    """The path below the tenant, by the names that the inodes above had last; `newer`: those the rows do not show."""
    parts = [name]
    while len(parts) < 4096:  # more would be a circle
        here, row = parent, view.get(stream_id, t.INODES, parent)
        parent, last_name = (row.parent, row.last_name) if row is not None else (0, b"")
        if newer is not None and here in newer:
            parent, last_name = newer[here]
        if not last_name:
            break
        parts.append(last_name)
    return b"/".join(reversed(parts)).decode(errors="backslashreplace")


def _mutations(directory: Path, position: LogPosition | None) -> Iterator[Mutation]:
    for examined in examine(survey(directory), position.chunk_index if position else 0):
        records = (
            ((r.type_id, r.payload) for r in examined.chunk.records())
            if examined.chunk is not None and examined.whole
            else behind_damage(examined)
        )
        yield from mutations_in(records, skip_damaged=True)  # the first part of an event may be what is gone
