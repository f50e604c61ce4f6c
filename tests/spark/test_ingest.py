"""`ingest`: files into streams and into Parquet, growing ones too; ended, run again, and run for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.env import Env
from aof2.engine.spark.pipelines import compact, ingest, workspace
from aof2.engine.spark.pipelines.seam import PipelineError
from aof2.engine.spark.pipelines.tables import Layout
from tests.spark.pipelines import json_files, numbers, until_ended
from tests.spark.test_mounted import TENANTS, payloads
from tests.support.mount import MountedVolume, mounted_volume, skip_where_impossible

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say

SCHEMA = "n bigint, kind int, text string"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    skip_where_impossible()
    with mounted_volume(tmp_path / "volume", tenants=TENANTS) as made:
        yield made
        assert made.complaints() == []


def run(spark: Any, source: Path, target: Path, env: Env | None = None, **more: Any) -> Any:
    arguments = {"format": "json", "schema": SCHEMA} | more
    return ingest.run(spark, ingest.Arguments(sources=[str(source)], target=str(target), **arguments), env=env).report


def rows_in(spark: Any, stream: Path) -> list[Any]:
    return sorted((json.loads(line) for line in payloads(spark, stream)), key=lambda row: row["n"])


# -- Parquet, on a disk


@pytest.fixture
def no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below tmp_path is a disk's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOF2_CONF", raising=False)


@pytest.mark.usefixtures("no_mount")
def test_parquet_once(spark: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "src", tmp_path / "day=1"
    rows = json_files(source, 3, 100)
    layout = Layout(partition_by=("kind",))
    done = run(spark, source, target, layout=layout)
    assert (done["rows"], done["jobs_before"], done["into"]) == (300, 0, "parquet")
    again = run(spark, source, target, layout=layout)
    assert (again["rows"], again["jobs_before"], again["checksum"]) == (300, 1, done["checksum"])
    assert numbers(spark, target) == [row["n"] for row in rows]
    assert sorted(path.name for path in target.glob("kind=*")) == ["kind=0", "kind=1", "kind=2"]
    json_files(source, 4, 100)
    with pytest.raises(PipelineError, match="from other files or by other options"):
        run(spark, source, target, layout=layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day=1", "src"]


@pytest.mark.usefixtures("no_mount")
@pytest.mark.parametrize("point", workspace.CRASH_POINTS)
def test_parquet_that_was_ended(spark: Any, tmp_path: Path, point: str) -> None:
    source, target = tmp_path / "src", tmp_path / "out"
    rows = json_files(source, 2, 50)
    until_ended(lambda env: run(spark, source, target, env), point)
    assert target.exists() == (point == "pipeline.published")
    run(spark, source, target)
    assert numbers(spark, target) == [row["n"] for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.usefixtures("no_mount")
def test_partitions_that_names_cannot_tell(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "src"
    json_files(source, 1, 50)  # some texts are empty
    with pytest.raises(PipelineError, match="cannot tell an empty text from none"):
        run(spark, source, tmp_path / "out", layout=Layout(partition_by=("text",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_mount")
def test_another_run_is_at_work(spark: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "src", tmp_path / "out"
    json_files(source, 1, 10)
    with (
        workspace.Workspace.opened(workspace.beside(target), Env()),
        pytest.raises(PipelineError, match="another run is at work"),
    ):
        run(spark, source, target)


@pytest.mark.usefixtures("no_mount")
def test_parquet_that_grows(spark: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "src", tmp_path / "out"
    more = {"trigger": "available-now", "checkpoint": str(tmp_path / "checkpoint")}
    json_files(source, 2, 50)
    assert run(spark, source, target, **more)["rows"] == 100
    (source / "later.json").write_text('{"n": 1000, "kind": 1, "text": "x"}\n')
    assert run(spark, source, target, schema="", **more)["rows"] == 1
    for note in (tmp_path / "checkpoint" / "commits").iterdir():
        note.unlink()
    assert run(spark, source, target, **more)["jobs_before"] == 1  # the last one
    assert run(spark, source, target, **more)["jobs"] == 0
    assert numbers(spark, target) == [*range(100), 1000]
    assert {path.name for path in target.glob("batch=*")} == {"batch=0", "batch=1"}


# -- streams, on a mount


def test_records_once_whatever_happens(spark: Any, volume: MountedVolume, tmp_path: Path) -> None:
    source, stream, conf = tmp_path / "src", volume.path / "clicks", {"conf": str(volume.conf)}
    rows = json_files(source, 3, 700)
    until_ended(lambda env: run(spark, source, stream, env, **conf), "records.delivered")
    done = run(spark, source, stream, **conf)
    assert (done["rows"], done["jobs_before"], done["into"]) == (2100, 1, "records")
    assert rows_in(spark, stream) == rows
    named = run(spark, source, stream, job="again", select=["n as ext_id", "text as value"], **conf)
    assert (named["rows"], named["first_offset"]) == (2100, done["next_offset"])
    assert run(spark, source, stream, job="again", select=["n as ext_id", "text as value"], **conf)["jobs_before"] == 1
    found = spark.read.format("aof2").load(str(stream)).where(f"offset >= {done['next_offset']}")
    assert sorted(row.ext_id for row in found.collect()) == [row["n"] for row in rows]


def test_a_growing_source_into_records_then_into_larger_segments(
    spark: Any, volume: MountedVolume, tmp_path: Path
) -> None:
    source, stream = tmp_path / "src", volume.path / "clicks"
    more = {"conf": str(volume.conf), "trigger": "available-now", "checkpoint": str(tmp_path / "checkpoint")}
    json_files(source, 2, 100)
    for number in range(3):
        (source / f"later{number}.json").write_text(json.dumps({"n": 1000 + number, "kind": 1, "text": "x"}) + "\n")
        assert run(spark, source, stream, **more)["rows"] == (201 if number == 0 else 1)
    for note in (tmp_path / "checkpoint" / "commits").iterdir():
        note.unlink()
    assert run(spark, source, stream, **more)["jobs_before"] == 1  # the last one
    wanted = [*range(200), 1000, 1001, 1002]
    assert [row["n"] for row in rows_in(spark, stream)] == wanted

    larger = volume.path / "larger"
    asked = compact.Arguments(
        source=str(stream),
        target=str(larger),
        checkpoint=str(tmp_path / "compacted"),
        conf=str(volume.conf),
        remove_sources=True,
    )
    until_ended(lambda env: compact.run(spark, asked, env=env), "compact.durable")
    done = compact.run(spark, asked).report
    assert (done["rows"], done["removed"], done["files_after"]) == (0, 3, 1)
    assert [row["n"] for row in rows_in(spark, larger)] == wanted
    assert payloads(spark, stream) == []


def test_a_stream_into_parquet_with_its_segments_gone(spark: Any, volume: MountedVolume, tmp_path: Path) -> None:
    stream, target = volume.path / "clicks", volume.mountpoint / "default" / "clicks"
    rows = json_files(tmp_path / "src", 2, 500)
    run(spark, tmp_path / "src", stream, conf=str(volume.conf))
    asked = compact.Arguments(
        source=str(stream), target=str(target), schema=SCHEMA, conf=str(volume.conf), remove_sources=True
    )
    for point in compact.CRASH_POINTS:
        until_ended(lambda env: compact.run(spark, asked, env=env), point)
    compact.run(spark, asked)
    assert numbers(spark, target) == [row["n"] for row in rows]
    assert payloads(spark, stream) == []
    volume.evict(target)
    assert numbers(spark, target) == [row["n"] for row in rows]
