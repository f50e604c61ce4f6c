"""`aof2 bench formats` runs and has its rows. Ratios are for people to read: a busy machine must not fail a test."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from aof2.fs.bench import formats
from aof2.fs.bench.measure import Measurement, best, compared
from aof2.fs.cli import bench
from tests.cli.logs import objects, run

ROWS = [
    ("crc64 of 8 MiB", "awscrt", 0.8),
    ("crc64 of 1 MiB", "awscrt", 0.8),
    ("crc32 of 8 MiB", "zlib", 3),
    ("segment scan of 8 MiB, 256-byte payloads", "crc64 alone", 0.25),
    ("segment scan of 8 MiB, 256-byte payloads", "Python reference", 50),
    ("segment scan of 8 MiB, 256-byte payloads", "Python loop, native checksums", None),
    ("manifest append, a batch of columns, built and appended", "pure Python, a struct at a time", 20),
    ("manifest append, a mixed batch, built and appended", "pure Python, a struct at a time", None),
    ("manifest append, a batch already built", "pure Python, a struct at a time", None),
    ("manifest append, one at a time", "pure Python, a struct at a time", None),
    ("manifest replay, every checksum", "", None),
    ("manifest replay into the index", "", None),
    ("group commit, 64 threads waiting for durable commits", "one each", 4),
    ("group commit, durable commits", "", None),
]


def test_quick_run_has_every_row_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("bench", "formats", "--quick", "--json")
    assert result.exit_code == 0, result.output
    rows = objects(result)
    assert [(r["what"], r["baseline"], r["target"]) for r in rows] == ROWS
    for row in rows:
        assert row["value"] > 0
        assert (row["ok"] is None) == (row["target"] is None)
    assert list(tmp_path.iterdir()) == []


def test_awscrt_missing_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    row = formats.checksums(formats.QUICK)[0]
    assert (row.note, row.ok, row.ratio) == ("awscrt not installed", None, None)
    assert row.value


@pytest.mark.parametrize(("check", "code"), [([], 0), (["--check"], 1)])
def test_a_miss_is_shown_and_fails_only_a_check(monkeypatch: pytest.MonkeyPatch, check: list[str], code: int) -> None:
    made = [compared("a", "B/s", 1, "b", 2, at_least=0.8), Measurement(what="c", unit="records/s", value=12_345_678)]
    monkeypatch.setattr(bench, "run", lambda **_: made)
    result = run("bench", "formats", *check)
    assert result.exit_code == code
    header, miss, info = (line.split("\t") for line in result.stdout.splitlines())
    assert header == list(bench.COLUMNS)
    assert miss == ["a", "1 B/s", "b 2 B/s", "0.50", "at least 0.8", "miss", "-"]
    assert info == ["c", "12.3 M records/s", "-", "-", "-", "info", "-"]
    assert json.loads(run("bench", "formats", "--json").stdout.splitlines()[0])["ok"] is False


def test_best_takes_turns() -> None:
    order: list[str] = []
    seconds = iter([3.0, 9.0, 2.0, 8.0])

    def side(name: str):
        def once() -> float:
            order.append(name)
            return next(seconds)

        return once

    assert best([side("a"), side("b")], 2) == [2.0, 8.0]
    assert order == ["a", "b", "a", "b"]


def test_engine_quick_run_has_every_row_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("bench", "engine", "--quick", "--json")
    assert result.exit_code == 0, result.output
    rows = objects(result)
    assert [(r["what"], r["baseline"], r["target"]) for r in rows] == [
        ("anonymous memory during a pass of 128 MiB", "page_cache_bytes + 300 MiB", 1),
        ("hydrate 64 MiB from S3, verified, to disk", "boto3, parallel ranges", 0.9),
        ("upload 64 MiB to S3, no compression", "boto3, multipart", 0.9),
        ("resident random 1 MiB reads", "pread", 0.7),
        ("catalog operations under group commit, durable", "", 10_000),
        ("reopening with 2,000 chunks", "with 100", 3),
    ]
    assert all(row["value"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
