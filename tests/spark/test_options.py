"""Options and filters: what is allowed, and what each comes to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.spark.filters import Bounds, Span
from aof2.engine.spark.options import OFFSET_MAX, Mode, read_options


def test_defaults_and_paths() -> None:
    plain = read_options({"path": "/aof2/events/clicks/"})
    assert plain.paths == ("/aof2/events/clicks",)
    assert (plain.mode, plain.verify, plain.fail_on_data_loss) == (Mode.FAILFAST, False, True)
    assert read_options({"path": "file:///a%20b/c"}).paths == ("/a b/c",)
    assert read_options({"paths": '["/a", "/b", "/a"]'}).paths == ("/a", "/b")


def test_patterns(tmp_path: Path) -> None:
    for name in ("b", "a", "other"):
        (tmp_path / name).mkdir()
    assert read_options({"path": f"{tmp_path}/[ab]"}).paths == (f"{tmp_path}/a", f"{tmp_path}/b")
    with pytest.raises(ValueError, match="no stream matches"):
        read_options({"path": f"{tmp_path}/x*"})


def test_each_option() -> None:
    given = {
        "MODE": "dropmalformed", "columnNameOfCorruptRecord": "bad", "verify": "TRUE", "pushdown": "true",
        "partitionBytes": "1MiB",
        "startingOffset": "7", "endingOffset": "9", "startingTimestamp": "1970-01-01T00:00:01+00:00",
        "endingTimestamp": "5000", "startingOffsets": "Latest", "failOnDataLoss": "false",
        "maxRecordsPerTrigger": "10", "maxBytesPerTrigger": "4096",
    }  # fmt: skip
    found = read_options({"path": "/s", **given})
    assert (found.mode, found.corrupt_column, found.verify, found.pushdown) == (Mode.DROPMALFORMED, "bad", True, True)
    assert (found.partition_bytes, found.max_records, found.max_bytes) == (1 << 20, 10, 4096)
    assert Bounds.of(found) == Bounds(Span(7, 9), Span(1000, 5000))
    assert (found.starting_offsets, found.fail_on_data_loss) == ("latest", False)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("mode", "loose", "FAILFAST"),
        ("verify", "maybe", "true or false"),
        ("partitionBytes", "0", "1 byte at least"),
        ("partitionBytes", "many", "a size"),
        ("startingOffset", "-1", "offset"),
        ("endingOffset", str(2**63), "offset"),
        ("startingTimestamp", "yesterday", "milliseconds"),
        ("startingOffsets", "middle", "earliest"),
        ("maxRecordsPerTrigger", "0", "1 at least"),
        ("startingOffest", "5", "there is mode"),
        ("path", "s3://bucket/x", "mount"),
        ("path", "events/clicks", "whole path"),
        ("path", "", "no path"),
    ],
)
def test_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_options({"path": "/s", name: value})


def test_filters_narrow() -> None:
    source = pytest.importorskip("pyspark.sql.datasource", reason="the spark extra is not installed")

    def bounds(*filters: Any) -> Bounds:
        return Bounds().narrowed(filters)

    at = ("offset",)
    assert bounds(source.EqualTo(at, 5)).offsets == Span(5, 6)
    assert bounds(source.GreaterThan(at, 5), source.LessThan(at, 9)).offsets == Span(6, 9)
    assert bounds(source.GreaterThanOrEqual(at, 5), source.LessThanOrEqual(at, 9)).offsets == Span(5, 10)
    assert bounds(source.In(at, (9, 3, None, 5))).offsets == Span(3, 10)
    everything = Span(0, OFFSET_MAX)
    for other in (
        source.Not(source.EqualTo(at, 5)),
        source.IsNotNull(at),
        source.EqualTo(at, None),
        source.EqualTo(at, 1.5),
    ):
        assert bounds(other).offsets == everything
    assert bounds(source.EqualTo(("flags",), 5)) == Bounds()
    when, moment = ("timestamp",), datetime(1970, 1, 1, 0, 0, 1, 500, tzinfo=UTC)  # 1000.5 ms
    assert bounds(source.GreaterThan(when, moment)).times_ms.start == 1001
    assert bounds(source.GreaterThanOrEqual(when, moment)).times_ms.start == 1001
    assert bounds(source.LessThan(when, moment)).times_ms.end == 1001
    assert bounds(source.LessThanOrEqual(when, moment)).times_ms.end == 1001
    exact = datetime(1970, 1, 1, 2, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    assert bounds(source.EqualTo(when, exact)).times_ms == Span(1000, 1001)
    assert bounds(source.LessThan(when, exact)).times_ms.end == 1000
    assert bounds(source.GreaterThan(when, exact.replace(tzinfo=None))).times_ms == everything
