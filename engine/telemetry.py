"""Connects a volume's parts to its metrics: values that a part keeps already are read when scraped.

Callbacks run in the scraping thread and only look at plain attributes; none waits, none opens a transaction longer than
a few look-ups.

Owner: called once, when the volume opens.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from aof2.engine import objects, packrows
from aof2.engine.catalog import tables as t
from aof2.engine.manifest.format import CHUNK_NAME
from aof2.engine.manifest.snapshot import local_snapshots
from aof2.engine.observe.metrics import RemoteOp, StorageMetrics, StorageTier
from aof2.engine.quota.accounts import disk_space
from aof2.engine.replicate.position import StreamReplication

if TYPE_CHECKING:
    from aof2.engine.volume import Volume


def connect(volume: Volume, metrics: StorageMetrics) -> None:
    """Every value that is kept elsewhere, under its exposed name."""
    quota, pages, evictor, warm = volume.quota, volume.pages, volume.evictor, volume.warm
    metrics.quota_used_bytes.set_callback(lambda: quota.usage.used_bytes)
    metrics.quota_reserved_bytes.set_callback(lambda: quota.usage.reserved_bytes)
    metrics.quota_limit_bytes.set_callback(lambda: volume.settings.cache.hot_bytes)
    metrics.disk_free_bytes.set_callback(lambda: disk_space(volume.state_dir).free_bytes)
    metrics.page_cache_hits_total.set_callback(lambda: pages.hits)
    metrics.page_cache_misses_total.set_callback(lambda: pages.misses)
    metrics.evictions_total[StorageTier.HOT].set_callback(lambda: evictor.evictions)
    metrics.evicted_bytes_total[StorageTier.HOT].set_callback(lambda: evictor.evicted_bytes)
    metrics.evictions_total[StorageTier.PAGE_CACHE].set_callback(lambda: pages.evictions)
    metrics.evicted_bytes_total[StorageTier.PAGE_CACHE].set_callback(lambda: pages.evicted_bytes)
    metrics.evictions_total[StorageTier.WARM].set_callback(lambda: warm.dropped)
    metrics.evicted_bytes_total[StorageTier.WARM].set_callback(lambda: warm.dropped_bytes)
    metrics.tier_bytes.set_callback(lambda: _by_tier(pages.used_bytes, quota.usage.used_bytes, warm.used_bytes))
    limits = volume.settings.cache
    metrics.tier_limit_bytes.set_callback(
        lambda: _by_tier(limits.page_cache_bytes, limits.hot_bytes, limits.warm_bytes)
    )
    metrics.tenant_bytes.set_callback(lambda: _tenant_bytes(volume))
    metrics.dirty_bytes.set_callback(lambda: _dirty_bytes(volume))
    metrics.jobs.set_callback(lambda: _jobs(volume))
    metrics.manifest_chunks_active.set_callback(lambda: _chunks_on_disk(volume))
    metrics.read_only.set_callback(lambda: float(bool(volume.read_only_reason) or not volume.target.enabled))
    metrics.set_breaker(lambda: volume.remote.stats().breaker.value.replace("-", "_"))
    windows = volume.hydrator.fetcher.windows
    metrics.pack_bytes.set_callback(lambda: _packs(volume)[0])
    metrics.pack_live_bytes.set_callback(lambda: _packs(volume)[1])
    metrics.pack_amplification.set_callback(lambda: packrows.amplification(*_packs(volume)))
    metrics.pack_neighbours_bytes_total.set_callback(lambda: windows.neighbours_bytes)
    metrics.pack_neighbours_unread_bytes_total.set_callback(lambda: windows.unread_bytes)
    metrics.pack_window_bytes.set_callback(lambda: windows.window_bytes)
    for op in RemoteOp:
        metrics.remote_retries_total[op].set_callback(partial(_retries, volume, op.value))
    metrics.manifest_upload_retries_total.set_callback(lambda: volume.replicator.log_retries)
    metrics.manifest_snapshot_age_seconds.set_callback(lambda: _snapshot_age_s(volume, metrics))
    metrics.manifest_shadow_divergence.set_callback(lambda: volume.shadows.divergence)
    metrics.remote_refused_total.set_callback(lambda: volume.remote.stats().refused)
    metrics.log_lag_records.set_callback(lambda: _lags(volume, lambda one: one.lag_records))
    metrics.log_lag_bytes.set_callback(lambda: _lags(volume, lambda one: one.lag_bytes))
    metrics.log_lag_seconds.set_callback(lambda: _lags(volume, lambda one: one.lag_s))
    metrics.log_stands.set_callback(lambda: _lags(volume, lambda one: one.stands_since_ms is not None))
    metrics.follow_lag_seconds.set_callback(lambda: volume.following.lag_s if volume.following else 0.0)
    metrics.follow_position.set_callback(lambda: _followed(volume))
    metrics.follow_away.set_callback(lambda: float(volume.following is not None and volume.following.is_away))
    metrics.followers.set_callback(lambda: volume.followers.live_count)
    metrics.manifest_replay_seconds.set(volume.opened.replay_s)
    metrics.fenced.set_callback(lambda: float(bool(volume.fenced)))
    metrics.log_files_mended.set_callback(lambda: _mended(volume))
    metrics.log_events_unknown.set(volume.opened.unknown_events)
    metrics.manifest_crc_error_count.set_callback(lambda: len(volume.opened.quarantined) + _mended(volume))


def _mended(volume: Volume) -> float:
    return sum(map(len, volume.opened.mended.values())) + volume.replicator.mended_files


def _retries(volume: Volume, op: str) -> float:
    return volume.remote.stats().retries_by.get(op, 0)


def _snapshot_age_s(volume: Volume, metrics: StorageMetrics) -> float:
    """Streams that came since are noted on the way: a tenant's age begins with its stream."""
    for stream_id in volume.target.streams:
        if stream_id not in metrics.snapshots_ms:
            metrics.snapshots_ms.setdefault(stream_id, _last_snapshot_ms(volume, stream_id))
    return metrics.snapshot_age_s()


