"""Is this state folder where the volume's log is? Asked before the epoch is claimed.

For each stream that the remote has: its last chunk must be here, and the newest of those that are on both sides must be
the same bytes. The listing's etags answer for what the log says was uploaded; what it does not speak of (an upload
whose answer, or whose record, got lost) is compared by crc64, and where that differs, read.

Two writers that parted never write equal chunks again (every record carries its time), so the newest common one tells.

Invariants
- Reads only, here and there.
- Damage is not staleness: a chunk that fails its own checksum, on either side, says nothing. Recovery and verify speak
  of it.

Owner: the thread that claims. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import Catalog
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest.chunk import as_uploaded
from aof2.engine.manifest.reader import ChunkFile, read_file
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import StaleError, Standing, TakenOverError, claimed_by, take_claim
from aof2.engine.replicate.listing import Inventory, RemoteLog, list_streams
from aof2.engine.replicate.stream import LogState, chunk_indexes, log_state, sealed_chunk
from aof2.engine.units import format_size

# Chunks that are on both sides and whose etag the log does not know: so many, the newest, are compared.
COMPARED_MAX: Final = 8


class Difference(NamedTuple):
    """Why a stream's log here is not the one there. `behind`: nothing contradicts it, it only ends earlier."""

    stream_id: int
    what: str
    behind: bool


def compare_logs(store: RemoteStore, catalog: Catalog, manifest_dir: Path) -> Difference | None:
    """The first stream whose log is behind the remote's or parted from it; TransientError when it cannot be asked."""
    behind: Difference | None = None
    for stream_id, inventory in sorted(list_streams(store).items()):
        found = _compare(store, catalog, manifest_dir / str(stream_id), stream_id, inventory)
        if found is not None and not found.behind:
            return found
        behind = behind or found
    return behind


def refuse_stale(store: RemoteStore, catalog: Catalog, state_dir: Path, standing: Standing) -> None:
    """StaleError where the logs here are not those of the remote."""
    found = compare_logs(store, catalog, state_dir / "manifest")
    if found is None or standing.found is None:
        return
    if standing.is_ours and found.behind:
        raise StaleError(
            f"this state_dir lost the end of its own log ({found.what}); `aof2 verify --repair` fetches it; "
            + stays_here(catalog, state_dir)
        )
    raise StaleError(
        f"another machine has written this volume since ({found.what}, by {claimed_by(standing.found)}); "
        + stays_here(catalog, state_dir)
    )


def take_checked_claim(env: Env, store: RemoteStore, catalog: Catalog, state_dir: Path) -> Fence:
    """The claim, by a folder that is where the log is. StaleError says what else it is, and what to do."""
    try:
        return take_claim(env, store, state_dir, compare=partial(refuse_stale, store, catalog, state_dir))
    except TakenOverError as e:
        raise StaleError(f"{e}; {stays_here(catalog, state_dir)}") from None


def stays_here(catalog: Catalog, state_dir: Path) -> str:
    """What to do, and what this folder has that the remote does not."""
    files, size = only_here(catalog)
    kept = (
        f"{files} file(s), {format_size(size)}, that are only here stay in it"
        if files
        else "it holds nothing that is only here"
    )
    return f"use `aof2 restore --from URL` with a fresh state_dir; {state_dir} is left as it is: {kept}"


def only_here(catalog: Catalog) -> tuple[int, int]:
    """Files that are not, or not as they are now, in the remote, and their bytes as far as the rows know."""
    files = size = 0
    with catalog.view() as view:
        for stream_id in view.streams():
            dirty = {ino for ino, _ in view.scan(stream_id, t.DIRTY)}
            files += len(dirty)
            for (ino, _), unsent in view.scan(stream_id, t.UNPUBLISHED):
                size += unsent
                files += ino not in dirty
    return files, size


