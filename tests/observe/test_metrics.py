"""What /metrics says: names, types and labels, letter for letter."""

from __future__ import annotations

import math
import re
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aof2.engine.observe.instruments import Counter, Gauge, GaugeTable, Histogram
from aof2.engine.observe.metrics import BreakerState, FetchTier, ReadMode, RemoteOp, Result, StorageMetrics, StorageTier

# As the manifest-log and checkpoint designs have them.
DESIGNED = {
    "checkpoint_duration_seconds": "histogram",
    "checkpoint_bytes_written_local": "counter",
    "checkpoint_bytes_written_remote": "counter",
    "checkpoint_queue_depth": "gauge",
    "storage_quota_exhausted_total": "counter",
    "page_fetch_latency_seconds": "histogram",
    "remote_bytes_read_total": "counter",
    "manifest_chunks_active": "gauge",
    "manifest_replay_seconds": "gauge",
    "manifest_crc_error_count": "gauge",
    "manifest_upload_retries_total": "counter",
    "manifest_snapshot_age_seconds": "gauge",
    "manifest_shadow_divergence": "gauge",
}
OURS = {
    "aof2_tier_bytes": "gauge",
    "aof2_tier_limit_bytes": "gauge",
    "aof2_tenant_bytes": "gauge",
    "aof2_dirty_bytes": "gauge",
    "aof2_page_cache_hits_total": "counter",
    "aof2_page_cache_misses_total": "counter",
    "aof2_evictions_total": "counter",
    "aof2_evicted_bytes_total": "counter",
    "aof2_hydrations_total": "counter",
    "aof2_hydrated_bytes_total": "counter",
    "aof2_thrash_total": "counter",
    "aof2_pack_bytes": "gauge",
    "aof2_pack_live_bytes": "gauge",
    "aof2_pack_amplification": "gauge",
    "aof2_pack_neighbours_bytes_total": "counter",
    "aof2_pack_neighbours_unread_bytes_total": "counter",
    "aof2_pack_window_bytes": "gauge",
    "aof2_remote_requests_total": "counter",
    "aof2_remote_retries_total": "counter",
    "aof2_remote_request_seconds": "histogram",
    "aof2_remote_bytes_written_total": "counter",
    "aof2_remote_breaker_state": "gauge",
    "aof2_remote_refused_total": "counter",
    "aof2_log_lag_records": "gauge",
    "aof2_log_lag_bytes": "gauge",
    "aof2_log_lag_seconds": "gauge",
    "aof2_log_stands": "gauge",
    "aof2_follow_lag_seconds": "gauge",
    "aof2_follow_position": "gauge",
    "aof2_follow_away": "gauge",
    "aof2_followers": "gauge",
    "aof2_quota_used_bytes": "gauge",
    "aof2_quota_reserved_bytes": "gauge",
    "aof2_quota_limit_bytes": "gauge",
    "aof2_disk_free_bytes": "gauge",
    "aof2_jobs": "gauge",
    "aof2_read_only": "gauge",
    "aof2_fenced": "gauge",
    "aof2_log_files_mended": "gauge",
    "aof2_log_events_unknown": "gauge",
    "aof2_scrape_errors_total": "counter",
}
LOG_TABLES = {"aof2_log_lag_records", "aof2_log_lag_bytes", "aof2_log_lag_seconds", "aof2_log_stands"}
STREAM_TABLES = LOG_TABLES | {"aof2_follow_position"}
TABLES = {"aof2_tier_bytes", "aof2_tier_limit_bytes", "aof2_tenant_bytes", "aof2_jobs", *STREAM_TABLES}


def filled() -> StorageMetrics:
    metrics = StorageMetrics()
    metrics.tier_bytes.set_callback(lambda: {("hot",): 5})
    metrics.tier_limit_bytes.set_callback(lambda: {("hot",): 50})
    metrics.tenant_bytes.set_callback(lambda: {("events", "hot"): 3, ("db", "warm"): 2})
    metrics.jobs.set_callback(lambda: {("waiting",): 1})
    for name in STREAM_TABLES:
        getattr(metrics, name.removeprefix("aof2_")).set_callback(lambda: {("1",): 1})
    return metrics


