"""Files without rows: what a crash between a commit and an unlink leaves in hot_cache and warm.

They hold nothing that is not in the remote, but they take room that no quota counts. A walk beside the running volume
finds them; each is looked up once more before it goes, on the trio thread: no open comes in between.

Owner: candidates on a worker thread, removal on the trio thread. A crash leaves the rest for the next walk.
"""

from __future__ import annotations

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


def _names(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name


def hot_is_orphan(view: View, key: Key) -> bool:
    """Whether no row speaks of bytes in this backing file."""
    stream_id, ino, generation = key
    row = view.get(stream_id, t.OBJECTS, (ino, generation))
    if row is None:
        return True
    if row.state in (ObjectState.DIRTY, ObjectState.SEALED):
        return False
    return not any(here.mask for c in row.data_chunks if (here := view.get(stream_id, t.RESIDENCY, c)) is not None)


def hot_orphans(catalog: Catalog, root: Path, tenants: Mapping[int, str]) -> list[tuple[Key, Path]]:
    """Backing files that nothing speaks of."""
    found: list[tuple[Key, Path]] = []
    for stream_id, tenant in tenants.items():
        for name in _names(root / tenant):
            match = HOT_NAME.fullmatch(name)
            if match is None:
                continue
            key = (stream_id, int(match[1]), int(match[2]))
            with catalog.view() as view:
                if hot_is_orphan(view, key):
                    found.append((key, root / tenant / name))
    return found


def warm_orphans(catalog: Catalog, root: Path, tenants: Mapping[int, str]) -> list[tuple[int, int, Path]]:
    """Warm blobs that nothing speaks of: (stream id, chunk id, path)."""
    found: list[tuple[int, int, Path]] = []
    for stream_id, tenant in tenants.items():
        for name in _names(root / tenant):
            match = WARM_NAME.fullmatch(name)
            if match is None:
                continue
            with catalog.view() as view:
                if view.get(stream_id, t.WARM, int(match[1])) is None:
                    found.append((stream_id, int(match[1]), root / tenant / name))
    return found
