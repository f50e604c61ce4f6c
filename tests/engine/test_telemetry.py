"""What an operator sees: metrics under their names, with values that come from the volume."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import msgspec
import trio
from prometheus_client.parser import text_string_to_metric_families

from aof2.engine.settings.model import MetricsSettings
from aof2.engine.volume import Volume
from tests.engine.helpers import cold_read, put_object, read_object

from .helpers import KIB, run_volume, small_settings
from .test_tiers import content


def values(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def test_a_life_through_the_tiers_shows_in_the_metrics(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", content(1, 256 * KIB))
        seen = values(await trio.to_thread.run_sync(fetch, v.metrics_port))
        assert seen["aof2_dirty_bytes"] == seen["aof2_quota_used_bytes"] == 256 * KIB
        await v.checkpoint("default")
        await v.evict([key])
        await read_object(v, key, 0, 100)
        await read_object(v, key, 0, 100)
        await v.hydrator.quiesce()
        await cold_read(v, key, 0, 256 * KIB, _nowhere)
        seen = values(await trio.to_thread.run_sync(fetch, v.metrics_port))
        assert seen["aof2_dirty_bytes"] == 0
        assert seen["aof2_evicted_bytes_total{tier=hot}"] == 256 * KIB
        assert seen["remote_bytes_read_total{mode=normal}"] > 0
        assert seen["remote_bytes_read_total{mode=cold_scan}"] > 0
        assert seen["page_fetch_latency_seconds_count{tier=Remote}"] == 1
        assert seen["page_fetch_latency_seconds_count{tier=Local}"] >= 1
        assert seen["page_fetch_latency_seconds_count{tier=ColdScan}"] > 0
        assert seen["aof2_remote_requests_total{op=put,result=ok}"] >= 1
        assert seen["manifest_chunks_active"] >= 1
        assert seen["aof2_tenant_bytes{tenant=default,tier=hot}"] == seen["aof2_quota_used_bytes"]
        assert seen["aof2_scrape_errors_total"] == 0

    settings = small_settings(tmp_path, compression="none")
    run_volume(msgspec.structs.replace(settings, metrics=MetricsSettings(listen="127.0.0.1:0")), body)


async def _nowhere(_: bytes) -> None:
    await trio.lowlevel.checkpoint()
