"""Which local chunks and snapshots may go.

Kept: the active chunk, the two sealed ones before it, everything the newest snapshot does not cover, and anything not
yet uploaded. The rest is deletable. Two snapshots are kept, so that a damaged newest one costs a longer replay and not
the stream (as far as the chunks between them are still here).

`plan` is pure; `apply` unlinks. Owner: the log's writer thread. A crash between two unlinks leaves chunks that the next
plan deletes: only the oldest go, so the rest has no holes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.env import Env
from aof2.engine.manifest.format import ChunkHeader, LogPosition, chunk_name
from aof2.engine.manifest.reader import chunk_headers
from aof2.engine.manifest.snapshot import list_snapshots, snapshot_name

SEALED_KEPT: Final = 2
SNAPSHOTS_KEPT: Final = 2
CRASH_POINTS: Final = ("manifest.retention.unlinked",)


class RetentionPlan(NamedTuple):
    chunks: list[int]
    snapshots: list[int]


def plan(headers: Sequence[ChunkHeader], snapshots: Sequence[int], covered: LogPosition | None) -> RetentionPlan:
    """What may go. `covered` is the newest durable snapshot's position; without one nothing may."""
    sealed = [h for h in headers if h.sealed]
    candidates = sealed[:-SEALED_KEPT]
    chunks: list[int] = []
    for header in candidates:
        if covered is None or header.chunk_index >= covered.chunk_index or not header.uploaded:
            break
        chunks.append(header.chunk_index)
    return RetentionPlan(chunks, list(snapshots[:-SNAPSHOTS_KEPT]))


def violations(headers: Sequence[ChunkHeader], covered: LogPosition | None) -> list[str]:
    """What `manifest verify` says when a folder does not hold what retention promises to keep."""
    found: list[str] = []
    indexes = [h.chunk_index for h in headers]
    for a, b in itertools.pairwise(indexes):
        if b != a + 1:
            found.append(f"chunks {a + 1} to {b - 1} are missing")
    if covered is not None and indexes and indexes[0] > covered.chunk_index:
        found.append(f"the newest snapshot needs chunk {covered.chunk_index}, the oldest here is {indexes[0]}")
    if covered is None and indexes and indexes[0] > 0:
        found.append(f"no usable snapshot covers the chunks before {indexes[0]}")
    unsealed = [h.chunk_index for h in headers[:-1] if not h.sealed]
    found += [f"chunk {index} is not sealed though others follow it" for index in unsealed]
    return found


def apply(
    env: Env, directory: Path, covered: LogPosition | None, *, uploaded: Callable[[int], bool] | None = None
) -> RetentionPlan:
    """Deletes what may go, oldest first. `uploaded` asks the log whether a chunk really is in the remote.

    The flag in the chunk's header is under no checksum; where the log is folded, it has the last word.
    """
    decided = plan([header for _, header in chunk_headers(directory)], list_snapshots(directory), covered)
    if uploaded is not None:
        decided = decided._replace(chunks=list(itertools.takewhile(uploaded, decided.chunks)))
    for index in decided.chunks:
        env.files.unlink(directory / chunk_name(index))
        env.failpoint("manifest.retention.unlinked")
    for snapshot_id in decided.snapshots:
        env.files.unlink(directory / snapshot_name(snapshot_id))
    if decided.chunks or decided.snapshots:
        env.files.fsync_dir(directory)
    return decided
