"""`aof2 spark manifest`: the log as DataFrames has the numbers of `aof2 report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aof2.engine.env import Env
from aof2.engine.inspect.rows import MANIFEST_DIR, open_rows
from aof2.engine.remote.open import open_remote
from aof2.engine.settings import Settings
from tests.engine.helpers import small_settings
from tests.history.traffic import run_day

READS = 120


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = small_settings(tmp_path_factory.mktemp("day"), compression="none")
    run_day(settings, hot_bytes=1 << 20, reads=READS, minutes=300)
    return settings


def reported(settings: Settings, *, local: bool) -> Any:
    from aof2.engine.history.history import read_history
    from aof2.engine.history.sources import Log

    state_dir = settings.volume.state_dir
    store = None if local else open_remote(Env(), settings.remote)
    with open_rows(state_dir) as rows, rows.view() as view:
        return read_history(Log(state_dir / MANIFEST_DIR if local else None, store), view)


def run(spark: Any, **how: Any) -> Any:
    from aof2.engine.spark.pipelines import manifest as pipeline
    from aof2.engine.spark.pipelines.seam import silent

    return pipeline.run(spark, pipeline.Arguments(**how), silent)


def test_the_remote_as_tables(spark: Any, day: Settings, tmp_path: Path) -> None:
    out = tmp_path / "log"
    found, report = run(spark, remote=day.remote, out=str(out)).report, reported(day, local=False)
    assert found["records"] == report.records
    assert (found["from_ms"], found["to_ms"]) == (report.from_ms, report.to_ms)
    assert found["tiers"] == report.tiers
    counted = {name: amount for name, amount in report.totals.items() if amount}
    for name in ("uploads", "log_uploads", "log_bytes", "deletes"):
        counted.pop(name, None)
    assert {name: found["totals"].get(name) for name in counted} == counted
    assert found["returned"] == report.returned
    assert (
        (found["uses"], found["missed"]) == (report.measured.uses, report.measured.missed) == (READS, found["missed"])
    )
    assert found["hit_rate"] == report.hit_rate
    assert {name: found["requests"][name] for name in report.requests if name in found["requests"]} == {
        name: count for name, count in report.requests.items() if name in found["requests"]
    }
    hottest = {row["directory"]: row for row in found["hottest"]}
    assert {cell.directory for cell in report.hottest} == hottest.keys()
    for cell in report.hottest:
        row = hottest[cell.directory]
        assert (row["opens"], row["misses"], row["fetched_bytes"], row["evictions"]) == cell[2:]
    heat = spark.read.parquet(str(out / "heat"))
    by_hour = {(row["directory"], int(row["hour"].timestamp() * 1000)): row for row in heat.collect()}
    assert len(by_hour) == len(report.heat)
    for cell in report.heat:
        assert by_hour[cell.directory, cell.hour_ms]["opens"] == cell.opens
    records = spark.read.parquet(str(out / "records"))
    assert records.count() == report.records
    assert {row["type"]: row["count"] for row in records.groupBy("type").count().collect()} == report.types
    segments = spark.read.parquet(str(out / "segments"))
    assert segments.selectExpr("sum(evictions)").first()[0] == report.totals["evictions"]


def test_a_folder_that_begins_at_a_snapshot(spark: Any, day: Settings) -> None:
    found = run(spark, remote=None, folder=str(day.volume.state_dir / MANIFEST_DIR)).report
    report = reported(day, local=True)
    assert not report.whole
    assert found["tiers"] == report.tiers
    assert found["records"] == report.records


def test_there_is_no_log(spark: Any, tmp_path: Path) -> None:
    from aof2.engine.spark.pipelines.seam import PipelineError

    with pytest.raises(PipelineError, match="no log there"):
        run(spark, remote=None, folder=str(tmp_path))
    with pytest.raises(PipelineError, match="no such folder"):
        run(spark, remote=None, folder=str(tmp_path / "away"))
