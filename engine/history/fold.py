"""Records, as columns, into what happened: bytes per tier, movements, returns, requests.

A record about a segment sets what a tier has of it; the difference to what it had is what the record moved. So any part
of a log can be folded by itself, as long as it has all the records of its segments, in their order: `report` feeds
stream after stream, Spark's tasks feed segments that were brought together, and both add up to the same.

What the log says of bytes: of a hot copy the bytes that are here, of a warm one what it takes compressed, of the remote
the bytes that were uploaded, before compression. Bytes that are not sealed yet are not in the log.

Owner: one thread. Memory: a few numbers a segment, and a timeline of bounded length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aof2.engine.history.columns import U64, Columns, key_marks
from aof2.engine.history.segments import Numbers
from aof2.engine.history.timeline import Timeline
from aof2.engine.manifest import tier_events
from aof2.engine.manifest.format import LOG_SEGMENT_ID, RecordType
from aof2.engine.manifest.index import ManifestEntry, Residency
from aof2.engine.remote import keys as remote_keys

TIERS: Final = ("hot", "warm", "remote")
FLOWS: Final = (
    *("misses", "warm_misses", "hydrations", "hydrated_bytes", "failed_hydrations"),
    *("evictions", "evicted_bytes", "warm_evictions", "returns", "quick_returns"),
    *("seals", "sealed_bytes", "uploads", "uploaded_bytes", "failed_uploads", "deletes", "log_bytes", "log_uploads"),
)
FIELDS: Final = (*(f"{tier}_bytes" for tier in TIERS), *FLOWS)
# Upper ends of the intervals in which what was evicted came back; thrash is what comes back in the first two.
RETURN_EDGES_MS: Final = (60_000, 600_000, 3_600_000, 86_400_000)
RETURN_NAMES: Final = ("under a minute", "under 10 minutes", "under an hour", "under a day", "later")
QUICK_MS: Final = RETURN_EDGES_MS[1]
REMOTE_TIER: Final = 2
LOG_KINDS: Final = ("log", "bundle", "snapshot")


class Moved(NamedTuple):
    """What some records did to their segments, a row a record: for tables by segment, directory and hour."""

    segment_id: U64
    timestamp_ms: U64
    misses: NDArray[Any]
    fetched_bytes: NDArray[Any]
    evictions: NDArray[Any]


class _Stream:
    def __init__(self) -> None:
        self.hot, self.warm, self.remote = Numbers(), Numbers(), Numbers()
        self.sealed, self.key, self.evicted_ms, self.returns = Numbers(), Numbers(), Numbers(), Numbers()


class Fold:
    """Fed with the columns of streams, in the order of their logs."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline(FIELDS)
        self.types: Counter[int] = Counter()
        self.requests: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.records = 0
        self.first_ms = self.last_ms = 0
        self.streams: dict[int, _Stream] = {}
        self._uploaded: dict[int, set[str]] = {}

    def start(self, stream_id: int, entries: Iterable[tuple[int, ManifestEntry]], at_ms: int) -> None:
        """What a snapshot says there was when the history begins."""
        state = self._of(stream_id)
        for segment_id, entry in entries:
            one = np.array([segment_id], np.uint64)
            has = entry.residency
            amounts = {
                "hot_bytes": entry.resident_bytes if has & Residency.TIER0 else 0,
                "warm_bytes": entry.compressed_bytes if has & Residency.TIER1 else 0,
                "remote_bytes": entry.durable_bytes if has & Residency.TIER2 else 0,
            }
            for numbers, amount in zip((state.hot, state.warm, state.remote), amounts.values(), strict=True):
                numbers.put(one, np.array([amount], np.uint64))
            state.sealed.put(one, np.array([entry.durable_bytes], np.uint64))
            state.key.put(one, key_marks([entry.key]))
            self.timeline.put(at_ms, {name: amount for name, amount in amounts.items() if amount})
        self._seen(at_ms, at_ms)

    def start_at(self, stream_id: int, tier: str, segments: U64, amounts: U64, keys: list[str], at_ms: int) -> None:
        """The same as columns: `tier` is one of TIERS, or "sealed"; `keys` of the remote's."""
        state = self._of(stream_id)
        getattr(state, tier).put(segments, amounts)
        if tier == "remote":
            state.key.put(segments, key_marks(keys))
        if tier in TIERS and len(segments):
            self.timeline.put(at_ms, {f"{tier}_bytes": int(amounts.sum())})

    def feed(self, stream_id: int, columns: Columns, *, log_bytes: int = 0) -> Moved:
        """More of the stream's records. `log_bytes`: how long they are in the log."""
        state, c = self._of(stream_id), columns
        self.records += len(c)
        if len(c):
            self._seen(int(c.timestamp_ms.min()), int(c.timestamp_ms.max()))
            for kind, count in zip(*np.unique(c.type_id, return_counts=True), strict=True):
                self.types[int(kind)] += int(count)
            if log_bytes:
                self.timeline.put(int(c.timestamp_ms[-1]), {"log_bytes": log_bytes})
        self._requests(stream_id, c)
        about = c.segment_id != np.uint64(LOG_SEGMENT_ID)
        return self._tiers(state, c.where(about & self._matters(c)))

    def _matters(self, c: Columns) -> NDArray[np.bool_]:
        matters = np.isin(c.schema_id, (tier_events.WARM_DROPPED, tier_events.SEGMENT_RETIRED))
        return np.asarray((c.type_id != RecordType.CUSTOM_EVENT) | matters, bool)

    def _of(self, stream_id: int) -> _Stream:
        return self.streams.setdefault(stream_id, _Stream())

    def _seen(self, first_ms: int, last_ms: int) -> None:
        self.first_ms = min(self.first_ms or first_ms, first_ms)
        self.last_ms = max(self.last_ms, last_ms)

    # -- tiers -------------------------------------------------------------------------------------------------

    def _tiers(self, state: _Stream, c: Columns) -> Moved:
        time, add = c.timestamp_ms, self.timeline.add
        seal, done, evicted = (
            c.of_type(kind) for kind in (RecordType.SEAL_SEGMENT, RecordType.HYDRATION_DONE, RecordType.LOCAL_EVICTED)
        )
        dropped = c.schema_id == tier_events.WARM_DROPPED
        retired = c.schema_id == tier_events.SEGMENT_RETIRED
        started = c.of_type(RecordType.HYDRATION_STARTED)
        from_remote = started & (c.value == np.uint64(REMOTE_TIER))
        _set(state.sealed, c, seal, c.value)
        hot = _set(state.hot, c, seal | done | evicted | retired, np.where(seal | done, c.value, 0))
        warm = _set(state.warm, c, c.of_type(RecordType.COMPRESSION_DONE) | dropped | retired, _but(c.value, dropped))
        remote = self._remote(state, c, retired)
        for tier, delta in zip(TIERS, (hot, warm, remote), strict=True):
            moved = delta != 0
            add(f"{tier}_bytes", time[moved], delta[moved])
        fetched = np.where(done, np.maximum(hot, 0), 0)
        gone = np.where(evicted, np.maximum(-hot, 0), 0)
        for name, mask, amounts in (
            ("misses", from_remote, None),
            ("warm_misses", started & ~from_remote, None),
            ("hydrations", done, None),
            ("hydrated_bytes", done, fetched),
            ("failed_hydrations", c.of_type(RecordType.HYDRATION_FAILED), None),
            ("evictions", evicted, None),
            ("evicted_bytes", evicted, gone),
            ("warm_evictions", dropped, None),
            ("seals", seal, None),
            ("sealed_bytes", seal, c.value.astype(np.int64)),
            ("uploaded_bytes", remote > 0, remote),
        ):
            add(name, time[mask], None if amounts is None else amounts[mask])
        self._returns(state, c, done, evicted, hot)
        return Moved(c.segment_id, time, started.astype(np.int64), fetched, evicted.astype(np.int64))

    def _remote(self, state: _Stream, c: Columns, retired: NDArray[np.bool_]) -> NDArray[np.int64]:
        """A segment is there once its upload is done, until what it is under is deleted: a member of a pack moves on,
        and the delete of where it was is none of it."""
        uploaded, deleted = c.of_type(RecordType.UPLOAD_DONE), c.of_type(RecordType.TIER2_DELETED)
        marks = key_marks(c.keys)
        state.key.step(c.segment_id[uploaded], marks[c.key[uploaded]])
        current = state.key.get(c.segment_id)
        deleted &= current == marks[np.maximum(c.key, 0)]
        values = np.where(uploaded, state.sealed.get(c.segment_id), 0)
        return _set(state.remote, c, uploaded | deleted | retired, values)

    def _returns(self, state: _Stream, c: Columns, done: Any, evicted: Any, hot: NDArray[np.int64]) -> None:
        """What was evicted whole and is fetched again, and after how long."""
        mask = evicted | (done & (hot > 0))
        segments, times_ms = c.segment_id[mask], c.timestamp_ms[mask]
        left_ms = state.evicted_ms.step(segments, np.where(evicted[mask], times_ms, np.uint64(0)))
        back = done[mask] & (left_ms > 0)
        waits_ms = np.maximum(times_ms[back].astype(np.int64) - left_ms[back].astype(np.int64), 0)
        counts = np.bincount(np.searchsorted(RETURN_EDGES_MS, waits_ms, "right"), minlength=len(RETURN_NAMES))
        self.returned.update(dict(zip(RETURN_NAMES, counts.tolist(), strict=True)))
        self.timeline.add("returns", times_ms[back])
        self.timeline.add("quick_returns", times_ms[back][waits_ms < QUICK_MS])
        again, times = np.unique(segments[back], return_counts=True)
        state.returns.put(again, state.returns.get(again) + times.astype(np.uint64))

    # -- requests ----------------------------------------------------------------------------------------------

    def _requests(self, stream_id: int, c: Columns) -> None:
        """What the remote was asked, as far as the log tells: an upload is a put, however many segments it was of."""
        done, gone = c.of_type(RecordType.UPLOAD_DONE), c.of_type(RecordType.TIER2_DELETED)
        before = self._uploaded.get(stream_id, set())
        now = {c.keys[code] for code in np.unique(c.key[done]).tolist()}
        fresh = now - before
        if now:
            self._uploaded[stream_id] = now  # the members of a pack are committed together, perhaps over two chunks
        kinds = Counter(kind_of(key) for key in fresh)
        self.requests.update({f"put_{kind}": count for kind, count in kinds.items()})
        rows = np.flatnonzero(done & np.isin(c.key, [code for code, key in enumerate(c.keys) if key in fresh]))
        _, first = np.unique(c.key[rows], return_index=True)
        is_log = np.array([kind_of(c.keys[code]) in LOG_KINDS for code in c.key[rows[first]].tolist()], bool)
        self.timeline.add("uploads", c.timestamp_ms[rows[first]])
        self.timeline.add("log_uploads", c.timestamp_ms[rows[first]][is_log])
        deletes, firsts = np.unique(c.key[gone], return_index=True)
        self.requests["delete"] += len(deletes)
        self.timeline.add("deletes", c.timestamp_ms[gone][firsts])
        failed = c.of_type(RecordType.UPLOAD_FAILED)
        self.requests["put_failed"] += int(failed.sum())
        self.timeline.add("failed_uploads", c.timestamp_ms[failed])
        started = c.of_type(RecordType.HYDRATION_STARTED) & (c.value == np.uint64(REMOTE_TIER))
        self.requests["get"] += int(started.sum())

    # -- afterwards --------------------------------------------------------------------------------------------

    def tier_bytes(self) -> dict[str, int]:
        """What there is at the end."""
        return {tier: sum(getattr(s, tier).sum() for s in self.streams.values()) for tier in TIERS}


def kind_of(key: str) -> str:
    """What an object of the remote is, by its key."""
    match remote_keys.parse_key(key):
        case remote_keys.ManifestChunkKey():
            return "log"
        case remote_keys.ManifestBundleKey():
            return "bundle"
        case remote_keys.ManifestSnapshotKey():
            return "snapshot"
        case remote_keys.PackKey():
            return "pack"
        case remote_keys.ChunkBlobKey():
            return "blob"
    return "other"


def _but(values: U64, mask: NDArray[np.bool_]) -> U64:
    return np.where(mask, np.uint64(0), values)


def _set(numbers: Numbers, c: Columns, mask: NDArray[np.bool_], values: NDArray[Any]) -> NDArray[np.int64]:
    """Records under the mask set their segment's number to their value; the difference, for every record."""
    delta = np.zeros(len(c), np.int64)
    if mask.any():
        new = values[mask].astype(np.uint64)
        before = numbers.step(c.segment_id[mask], new)
        delta[mask] = new.astype(np.int64) - before.astype(np.int64)
    return delta
