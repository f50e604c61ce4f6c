"""Which snapshots of a stream can be used: the newest whole one is where a replay starts.

One that is damaged or from the future costs a longer replay, as long as the chunks before it are still here.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest.snapshot import Snapshot, list_snapshots, load_snapshot

log = logging.getLogger(__name__)


def usable_snapshots(directory: Path, *, level: int = logging.DEBUG) -> Iterator[Snapshot]:
    """Those that are whole, newest first; what is passed over is logged at that level."""
    for snapshot_id in reversed(list_snapshots(directory)):
        try:
            yield load_snapshot(directory, snapshot_id)
        except (CorruptError, UnsupportedError, FileNotFoundError) as e:
            log.log(level, "snapshot passed over", extra={"snapshot_id": snapshot_id, "error": str(e)})


def newest_snapshot(directory: Path) -> Snapshot | None:
    """Where a start begins; one that is passed over is worth a warning there."""
    return next(usable_snapshots(directory, level=logging.WARNING), None)
