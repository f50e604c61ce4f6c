"""`compact`: segments and small files into large ones, ended at each step and run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.env import Env
from aof2.engine.spark.pipelines import compact, workspace
from aof2.engine.spark.pipelines.seam import PipelineError, Summary
from aof2.engine.spark.pipelines.tables import Layout
from aof2.engine.spark.pipelines.workspace import beside, marker_of
from tests.spark.pipelines import numbers, small_files, until_ended
from tests.spark.support import Stream, lines, patch

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say

EVERY_STEP = (*workspace.CRASH_POINTS, *compact.CRASH_POINTS)
BEFORE_PUBLISHED = workspace.CRASH_POINTS[: workspace.CRASH_POINTS.index("pipeline.published")]


@pytest.fixture(autouse=True)
def no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below tmp_path is a disk's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOF2_CONF", raising=False)


# -- a stream


def stream_run(spark: Any, stream: Stream, target: Path, env: Env | None = None, **more: Any) -> Summary:
    arguments = compact.Arguments(source=str(stream.path), target=str(target), **more)
    return compact.run(spark, arguments, env=env)


def in_target(spark: Any, target: Path) -> list[bytes]:
    rows = spark.read.parquet(str(target)).select("offset", "payload").collect()
    return [bytes(row.payload) for row in sorted(rows, key=lambda row: row.offset)]


def test_each_run_brings_what_was_sealed_since(spark: Any, stream: Stream, tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = stream_run(spark, stream, target).report
    assert (first["rows"], first["files_before"]) == (len(stream.rows), 3)
    again = stream_run(spark, stream, target).report
    assert (again["rows"], again["result"]) == (0, "")
    end = stream.end
    stream.seal(lines(50, first=900))
    assert stream_run(spark, stream, target).report["rows"] == 50
    assert {path.name for path in target.iterdir()} == {"run=0", f"run={end}"}
    assert in_target(spark, target) == [row.payload for row in stream.rows]
    row = spark.read.parquet(str(target)).where("ext_id = -1").collect()[0]
    assert (row.flags, int(row.timestamp.timestamp() * 1000)) == (3, stream.rows[502].timestamp_ms)


def test_json_in_partitions(spark: Any, tmp_path: Path) -> None:
    stream, target = Stream(tmp_path / "clicks"), tmp_path / "out"
    for first in range(0, 1000, 100):
        stream.seal(lines(100, first=first))
    layout = Layout(partition_by=("hour=hour(timestamp)", "third=record.n % 3"))
    done = stream_run(spark, stream, target, schema="n bigint, text string", layout=layout).report
    assert (done["rows"], done["files_before"]) == (1000, 10)
    found = spark.read.parquet(str(target))
    assert set(found.columns) == {"n", "text", "hour", "third", "run"}
    assert numbers(spark, target) == list(range(1000))
    assert found.where("third <> n % 3").count() == 0


def test_records_that_are_no_json_end_it(spark: Any, stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"(?i)malformed"):
        stream_run(spark, stream, tmp_path / "out", schema="n bigint")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_compact.aof2"]


@pytest.mark.parametrize("framing", ["line", "record"])  # read as files of lines, and record by record
def test_damage_ends_it(spark: Any, tmp_path: Path, framing: str) -> None:
    stream, conf = Stream(tmp_path / "events" / "clicks"), tmp_path / "a.conf"
    conf.write_text(
        f'[volume]\nmountpoint = "{tmp_path}"\nstate_dir = "/none"\n'
        f'[tenants.events]\nkind = "append"\nframing = "{framing}"\n'
    )
    stream.seal(lines(100))
    more = {"schema": "n bigint, text string", "conf": str(conf), "into": "parquet"}
    assert stream_run(spark, stream, tmp_path / "out", **more).report["rows"] == 100
    stream.seal(lines(100, first=100))
    patch(stream.payload(stream.rows[100].offset), 4000, ord("n") ^ ord("m"))
    with pytest.raises(Exception, match="is damaged"):
        stream_run(spark, stream, tmp_path / "out", **more)
    assert numbers(spark, tmp_path / "out") == list(range(100))


def test_a_stream_that_lost_records_before_they_were_compacted(spark: Any, stream: Stream, tmp_path: Path) -> None:
    target = tmp_path / "out"
    stream_run(spark, stream, target)
    lost = stream.seal(lines(30, first=2000))
    stream.seal(lines(20, first=3000))
    stream.payload(lost[0].offset).unlink()
    stream.index(lost[0].segment_id).unlink()
    with pytest.raises(PipelineError, match="went before they were compacted; --skip-gap"):
        stream_run(spark, stream, target)
    done = stream_run(spark, stream, target, skip_gap=True)
    assert done.report["rows"] == 20
    assert "went before" in done.complaints[0]


@pytest.mark.parametrize("point", workspace.CRASH_POINTS)
def test_a_run_over_a_stream_that_was_ended(spark: Any, stream: Stream, tmp_path: Path, point: str) -> None:
    target = tmp_path / "out"
    until_ended(lambda env: stream_run(spark, stream, target, env), point)
    stream.seal(lines(10, first=700))
    while stream_run(spark, stream, target).report["rows"]:
        pass
    assert in_target(spark, target) == [row.payload for row in stream.rows]
    assert not (target / "_compact.aof2").exists()


def test_bad_targets(spark: Any, stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="not compacted in place"):
        compact.run(spark, compact.Arguments(source=str(stream.path)))
    with pytest.raises(PipelineError, match="no such directory"):
        compact.run(spark, compact.Arguments(source=str(tmp_path / "nothing")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(PipelineError, match="of no run of compact"):
        stream_run(spark, stream, tmp_path / "full")
    with pytest.raises(PipelineError, match="no such column"):
        stream_run(spark, stream, tmp_path / "out", layout=Layout(partition_by=("day",)))


# -- files


def files_run(spark: Any, source: Path, target: Path | str = "", env: Env | None = None, **more: Any) -> Summary:
    return compact.run(spark, compact.Arguments(source=str(source), target=str(target), **more), env=env)


def test_beside(spark: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "small", tmp_path / "large"
    written = small_files(source, 20, 10, where="day=1") + small_files(source, 20, 10, first=200, where="day=2")
    done = files_run(spark, source, target).report
    assert (done["rows"], done["files_before"], done["files_after"]) == (400, 40, 2)
    assert numbers(spark, target) == written == numbers(spark, source)
    assert spark.read.parquet(str(target)).where("day = 2").count() == 200
    small_files(source, 1, 10, first=400, where="day=2")
    again = files_run(spark, source, target, remove_sources=True)
    assert again.report["removed"] == 40
    assert "1 file(s) came since" in again.complaints[0]
    assert numbers(spark, source) == list(range(400, 410))
    with pytest.raises(PipelineError, match="by other options"):
        files_run(spark, source, target, select=["n"])
    assert not beside(target).exists()


def test_in_place(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "small"
    written = small_files(source, 30, 10)
    with pytest.raises(PipelineError, match="add --remove-sources"):
        files_run(spark, source)
    done = files_run(spark, source, remove_sources=True).report
    assert (done["removed"], done["rows"]) == (30, 300)
    assert done["files_after"] < 5
    assert numbers(spark, source) == written
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("target", ["", "large"])
@pytest.mark.parametrize("point", EVERY_STEP)
def test_a_run_over_files_that_was_ended(spark: Any, tmp_path: Path, point: str, target: str) -> None:
    source = tmp_path / "small"
    written = small_files(source, 4, 10)
    into = tmp_path / target if target else ""
    until_ended(lambda env: files_run(spark, source, into, env, remove_sources=True), point)
    if not target:
        assert numbers(spark, source) == written
    files_run(spark, source, into, remove_sources=True)
    assert numbers(spark, into or source) == written
    assert marker_of(Path(into or source)) is not None
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"small", "large"} if target else {"small"})


class Meddling(Env):
    """Something happens just before the result comes into place."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self._meddle = meddle

    def failpoint(self, name: str) -> None:
        if name == "pipeline.checked":
            self._meddle()


