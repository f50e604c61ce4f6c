"""The log goes on behind a hole: a snapshot of the rows stands for everything before it.

Where chunks are lost for good, or the rows know what a damaged chunk held, the log cannot be replayed across that
place. The rows are written down as a snapshot at the start of a chunk that nothing has the name of, here or on the
remote; replay, followers and restores start there.

Invariants
- The snapshot is durable before a chunk or an older snapshot leaves the folder.

Owner: recovery, restore or repair, before there is a writer. A crash leaves the snapshot and chunks before it, which
the next try sets aside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aof2.engine.catalog import snapshots
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import put_positions
from aof2.engine.env import Env
from aof2.engine.manifest.format import BUNDLE_NAME, CHUNK_HEADER_LEN, CHUNK_NAME, LogPosition
from aof2.engine.manifest.snapshot import encode_snapshot, list_snapshots, snapshot_name, store_snapshot


def start_behind(
    env: Env,
    catalog: Catalog,
    directory: Path,
    stream_id: int,
    *,
    chunk_index: int,
    ordinal: int,
    snapshot_last: int = 0,
    away: Callable[[Path], object],
) -> int:
    """Makes `chunk_index` the log's next chunk, at record `ordinal`; the snapshot's number.

    `snapshot_last` is the highest number taken on the remote. `away` takes a file out of the folder.
    """
    position = LogPosition(chunk_index, CHUNK_HEADER_LEN, ordinal)
    with catalog.view() as view:
        index = load_index(view, stream_id)
        sections = snapshots.dump(view, stream_id)
    here = list_snapshots(directory)
    snapshot_id = max(snapshot_last, *here, 0) + 1
    data = encode_snapshot(
        index, snapshot_id=snapshot_id, position=position, created_ms=env.now_ms(), sections=sections
    )
    store_snapshot(env, directory, data, snapshot_id)
    with catalog.writing() as txn:
        put_positions(txn, catalog, {stream_id: position})
    catalog.sync()
    old = [path for path in directory.iterdir() if CHUNK_NAME.fullmatch(path.name) or BUNDLE_NAME.fullmatch(path.name)]
    for path in [*old, *(directory / snapshot_name(i) for i in here)]:
        away(path)
    env.files.fsync_dir(directory)
    return snapshot_id
