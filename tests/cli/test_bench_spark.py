"""`aof2 bench spark`: its loops, how it is judged, and a tiny run of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aof2.fs.bench import appendloops, work
from tests.cli.logs import objects, run
from tests.support import LONG

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
needs_spark = pytest.mark.skipif(
    not shutil.which("java"), reason="there is no Java: apt-get install default-jre-headless"
)


def looped(*arguments: object, script: str = appendloops.__file__) -> dict[str, float]:
    command = [sys.executable, script, *(str(a) for a in arguments)]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


# -- the loops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 256, 272])
def test_a_line_is_json_of_its_size(size: int) -> None:
    found = [appendloops.line(n, size) for n in (0, 1, 99, 10**7)]
    assert {len(line) for line in found} == {size}
    assert [json.loads(line)["n"] for line in found] == [0, 1, 99, 10**7]
    assert len({json.loads(line)["text"] for line in found}) == 4


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    answer = looped("lines", path, 1000 * 100, 100, 4096, 7, 1)
    assert (answer["bytes"], answer["count"]) == (100_000, 1000)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 1000
    assert json.loads(lines[-1])["n"] >= 7


def test_processes_append_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    answer = looped("by_processes", path, 4, 1000, 256)
    assert answer["count"] == 1000
    assert {len(line) for line in path.read_bytes().splitlines()} == {255}
    assert len(path.read_bytes()) == 256_000


def test_what_is_scanned(tmp_path: Path) -> None:
    answer = looped("split_files", tmp_path / "d", 272 * 100, 272, 4, 1)
    lines = [line for path in sorted(tmp_path.glob("d/*.jsonl")) for line in path.read_bytes().splitlines()]
    assert answer["count"] == len(lines) == len({json.loads(line)["n"] for line in lines}) == 100


def test_a_script_without_its_task_says_so() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        looped("nothing", script=work.__file__)


# -- command line and runs ---------------------------------------------------------------------------------------


def test_usage_of_pipelines() -> None:
    result = run("bench", "pipelines", "--only", "two")
    assert result.exit_code == 2
    assert "two: choose from compact" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "two"], "two: choose from hot, written"), (["--size", "10"], "whole MiB"), (["--rows", "1"], "1000")],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = run("bench", "spark", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@needs_root
@needs_spark
def test_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = () if LONG else ("--only", "hot,source,ingest")
    result = run("bench", "spark", "--quick", "--size", "2MiB", "--rows", "2000", *rows, "--json")
    assert result.exit_code == 0, result.output
    found = objects(result)
    for row in found:
        assert row["value"] is not None, str(row)
        assert not row["note"], str(row)
    whats = {row["what"] for row in found}
    scans = {f"{name} scan, hot" for name in ("JSON", "text", "Parquet")}
    assert scans | {"append by 1 MiB"} <= whats
    if LONG:
        scans = {f"{name} scan, cold" for name in ("JSON", "Parquet", "Parquet in 400 files")}
        assert scans | {"Parquet write", "Parquet write, 400 files"} <= whats
        again = {row["what"]: row["value"] for row in found if "once more" in row["what"]}
        assert len(again) == 3
        assert max(again.values()) < 65_536, str(again)
    assert {row["baseline"] for row in found if row["what"].startswith("format")} == {
        "spark.read.json",
        "ready batches",
    }
    assert list(tmp_path.iterdir()) == []


@needs_root
@needs_spark
def test_tiny_run_of_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("bench", "pipelines", "--quick", "--size", "1MiB", "--only", "compact", "--json")
    assert result.exit_code == 0, result.output
    found = objects(result)
    assert [row["baseline"].split(", ")[1] for row in found] == ["compared as well", "unchecked"]
    assert [row["note"] for row in found] == ["", ""]
    assert all(row["ratio"] for row in found)
    assert list(tmp_path.iterdir()) == []