def _compare(
    store: RemoteStore, catalog: Catalog, directory: Path, stream_id: int, inventory: Inventory
) -> Difference | None:
    with catalog.view() as view:
        position = view.position(stream_id) or fmt.LogPosition(0, fmt.CHUNK_HEADER_LEN, 0)
    indexes = chunk_indexes(directory) if directory.is_dir() else ()
    here = {index: ChunkFile(index, directory / fmt.chunk_name(index)) for index in indexes}
    there = sorted(inventory.chunk_indexes(), reverse=True)
    next_here = _next_index(here, position)
    remote = RemoteLog(store, stream_id, inventory)
    state = log_state(catalog, stream_id)
    for index in [i for i in there if i in here][:COMPARED_MAX]:
        if what := _parted(remote, state, here[index]):
            return Difference(stream_id, what, behind=False)
    if any(_is_chunk(remote, index) for index in there[:COMPARED_MAX] if index >= next_here):
        what = f"the log of stream {stream_id} is at chunk {there[0]} there, at {next_here - 1} here"
        return Difference(stream_id, what, behind=True)
    if what := _snapshot_ahead(remote, state, position):
        return Difference(stream_id, what, behind=True)
    return None


def _next_index(here: dict[int, ChunkFile], position: fmt.LogPosition) -> int:
    """The first chunk that is not complete here, by the files and by what the rows know of them."""
    last = max(here, default=-1)
    by_files = last + _is_sealed(here[last]) if here else 0
    # Rows that are inside a chunk whose file is gone: the log was here, and is damaged.
    lost = position.chunk_offset > fmt.CHUNK_HEADER_LEN and position.chunk_index not in here
    return max(by_files, position.chunk_index + lost)


def _is_sealed(chunk: ChunkFile) -> bool:
    try:
        head = read_file(chunk.path, length=fmt.CHUNK_HEADER_LEN)
        return any(head) and fmt.unpack_chunk_header(head, path=str(chunk.path)).sealed
    except Aof2Error:
        return True  # damaged: it may have been complete


def _is_chunk(remote: RemoteLog, index: int) -> bool:
    """Whether what has the chunk's name there is one; what is not says nothing of a writer."""
    try:
        remote.chunk(index)
    except (CorruptError, fmt.ManifestGapError):
        return False
    except UnsupportedError:
        pass  # a newer AOF2 wrote it
    return True


def _parted(remote: RemoteLog, state: LogState, chunk: ChunkFile) -> str:
    """Whether a chunk that is on both sides holds other records there; "" also where either is damaged."""
    key = fmt.chunk_key(remote.stream_id, chunk.index)
    info = remote.inventory.chunks.get(chunk.index)
    if info is not None and info.etag and state.objects.get(key) == info.etag:
        return ""
    try:
        sealed = sealed_chunk(chunk)
        ours = as_uploaded(chunk.read())[: sealed.header.committed_len]
        head = remote.store.head_blob(key) if info is not None else None
        if head is not None and head.crc64 == native.crc64(ours) and head.size == len(ours):
            return ""
        theirs, _ = remote.chunk(chunk.index)
    except (CorruptError, UnsupportedError, fmt.ManifestGapError, RemoteMissingError, FileNotFoundError):
        return ""
    if theirs[fmt.CHUNK_HEADER_LEN : len(ours)] == ours[fmt.CHUNK_HEADER_LEN :]:
        return ""  # where it is not sealed here, it is the beginning of the one there: behind, not parted
    return f"chunk {chunk.index} of stream {remote.stream_id} holds other records there than here"


def _snapshot_ahead(remote: RemoteLog, state: LogState, position: fmt.LogPosition) -> str:
    """A snapshot of a place that the log here has not come to."""
    newest = max(remote.inventory.snapshots, default=None)
    key = keys.manifest_snapshot_key(remote.stream_id, newest) if newest is not None else ""
    head = remote.store.head_blob(key) if key and key not in state.objects else None
    ordinal = 0
    with contextlib.suppress(ValueError, KeyError):
        ordinal = int(head.metadata["ordinal"]) if head is not None else 0
    if ordinal <= position.ordinal:
        return ""
    where = f"snapshot {newest} of stream {remote.stream_id} is of record {ordinal} there"
    return f"{where}, the log is at {position.ordinal} here"
