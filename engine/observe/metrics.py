"""StorageMetrics: everything this process counts for a volume.

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
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from aof2.engine.observe import exposition
from aof2.engine.observe.instruments import (
    DURATION_BUCKETS_S,
    LATENCY_BUCKETS_S,
    Counter,
    Gauge,
    GaugeTable,
    Histogram,
    Instrument,
    Labelled,
    as_metric,
)

log = logging.getLogger(__name__)


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
_EVICTING: Final = (StorageTier.PAGE_CACHE, StorageTier.HOT, StorageTier.WARM)


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


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS_S)


class StorageMetrics:
    """One for each volume that is mounted. `render` is what `/metrics` serves."""

    def __init__(self, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._families: dict[str, Instrument] = {}
        self._process = ProcessCollector(registry=None)
        self.snapshots_ms: dict[int, int] = {}  # by stream: when its newest was taken, or from when its age counts
        self._add_checkpoints()
        self._add_manifest()
        self._expose("")
        self._add_tiers()
        self._add_packs()
        self._add_remote()
        self._add_volume()
        self._expose("aof2_")

    def render(self) -> bytes:
        """Prometheus' text format."""
        return exposition.render([*self._collect(), *self._process.collect()])

    def _collect(self) -> Iterator[Metric]:
        """One scrape. A family whose callback fails is left out of it."""
        for name, instrument in self._families.items():
            try:
                metric = as_metric(name, instrument)
            except Exception as e:  # noqa: BLE001 (a callback may raise anything, the rest must be seen)
                self.scrape_errors_total.inc()
                log.debug("a metric could not be read", extra={"metric": name, "error": str(e)})
                continue
            yield metric

    def _expose(self, prefix: str) -> None:
        """Every instrument that was made since the last call, under the name of its attribute."""
        for name, made in vars(self).items():
            if isinstance(made, Instrument) and name not in self._families:
                self._families[prefix + name] = made

    # -- what takes more than an instrument ----------------------------------------------------------------------

    def note_snapshot(self, stream_id: int, taken_at_ms: int) -> None:
        """A manifest snapshot of a stream is durable; the age exposed is that of the stream that waits longest."""
        self.snapshots_ms[stream_id] = taken_at_ms

    def snapshot_age_s(self) -> float:
        taken_ms = min(self.snapshots_ms.copy().values(), default=None)
        return math.nan if taken_ms is None else max(0, self._now_ms() - taken_ms) / 1000

    def set_breaker(self, state: Callable[[], str]) -> None:
        """Exactly one state is 1: the one that `state` names at the scrape."""

        def states() -> dict[tuple[str, ...], float]:
            now = state()
            return {(each.value,): float(each == now) for each in BreakerState}

        self.remote_breaker_state.set_callback(states)

    # -- the families --------------------------------------------------------------------------------------------

    def _add_checkpoints(self) -> None:
        self.checkpoint_duration_seconds = Histogram(
            DURATION_BUCKETS_S, "End-to-end checkpoint time, from plan to cleanup."
        )
        self.checkpoint_bytes_written_local = Counter("Bytes written to local staging by checkpoints.")
        self.checkpoint_bytes_written_remote = Counter("Bytes uploaded to the remote by checkpoints.")
        self.checkpoint_queue_depth = Gauge("Checkpoint jobs that wait.")
        self.storage_quota_exhausted_total = Counter("Quota reservations that were refused.")
        self.page_fetch_latency_seconds = Labelled(
            _latency, "Time to get a page, by the tier that had it.", tier=FetchTier
        )
        self.remote_bytes_read_total = Labelled(Counter, "Bytes read from the remote, by mode.", mode=ReadMode)

    def _add_manifest(self) -> None:
        def help_of(text: str) -> str:
            return f"{text} (namespace aof2.manifest_log)."

        self.manifest_chunks_active = Gauge(help_of("Manifest chunks on the local disk"))
        self.manifest_replay_seconds = Gauge(help_of("How long the last replay took"))
        self.manifest_crc_error_count = Gauge(help_of("Checksum mismatches met in the log since the start"))
        self.manifest_upload_retries_total = Counter(help_of("Uploads of manifest chunks that were tried again"))
        self.manifest_snapshot_age_seconds = Gauge(help_of("Age of the oldest of the newest snapshots of streams"))
        self.manifest_snapshot_age_seconds.set_callback(self.snapshot_age_s)
        self.manifest_shadow_divergence = Gauge(help_of("Segments on which shadow and log disagree, 0 is good"))

    def _add_tiers(self) -> None:
        self.tier_bytes = GaugeTable(("tier",), "Bytes held, by tier.")
        self.tier_limit_bytes = GaugeTable(("tier",), "Bytes that may be held, by tier.")
        self.tenant_bytes = GaugeTable(("tenant", "tier"), "Bytes held, by tenant and tier.")
        self.dirty_bytes = Gauge("Bytes that are not in the remote yet.")
        self.page_cache_hits_total = Counter("Pages found in memory.")
        self.page_cache_misses_total = Counter("Pages not found in memory.")
        self.evictions_total = Labelled(Counter, "Evictions, by the tier that made room.", tier=_EVICTING)
        self.evicted_bytes_total = Labelled(Counter, "Bytes evicted, by the tier that made room.", tier=_EVICTING)
        self.hydrations_total = Labelled(Counter, "Chunks brought back to the local disk, by result.", result=Result)
        self.hydrated_bytes_total = Counter("Bytes brought back to the local disk.")
        self.thrash_total = Counter("Chunks brought back soon after they were evicted: the cache is too small.")

    def _add_packs(self) -> None:
        self.pack_bytes = Gauge("Bytes of packs of small files in the remote.")
        self.pack_live_bytes = Gauge("Bytes that those packs would take with what is needed of them alone.")
        self.pack_amplification = Gauge("Bytes of packs for each byte that is needed of them.")
        self.pack_neighbours_bytes_total = Counter("Bytes fetched from packs beside what was asked for.")
        self.pack_neighbours_unread_bytes_total = Counter("Those of them that went without being read.")
        self.pack_window_bytes = Gauge(
            "How much of a pack is fetched around what is asked for; less where it is not read."
        )

    def _add_remote(self) -> None:
        self.remote_requests_total = Labelled(
            Counter, "Requests to the remote, by operation and result.", op=RemoteOp, result=Result
        )
        self.remote_retries_total = Labelled(
            Counter, "Requests to the remote that were tried again, by operation.", op=RemoteOp
        )
        self.remote_request_seconds = Labelled(
            _latency, "Time of a request to the remote, retries included, by operation.", op=RemoteOp
        )
        self.remote_bytes_written_total = Counter("Bytes sent to the remote.")
        self.remote_breaker_state = GaugeTable(("state",), "1 for the state the circuit breaker of the remote is in.")
        self.set_breaker(lambda: BreakerState.CLOSED)
        self.remote_refused_total = Counter("Requests that the remote refused: keys, rights.")
        stream = ("stream",)
        self.log_lag_records = GaugeTable(stream, "Records of the log that the remote does not have, by stream.")
        self.log_lag_bytes = GaugeTable(stream, "Bytes of the log that the remote does not have, by stream.")
        self.log_lag_seconds = GaugeTable(stream, "Age of the oldest commit that the remote does not have, by stream.")
        self.log_stands = GaugeTable(stream, "1 when the upload of a stream's log failed and waits to be tried again.")

        self.follow_lag_seconds = Gauge(
            "Of a follower: since the end of the log in the remote was last seen to be here."
        )
        self.follow_position = GaugeTable(stream, "Of a follower: the record that each stream's log is at here.")
        self.follow_away = Gauge("Of a follower: 1 while the remote does not answer.")
        self.followers = Gauge("Of a writer: followers that were heard of lately.")

    def _add_volume(self) -> None:
        self.quota_used_bytes = Gauge("Local bytes that have landed.")
        self.quota_reserved_bytes = Gauge("Local bytes set aside, not landed yet.")
        self.quota_limit_bytes = Gauge("Local bytes the volume may take.")
        self.disk_free_bytes = Gauge("Free bytes of the disk under state_dir.")
        self.jobs = GaugeTable(("state",), "Jobs, by state.")
        self.read_only = Gauge("1 when the volume takes no writes.")
        self.fenced = Gauge("1 when another machine has taken the volume over.")
        self.log_files_mended = Gauge("Damaged or missing files of the log that were fetched since the start.")
        self.log_events_unknown = Gauge("Events of the log, replayed at the start, of schemas this version skips.")
        self.scrape_errors_total = Counter("Metrics that could not be read when they were asked for.")