def _last_snapshot_ms(volume: Volume, stream_id: int) -> int:
    """When the newest snapshot on this disk was taken; now where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return local_snapshots(volume.manifest_dir / str(stream_id))[-1].created_ms
    return volume.env.now_ms()


def _by_tier(page_cache: float, hot: float, warm: float) -> Mapping[tuple[str, ...], float]:
    return {(StorageTier.PAGE_CACHE,): page_cache, (StorageTier.HOT,): hot, (StorageTier.WARM,): warm}


def _tenant_bytes(volume: Volume) -> Mapping[tuple[str, ...], float]:
    out: dict[tuple[str, ...], float] = {}
    with volume.catalog.view() as view:
        for tenant_id, name in volume.tenant_names().items():
            for tier, counter in ((StorageTier.HOT, objects.HOT_BYTES), (StorageTier.WARM, objects.WARM_BYTES)):
                held = view.get(tenant_id, t.COUNTERS, counter)
                out[name, tier] = held or 0
    return out


def _dirty_bytes(volume: Volume) -> float:
    with volume.catalog.view() as view:
        return sum(objects.pending_bytes(view, tenant_id) for tenant_id in volume.tenant_names())


def _jobs(volume: Volume) -> Mapping[tuple[str, ...], float]:
    with volume.catalog.view() as view:
        jobs = (job for tenant_id in volume.tenant_names() for _, job in view.scan(tenant_id, t.JOBS))
        return Counter((job.state.name.lower(),) for job in jobs)


def _packs(volume: Volume) -> tuple[int, int]:
    with volume.catalog.view() as view:
        counted = [packrows.totals(view, tenant_id) for tenant_id in volume.tenant_names()]
    return sum(stored for stored, _ in counted), sum(live for _, live in counted)


def _lags(volume: Volume, value: Callable[[StreamReplication], float]) -> Mapping[tuple[str, ...], float]:
    return {(str(one.stream_id),): float(value(one)) for one in volume.replication.lags(volume.tenant_names())}


def _followed(volume: Volume) -> Mapping[tuple[str, ...], float]:
    streams = volume.following.status().streams if volume.following is not None else ()
    return {(str(one.stream_id),): float(one.position.ordinal) for one in streams if one.position is not None}


def _chunks_on_disk(volume: Volume) -> float:
    folders = [volume.manifest_dir / str(stream_id) for stream_id in volume.target.streams]
    return sum(bool(CHUNK_NAME.fullmatch(name)) for folder in folders for name in os.listdir(folder))  # noqa: PTH208
