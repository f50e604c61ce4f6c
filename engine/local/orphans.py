"""Files without rows: what a crash between a commit and an unlink leaves in hot_cache and warm.

They hold nothing that is not in the remote, but they take room that no quota counts. A walk beside the running volume
finds them; each is looked up once more before it goes, on the trio thread: no open comes in between.

Owner: candidates on a worker thread, removal on the trio thread. A crash leaves the rest for the next walk.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.local.handles import Key

HOT_NAME: Final = re.compile(r"([1-9][0-9]{0,19})\.([1-9][0-9]{0,19})")
WARM_NAME: Final = re.compile(r"([1-9][0-9]{0,19})\.blob")


def hot_is_orphan(view: View, key: Key) -> bool:
    """Whether no row speaks of bytes in this backing file."""
    stream_id, ino, generation = key
    row = view.get(stream_id, t.OBJECTS, (ino, generation))
    if row is None:
        # Files of a segment are made before their objects: were they swept, the seal would name bytes that are gone.
        return not any(_is_segment(view, stream_id, one) for one in (ino, ino - 1))  # payload file, index
    if row.state in (ObjectState.DIRTY, ObjectState.SEALED):
        return False
    return not any(here.mask for c in row.data_chunks if (here := view.get(stream_id, t.RESIDENCY, c)) is not None)


def _is_segment(view: View, stream_id: int, ino: int) -> bool:
    """Whether an open segment's payload file will have this number: such a one is dirty without being an object."""
    dirty = view.get(stream_id, t.DIRTY, ino)
    return dirty is not None and view.get(stream_id, t.OBJECTS, (ino, dirty.generation)) is None


def hot_orphans(catalog: Catalog, root: Path, tenants: Mapping[int, str]) -> list[tuple[Key, Path]]:
    """Backing files that nothing speaks of."""
    found: list[tuple[Key, Path]] = []
    for stream_id, match, path in _files(root, tenants, HOT_NAME):
        key = (stream_id, int(match[1]), int(match[2]))
        with catalog.view() as view:
            if hot_is_orphan(view, key):
                found.append((key, path))
    return found


def warm_orphans(catalog: Catalog, root: Path, tenants: Mapping[int, str]) -> list[tuple[int, int, Path]]:
    """Warm blobs that nothing speaks of: (stream id, chunk id, path)."""
    found: list[tuple[int, int, Path]] = []
    for stream_id, match, path in _files(root, tenants, WARM_NAME):
        with catalog.view() as view:
            if view.get(stream_id, t.WARM, int(match[1])) is None:
                found.append((stream_id, int(match[1]), path))
    return found


def _files(
    root: Path, tenants: Mapping[int, str], pattern: re.Pattern[str]
) -> Iterator[tuple[int, re.Match[str], Path]]:
    for stream_id, tenant in tenants.items():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / tenant) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is not None:
                    yield stream_id, match, root / tenant / entry.name