def types(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def values(metrics: StorageMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels, read from the text by a parser that renames nothing."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([a-z0-9_]+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            found[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))] = float(value)
    return found


def value(metrics: StorageMetrics, name: str, **labels: str) -> float:
    return values(metrics)[name, frozenset(labels.items())]


def test_names_and_types_are_exact() -> None:
    shown = types(filled().render().decode())
    assert {n: t for n, t in shown.items() if not n.startswith("process_")} == DESIGNED | OURS
    assert any(n.startswith("process_") for n in shown)


def test_prometheus_own_parser_reads_it() -> None:
    families = {f.name: f for f in text_string_to_metric_families(filled().render().decode())}
    for name, kind in (DESIGNED | OURS).items():
        # The parser itself files counters without `_total`, and adds it to samples that lack it.
        family = families[name.removesuffix("_total") if kind == "counter" else name]
        assert family.type == kind
        assert family.documentation
        suffixes = {"histogram": {"_bucket", "_count", "_sum"}, "counter": {"_total"}, "gauge": {""}}[kind]
        assert {s.name.removeprefix(family.name) for s in family.samples} == suffixes
    assert len(families) == len(types(filled().render().decode()))


def test_samples_carry_their_names_as_written() -> None:
    names = {name for name, _ in values(filled())}
    for name, kind in (DESIGNED | OURS).items():
        expected = {f"{name}_bucket", f"{name}_count", f"{name}_sum"} if kind == "histogram" else {name}
        assert expected <= names
    assert "checkpoint_bytes_written_local_total" not in names
    assert not any(n.endswith("_created") for n in names)


def test_labels_are_exact() -> None:
    labels: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for name, found in values(filled()):
        base = re.sub(r"_(bucket|count|sum)$", "", name) if name not in DESIGNED else name
        labels.setdefault(base, set()).add(frozenset(x for x in found if x[0] != "le"))

    def each(label: str, *allowed: str) -> set[frozenset[tuple[str, str]]]:
        return {frozenset({(label, a)}) for a in allowed}

    assert labels["page_fetch_latency_seconds"] == each("tier", "PageCache", "Local", "Remote", "ColdScan")
    assert labels["remote_bytes_read_total"] == each("mode", "normal", "cold_scan")
    assert labels["aof2_evictions_total"] == each("tier", "page_cache", "hot", "warm")
    assert labels["aof2_hydrations_total"] == each("result", "ok", "error")
    assert labels["aof2_remote_retries_total"] == each("op", "get", "put", "head", "list", "delete")
    assert len(labels["aof2_remote_requests_total"]) == 10
    assert labels["aof2_tenant_bytes"] == {
        frozenset({("tenant", "events"), ("tier", "hot")}),
        frozenset({("tenant", "db"), ("tier", "warm")}),
    }
    for name in DESIGNED.keys() - {"page_fetch_latency_seconds", "remote_bytes_read_total"}:
        assert labels[name] == {frozenset()}, name


def test_the_manifest_namespace_is_in_the_help() -> None:
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", StorageMetrics().render().decode(), re.MULTILINE))
    assert all("aof2.manifest_log" in text for name, text in helps.items() if name.startswith("manifest_"))


def test_everything_counts() -> None:
    metrics = filled()
    metrics.checkpoint_bytes_written_local.inc(1000)
    metrics.remote_bytes_read_total[ReadMode.COLD_SCAN].inc(7)
    metrics.remote_requests_total[RemoteOp.GET, Result.ERROR].inc()
    metrics.evictions_total[StorageTier.HOT].inc(2)
    metrics.page_fetch_latency_seconds[FetchTier.REMOTE].observe(0.3)
    metrics.checkpoint_queue_depth.set(4)
    metrics.manifest_crc_error_count.set(1)
    assert value(metrics, "checkpoint_bytes_written_local") == 1000
    assert value(metrics, "remote_bytes_read_total", mode="cold_scan") == 7
    assert value(metrics, "remote_bytes_read_total", mode="normal") == 0
    assert value(metrics, "aof2_remote_requests_total", op="get", result="error") == 1
    assert value(metrics, "aof2_evictions_total", tier="hot") == 2
    assert value(metrics, "page_fetch_latency_seconds_bucket", tier="Remote", le="0.25") == 0
    assert value(metrics, "page_fetch_latency_seconds_bucket", tier="Remote", le="0.5") == 1
    assert value(metrics, "page_fetch_latency_seconds_count", tier="Remote") == 1
    assert value(metrics, "page_fetch_latency_seconds_sum", tier="Remote") == 0.3
    assert value(metrics, "checkpoint_queue_depth") == 4
    assert value(metrics, "manifest_crc_error_count") == 1
    assert value(metrics, "aof2_tier_bytes", tier="hot") == 5


def test_the_snapshot_age_is_that_of_the_stream_that_waits_longest() -> None:
    now_ms = 100_000
    metrics = StorageMetrics(now_ms=lambda: now_ms)
    assert math.isnan(value(metrics, "manifest_snapshot_age_seconds"))
    metrics.note_snapshot(1, 90_000)
    metrics.note_snapshot(2, 99_000)
    assert value(metrics, "manifest_snapshot_age_seconds") == 10
    now_ms = 101_500
    assert value(metrics, "manifest_snapshot_age_seconds") == 11.5
    metrics.note_snapshot(1, 101_000)
    assert value(metrics, "manifest_snapshot_age_seconds") == 2.5
    now_ms = 0  # a clock that went backwards
    assert value(metrics, "manifest_snapshot_age_seconds") == 0


def test_the_breaker_is_in_one_state() -> None:
    metrics = StorageMetrics()
    for state in (None, BreakerState.OPEN, BreakerState.HALF_OPEN):
        if state is not None:
            metrics.set_breaker(lambda state=state: state.value)  # type: ignore[misc]
        shown = {s: value(metrics, "aof2_remote_breaker_state", state=s) for s in BreakerState}
        assert shown == {s: s is (state or BreakerState.CLOSED) for s in BreakerState}


def test_a_callback_that_fails_costs_its_own_metric_only() -> None:
    metrics = filled()
    metrics.disk_free_bytes.set_callback(lambda: 1 // 0)
    shown = types(metrics.render().decode())
    assert "aof2_disk_free_bytes" not in shown
    assert len([n for n in shown if not n.startswith("process_")]) == len(DESIGNED | OURS) - 1
    assert value(metrics, "aof2_scrape_errors_total") == 2


def test_a_table_without_rows_is_left_out() -> None:
    assert not TABLES & types(StorageMetrics().render().decode()).keys()


def test_label_values_are_escaped() -> None:
    metrics = StorageMetrics()
    odd = 'a"b\\c\nd\udc80'
    metrics.jobs.set_callback(lambda: {(odd,): 1})
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    assert families["aof2_jobs"].samples[0].labels == {"state": 'a"b\\c\nd\\udc80'}


def test_two_volumes_share_nothing() -> None:
    one, two = StorageMetrics(), StorageMetrics()
    one.thrash_total.inc()
    assert (value(one, "aof2_thrash_total"), value(two, "aof2_thrash_total")) == (1, 0)


def test_a_misspelled_label_is_an_error() -> None:
    with pytest.raises(KeyError):
        StorageMetrics().remote_bytes_read_total["Normal"]


def test_many_threads_lose_no_count() -> None:
    counter, histogram = Counter(), Histogram((1.0,))
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(5_000):
            counter.inc()
            histogram.observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.value, histogram.count) == (20_000, 20_000)
    assert [s.value for s in histogram.samples("h", {}) if s.name == "h_sum"] == [10_000]


def test_instruments() -> None:
    counter = Counter()
    with pytest.raises(ValueError):
        counter.inc(-1)
    counter.set_callback(lambda: 9)
    assert counter.value == 9
    gauge = Gauge()
    gauge.set_callback(lambda: 3)
    assert gauge.value == 3
    gauge.set_callback(None)
    gauge.set(2)
    assert gauge.value == 2
    histogram = Histogram((1.0, 2.0))
    for seen in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(seen)
    samples = {(s.name, s.labels.get("le")): s.value for s in histogram.samples("h", {})}
    assert samples == {
        ("h_bucket", "1.0"): 2, ("h_bucket", "2.0"): 3, ("h_bucket", "+Inf"): 4,
        ("h_count", None): 4, ("h_sum", None): 5.5,
    }  # fmt: skip
    assert list(GaugeTable(("x",)).samples("t", {})) == []
