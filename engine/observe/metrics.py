"""StorageMetrics: everything this process counts, in a registry of its own.

The names of the manifest-log and checkpoint designs are exposed letter for letter: no prefix, no suffix. (The manifest
log's are said to live in the namespace `aof2.manifest_log`; their HELP says so, the names stay as written.) Everything
else starts with `aof2_`. The attribute of a metric is its name, without that prefix.

Labels have few values, fixed here, except `tenant`, which has as many as mount.conf lists.

Owner: shared by all threads. Crash: counts start from 0, as Prometheus expects.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aof2.engine.observe import exposition
from aof2.engine.observe.instruments import (
    DURATION_BUCKETS_S,
    LATENCY_BUCKETS_S,
    AnyInstrument,
    Counter,
    Gauge,
    GaugeTable,
    Histogram,
    Labelled,
    as_metric,
)

log = logging.getLogger(__name__)

_MANIFEST: Final = " (namespace aof2.manifest_log)"


class FetchTier(StrEnum):
    """Where a page came from: label `tier` of page_fetch_latency_seconds."""

    PAGE_CACHE = "PageCache"
    LOCAL = "Local"
    REMOTE = "Remote"
    COLD_SCAN = "ColdScan"


class ReadMode(StrEnum):
    """Label `mode` of remote_bytes_read_total."""

    NORMAL = "normal"
    COLD_SCAN = "cold_scan"


class StorageTier(StrEnum):
    """Where bytes are: label `tier` of the aof2_ metrics."""

    PAGE_CACHE = "page_cache"
    HOT = "hot"
    WARM = "warm"
    REMOTE = "remote"


# The remote evicts nothing: what goes there is purged.
_EVICTING: Final = [(tier.value,) for tier in (StorageTier.PAGE_CACHE, StorageTier.HOT, StorageTier.WARM)]


class RemoteOp(StrEnum):
    GET = "get"
    PUT = "put"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"


class Result(StrEnum):
    OK = "ok"
    ERROR = "error"


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


def _is_state(current: Callable[[], str], name: str) -> float:
    return float(current() == name)


def _by(label: str, values: type[StrEnum]) -> Labelled[Counter]:
    return Labelled((label,), [(v.value,) for v in values], Counter)


class StorageMetrics(Collector):
    """One for each volume that is mounted. `render` is what `/metrics` serves."""

    def __init__(self, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._families: dict[str, tuple[str, AnyInstrument]] = {}
        self._snapshots_ms: dict[int, int] = {}
        self._add_checkpoints()
        self._add_manifest()
        self._add_tiers()
        self._add_remote()
        self._add_volume()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return exposition.render(self.registry.collect())

    def collect(self) -> Iterator[Metric]:
        """One scrape. A family whose callback fails is left out of it."""
        for name, (documentation, instrument) in self._families.items():
            try:
                metric = as_metric(name, documentation, instrument)
            except Exception as e:  # noqa: BLE001 (a callback may raise anything, the rest must be seen)
                self.scrape_errors_total.inc()
                log.debug("a metric could not be read", extra={"metric": name, "error": str(e)})
                continue
            yield metric

    def describe(self) -> list[Metric]:
        """For the registry, which wants to know names without asking callbacks."""
        return [Metric(name, text, "untyped") for name, (text, _) in self._families.items()]

    # -- what takes more than an instrument ----------------------------------------------------------------------

    def note_stream(self, stream_id: int, since_ms: int) -> None:
        """A stream is open; without a snapshot yet its age counts from then."""
        self._snapshots_ms.setdefault(stream_id, since_ms)

    def note_snapshot(self, stream_id: int, taken_at_ms: int) -> None:
        """A manifest snapshot of a stream is durable; the age exposed is that of the stream that waits longest."""
        self._snapshots_ms[stream_id] = taken_at_ms

    def knows_stream(self, stream_id: int) -> bool:
        return stream_id in self._snapshots_ms

    def snapshot_age_s(self) -> float:
        taken_ms = min(self._snapshots_ms.copy().values(), default=None)
        return math.nan if taken_ms is None else max(0, self._now_ms() - taken_ms) / 1000

    def set_breaker(self, state: Callable[[], str]) -> None:
        """Exactly one state is 1: the one that `state` names at the scrape."""
        for each in BreakerState:
            self.remote_breaker_state[each].set_callback(partial(_is_state, state, each.value))

    # -- the families --------------------------------------------------------------------------------------------

    def _add_checkpoints(self) -> None:
        self.checkpoint_duration_seconds = Histogram(DURATION_BUCKETS_S)
        self.checkpoint_bytes_written_local = Counter()
        self.checkpoint_bytes_written_remote = Counter()
        self.checkpoint_queue_depth = Gauge()
        self.storage_quota_exhausted_total = Counter()
        self.page_fetch_latency_seconds: Labelled[Histogram] = Labelled(
            ("tier",), [(t.value,) for t in FetchTier], lambda: Histogram(LATENCY_BUCKETS_S)
        )
        self.remote_bytes_read_total = _by("mode", ReadMode)
        self._names(
            {
                "checkpoint_duration_seconds": "End-to-end checkpoint time, from plan to cleanup.",
                "checkpoint_bytes_written_local": "Bytes written to local staging by checkpoints.",
                "checkpoint_bytes_written_remote": "Bytes uploaded to the remote by checkpoints.",
                "checkpoint_queue_depth": "Checkpoint jobs that wait.",
                "storage_quota_exhausted_total": "Quota reservations that were refused.",
                "page_fetch_latency_seconds": "Time to get a page, by the tier that had it.",
                "remote_bytes_read_total": "Bytes read from the remote, by mode.",
            }
        )

    def _add_manifest(self) -> None:
        self.manifest_chunks_active = Gauge()
        self.manifest_replay_seconds = Gauge()
        self.manifest_crc_error_count = Gauge()
        self.manifest_upload_retries_total = Counter()
        self.manifest_snapshot_age_seconds = Gauge()
        self.manifest_snapshot_age_seconds.set_callback(self.snapshot_age_s)
        self.manifest_shadow_divergence = Gauge()
        self._names(
            {
                "manifest_chunks_active": f"Manifest chunks on the local disk{_MANIFEST}.",
                "manifest_replay_seconds": f"How long the last replay took{_MANIFEST}.",
                "manifest_crc_error_count": f"Checksum mismatches met in the log since the start{_MANIFEST}.",
                "manifest_upload_retries_total": f"Uploads of manifest chunks that were tried again{_MANIFEST}.",
                "manifest_snapshot_age_seconds": f"Age of the oldest of the newest snapshots of streams{_MANIFEST}.",
                "manifest_shadow_divergence": f"Segments on which shadow and log disagree, 0 is good{_MANIFEST}.",
            }
        )

    def _add_tiers(self) -> None:
        self.tier_bytes = GaugeTable(("tier",))
        self.tier_limit_bytes = GaugeTable(("tier",))
        self.tenant_bytes = GaugeTable(("tenant", "tier"))
        self.dirty_bytes = Gauge()
        self.page_cache_hits_total = Counter()
        self.page_cache_misses_total = Counter()
        self.evictions_total: Labelled[Counter] = Labelled(("tier",), _EVICTING, Counter)
        self.evicted_bytes_total: Labelled[Counter] = Labelled(("tier",), _EVICTING, Counter)
        self.hydrations_total = _by("result", Result)
        self.hydrated_bytes_total = Counter()
        self.thrash_total = Counter()
        self._names(
            {
                "aof2_tier_bytes": "Bytes held, by tier.",
                "aof2_tier_limit_bytes": "Bytes that may be held, by tier.",
                "aof2_tenant_bytes": "Bytes held, by tenant and tier.",
                "aof2_dirty_bytes": "Bytes that are not in the remote yet.",
                "aof2_page_cache_hits_total": "Pages found in memory.",
                "aof2_page_cache_misses_total": "Pages not found in memory.",
                "aof2_evictions_total": "Evictions, by the tier that made room.",
                "aof2_evicted_bytes_total": "Bytes evicted, by the tier that made room.",
                "aof2_hydrations_total": "Chunks brought back to the local disk, by result.",
                "aof2_hydrated_bytes_total": "Bytes brought back to the local disk.",
                "aof2_thrash_total": "Chunks brought back soon after they were evicted: the cache is too small.",
            }
        )

    def _add_remote(self) -> None:
        ops = [(op.value,) for op in RemoteOp]
        self.remote_requests_total: Labelled[Counter] = Labelled(
            ("op", "result"), [(op.value, r.value) for op in RemoteOp for r in Result], Counter
        )
        self.remote_retries_total = _by("op", RemoteOp)
        self.remote_request_seconds: Labelled[Histogram] = Labelled(("op",), ops, lambda: Histogram(LATENCY_BUCKETS_S))
        self.remote_bytes_written_total = Counter()
        self.remote_breaker_state: Labelled[Gauge] = Labelled(("state",), [(s.value,) for s in BreakerState], Gauge)
        self.set_breaker(lambda: BreakerState.CLOSED.value)
        self.remote_refused_total = Counter()
        self.log_lag_records = GaugeTable(("stream",))
        self.log_lag_bytes = GaugeTable(("stream",))
        self.log_lag_seconds = GaugeTable(("stream",))
        self.log_stands = GaugeTable(("stream",))
        self._names(
            {
                "aof2_remote_requests_total": "Requests to the remote, by operation and result.",
                "aof2_remote_retries_total": "Requests to the remote that were tried again, by operation.",
                "aof2_remote_request_seconds": "Time of a request to the remote, retries included, by operation.",
                "aof2_remote_bytes_written_total": "Bytes sent to the remote.",
                "aof2_remote_breaker_state": "1 for the state the circuit breaker of the remote is in.",
                "aof2_remote_refused_total": "Requests that the remote refused: keys, rights.",
                "aof2_log_lag_records": "Records of the log that the remote does not have, by stream.",
                "aof2_log_lag_bytes": "Bytes of the log that the remote does not have, by stream.",
                "aof2_log_lag_seconds": "Age of the oldest commit that the remote does not have, by stream.",
                "aof2_log_stands": "1 when the upload of a stream's log failed and waits to be tried again.",
            }
        )

    def _add_volume(self) -> None:
        self.quota_used_bytes = Gauge()
        self.quota_reserved_bytes = Gauge()
        self.quota_limit_bytes = Gauge()
        self.disk_free_bytes = Gauge()
        self.jobs = GaugeTable(("state",))
        self.read_only = Gauge()
        self.fenced = Gauge()
        self.log_files_mended = Gauge()
        self.log_events_unknown = Gauge()
        self.scrape_errors_total = Counter()
        self._names(
            {
                "aof2_quota_used_bytes": "Local bytes that have landed.",
                "aof2_quota_reserved_bytes": "Local bytes set aside, not landed yet.",
                "aof2_quota_limit_bytes": "Local bytes the volume may take.",
                "aof2_disk_free_bytes": "Free bytes of the disk under state_dir.",
                "aof2_jobs": "Jobs, by state.",
                "aof2_read_only": "1 when the volume takes no writes.",
                "aof2_fenced": "1 when another machine has taken the volume over.",
                "aof2_log_files_mended": "Damaged or missing files of the log that were fetched since the start.",
                "aof2_log_events_unknown": "Events of the log, replayed at the start, of schemas this version skips.",
                "aof2_scrape_errors_total": "Metrics that could not be read when they were asked for.",
            }
        )

    def _names(self, documentation: dict[str, str]) -> None:
        """Exposes attributes: each is called like its metric, without `aof2_`."""
        for name, text in documentation.items():
            self._families[name] = (text, getattr(self, name.removeprefix("aof2_")))
