"""`aof2 bench small`: its loops, how it is judged, and a tiny run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aof2.fs.bench import smallrows, work
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.seaweed import parse_requests
from aof2.fs.bench.verdict import BEST_PEER, Outcome, judge
from tests.cli.logs import objects, run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")


# -- the loops ---------------------------------------------------------------------------------------------------


def looped(*arguments: object) -> dict[str, float]:
    command = [sys.executable, work.__file__, *(str(a) for a in arguments)]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


@pytest.mark.parametrize("readers", [1, 8])
@pytest.mark.parametrize("shuffled", [0, 1])
def test_what_was_filled_is_drained(tmp_path: Path, readers: int, shuffled: int) -> None:
    looped("fill", tmp_path / "d", 30, 8, 4096, 5, 60.0)
    answer = looped("drain", tmp_path / "d", 30, readers, 4096, 5, 30, shuffled, 60.0)
    assert answer["count"] == 30
    assert answer["seconds"] > 0


def test_wrong_bytes_are_seen(tmp_path: Path) -> None:
    looped("fill", tmp_path / "d", 3, 1, 4096, 5, 60.0)
    (tmp_path / "d/000001").write_bytes(bytes(4096))
    with pytest.raises(subprocess.CalledProcessError) as e:
        looped("drain", tmp_path / "d", 3, 8, 4096, 5, 3, 0, 60.0)
    assert b"000001: wrong bytes" in e.value.stderr


def test_large_files_are_written_at_once(tmp_path: Path) -> None:
    looped("writes", tmp_path / "d", 3, (1 << 20) + 5, 7)
    contents = {path.read_bytes() for path in tmp_path.glob("d/*")}
    assert [len(content) for content in contents] == [(1 << 20) + 5] * 3


# -- verdicts ----------------------------------------------------------------------------------------------------


def test_requests_are_those_of_the_bucket_whatever_they_asked_for() -> None:
    text = (
        "# TYPE SeaweedFS_s3_request_total counter\n"
        'SeaweedFS_s3_request_total{bucket="aof2",code="200",type="PUT"} 7\n'
        'SeaweedFS_s3_request_total{bucket="aof2",code="404",type="HEAD"} 2\n'
        'SeaweedFS_s3_request_total{bucket="aof2-x",code="200",type="PUT"} 50\n'
    )
    assert [parse_requests(text, bucket) for bucket in ("aof2", "aof2-x", "s3fs")] == [9, 50, 0]


def test_rclone_stands_for_geesefs_where_that_is_not_there() -> None:
    found = Outcome({"aof2": 50.0, "rclone": 7.0, "weed": 6.0})
    for here, target in [(None, 8.0), (object(), 3.0)]:
        f: Any = SimpleNamespace(race=SimpleNamespace(named=lambda name, here=here: here))
        targets = smallrows._targets(f, 8)
        rows = judge("w", "files/s", found, subject="aof2", peers=["rclone", "weed"], targets=targets)
        assert [row.target for row in rows] == [target, None]
    assert smallrows._targets(f, 1) == {BEST_PEER: 2.0}


def judged(threads: int, outcome: Outcome, sent: smallrows.Sent) -> list[Measurement]:
    race: Any = SimpleNamespace(named=lambda name: None)
    disk: Any = SimpleNamespace(name="ext4")
    bare: Any = None
    plan = smallrows.SmallPlan(files=10)
    f = smallrows.SmallField(plan=plan, race=race, disk=disk, aof2=None, peers=[], bare=bare, tree=None)
    return smallrows._judged(f, threads, outcome, sent)


def test_the_disk_is_beside_creation_only() -> None:
    outcome = Outcome({"ext4": 90.0, "aof2": 40.0, "rclone": 4.0}, {}, {"aof2": 250.0, "rclone": 5000.0})
    sent = smallrows.Sent({"ext4": [90.0], "aof2": [70.0, 90.0], "rclone": [9.0]}, {"aof2": [19.0], "rclone": [1001.0]})
    rows = [(m.what.partition("threads, ")[2], m.baseline, m.ok) for m in judged(8, outcome, sent)]
    assert rows == [
        ("to durable", "rclone", True),
        ("to durable", "their creation", True),
        ("created", "ext4", None),
        ("created", "rclone", None),
        ("S3 requests", "", True),
        ("S3 requests, by rclone", "", None),
        ("processor time", "", True),
        ("processor time, by rclone", "", None),
    ]


def test_a_mount_that_failed_missed_its_targets() -> None:
    outcome = Outcome({"ext4": 90.0, "rclone": 4.0}, {"aof2": "broke"})
    rows = judged(8, outcome, smallrows.Sent({"ext4": [90.0], "rclone": [9.0]}))
    assert [(m.what.partition("threads, ")[2], m.ok) for m in rows if m.ok is not None] == [
        ("to durable", False),
        ("processor time", False),
    ]


# -- command line and runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "bindfs"], "bindfs: choose from rclone, s3fs, weed"),
        (["--only", "two"], "two: choose from eight, one, cold"),
        (["--size", "10"], "whole MiB"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = run("bench", "small", *arguments)
    assert result.exit_code == 2
    assert message in result.output


TINY = ("bench", "small", "--quick", "--size", "2MiB", "--files", "30", "--json")


@needs_root
def test_tiny_run_with_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*TINY, "--peers", "none")
    assert result.exit_code == 0, result.output
    found = objects(result)
    for row in found:
        assert row["value"], str(row)
        assert not row["note"], str(row)
    whats = {row["what"] for row in found}
    assert "git clone of 200 files, to durable" in whats
    assert {what for what in whats if what.startswith("cold")} == {
        f"cold read of 30 files of 4 KiB in {order} order, {readers}"
        for order in ("directory", "random")
        for readers in ("1 reader", "8 readers")
    }
    assert {row["target"] for row in found} == {None, 0.3, 0.5, 0.95, 2, 3, 20}
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_tiny_run_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")  # a geesefs elsewhere would take part
    result = run(*TINY, "--peers", "rclone", "--only", "eight,cold", "--without-aof2")
    assert result.exit_code == 0, result.output
    beside = {row["what"]: row for row in objects(result) if row["baseline"].startswith("rclone")}
    assert len(beside) == 6
    assert all(row["baseline_value"] and not row["note"] for row in beside.values()), str(beside)
    assert beside["30 files of 4 KiB, 8 threads, to durable"]["target"] == 8
    requests = [row for row in objects(result) if row["what"].endswith("S3 requests, by rclone")]
    assert requests[0]["value"] >= 1000