def test_files_that_come_and_change_meanwhile(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "small"
    written = small_files(source, 4, 10)
    env = Meddling(lambda: written.extend(small_files(source, 1, 10, first=1000)))
    done = files_run(spark, source, env=env, remove_sources=True)
    assert "1 file(s) came meanwhile" in done.complaints[0]
    assert numbers(spark, source) == written
    env = Meddling(lambda: next(source.glob("small-1000*")).touch())
    with pytest.raises(PipelineError, match="changed while it was compacted; run it again"):
        files_run(spark, source, env=env, remove_sources=True)
    assert numbers(spark, source) == written
    files_run(spark, source, remove_sources=True)
    assert numbers(spark, source) == written


def test_directories_that_are_no_such(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "other"
    source.mkdir()
    with pytest.raises(PipelineError, match="no file of Parquet in it, and no stream"):
        files_run(spark, source, tmp_path / "out")
    (source / "readme.txt").touch()
    with pytest.raises(PipelineError, match=r"readme\.txt: not a file of Parquet"):
        files_run(spark, source, tmp_path / "out")
    (source / "_delta_log").mkdir()
    with pytest.raises(PipelineError, match="its own table format"):
        files_run(spark, source, tmp_path / "out")
    with pytest.raises(PipelineError, match="files become records by `aof2 spark ingest`"):
        files_run(spark, source, tmp_path / "out", into="records")
