"""The rows of packs: which blobs lie in one, when an empty one may go, and what they take in the remote.

    the first member is published → row → members leave it: their blob went, or lies elsewhere from now on
    → no member is left → nothing left it alive for `purge_after` → Tier2DeleteQueued, the row goes with it

Invariants
- A row counts the blob rows that name its pack; `moved_ms` is when one of those was last moved elsewhere. What is moved
  is alive: a reader, or a log in the remote that is a little behind, may still look for it in the old place, so a pack
  that members were moved out of waits as long as a blob that nothing refers to any more.
- The counters PACK_BYTES and PACK_LIVE_BYTES of a stream are what its rows add up to.

Owner: the catalog's writer thread, for the length of a batch. A crash leaves what the last commit said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aof2.engine.blob import pack
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, PackRow
from aof2.engine.catalog.store import View
from aof2.engine.manifest import payloads as p
from aof2.engine.remote.keys import AnyPackKey, is_pack, parse_key

PACK_BYTES: Final = "pack_bytes"
PACK_LIVE_BYTES: Final = "pack_live_bytes"


def live_bytes(row: PackRow) -> int:
    """What a pack of its members alone would take."""
    return pack.length_of(row.members, row.member_bytes) if row.members else 0


def amplification(stored_bytes: int, live: int) -> float:
    """Bytes stored for each that is needed; 1 where there are no packs."""
    return round(stored_bytes / max(1, live), 3) if stored_bytes else 1.0


def join(b: Batch, key: str, stored_bytes: int, pack_bytes: int) -> None:
    """One more blob row names it."""
    old = b.get(t.PACKS, key)
    was = old or PackRow(0, 0, pack_bytes)
    _put(b, key, old, PackRow(was.members + 1, was.member_bytes + stored_bytes, was.pack_bytes, was.moved_ms))


def leave(b: Batch, blob: BlobRow, *, moved_before_ms: int) -> bool:
    """The row of a dead blob goes; whether its object may go with it, where nothing was moved out of it since then."""
    if not is_pack(blob.key):
        return True
    old = b.get(t.PACKS, blob.key)
    if old is None:
        return False  # not counted, so it may hold others: verify finds it once it is an orphan
    if old.members > 1 or old.moved_ms > moved_before_ms:
        _put(b, blob.key, old, _without(old, blob, old.moved_ms))
        return False
    _put(b, blob.key, old, None)
    return True


def moved(b: Batch, blob: BlobRow) -> None:
    """A blob, alive, names another object from now on. The pack goes later, by `queue_empty`."""
    old = b.get(t.PACKS, blob.key) if is_pack(blob.key) else None
    if old is not None:
        _put(b, blob.key, old, _without(old, blob, b.now_ms))


def counted_anew(b: Batch, key: str, members: int, member_bytes: int) -> None:
    """The row was wrong. What it did not count may have been alive elsewhere: an empty pack waits from now on."""
    old = b.get(t.PACKS, key)
    if old is not None or members:
        pack_bytes = old.pack_bytes if old is not None else pack.length_of(members, member_bytes)
        moved_ms = b.now_ms if not members else old.moved_ms if old is not None else 0
        _put(b, key, old, PackRow(members, member_bytes, pack_bytes, moved_ms))


def is_due(row: PackRow, before_ms: int) -> bool:
    """Whether nothing is in it, and nothing was moved out of it since then."""
    return not row.members and row.moved_ms <= before_ms


def queue_empty(b: Batch, keys: Iterable[str], *, before_ms: int) -> int:
    """Takes empty packs out of the catalog and queues them for deletion; how many bytes go."""
    freed = 0
    for key in keys:
        row = b.get(t.PACKS, key)
        if row is not None and is_due(row, before_ms):
            _put(b, key, row, None)
            b.record(p.Tier2DeleteQueued(key), segment_id=first_chunk(key))
            freed += row.pack_bytes
    return freed


def first_chunk(key: str) -> int:
    """Whose number is in the pack's name."""
    parsed = parse_key(key)
    return parsed.chunk_id if isinstance(parsed, AnyPackKey) else 0


def _without(old: PackRow, blob: BlobRow, moved_ms: int) -> PackRow:
    members, member_bytes = max(0, old.members - 1), max(0, old.member_bytes - blob.stored_bytes)
    return PackRow(members, member_bytes, old.pack_bytes, moved_ms)


# -- counters --------------------------------------------------------------------------------------------------------


def totals(view: View, stream_id: int) -> tuple[int, int]:
    """Bytes of packs in the remote, and of those that are needed, as they are counted."""
    stored, live = (view.get(stream_id, t.COUNTERS, counter) for counter in (PACK_BYTES, PACK_LIVE_BYTES))
    return stored or 0, live or 0


def added_up(view: View, stream_id: int) -> dict[str, int]:
    """The counters as the rows have them."""
    rows = [row for _, row in view.scan(stream_id, t.PACKS)]
    return {PACK_BYTES: sum(row.pack_bytes for row in rows), PACK_LIVE_BYTES: sum(map(live_bytes, rows))}


def is_counted(view: View, stream_id: int) -> bool:
    """Volumes from before this was counted have packs and no counters."""
    return view.get(stream_id, t.COUNTERS, PACK_BYTES) is not None or not any(view.scan(stream_id, t.PACKS))


def count_anew(b: Batch) -> None:
    for counter, value in added_up(b.view, b.stream_id).items():
        b.put(t.COUNTERS, counter, value)


def _put(b: Batch, key: str, old: PackRow | None, row: PackRow | None) -> None:
    if row is None:
        b.delete(t.PACKS, key)
    else:
        b.put(t.PACKS, key, row)
    _add(b, PACK_BYTES, (row.pack_bytes if row else 0) - (old.pack_bytes if old else 0))
    _add(b, PACK_LIVE_BYTES, (live_bytes(row) if row else 0) - (live_bytes(old) if old else 0))


def _add(b: Batch, counter: str, change: int) -> None:
    if change:
        b.put(t.COUNTERS, counter, max(0, (b.get(t.COUNTERS, counter) or 0) + change))
