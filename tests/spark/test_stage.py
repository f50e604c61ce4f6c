"""Staging without Spark: what a task's batches become, and what is left of attempts that failed."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.segment.index import SegmentIndex

pa = pytest.importorskip("pyarrow", reason="the spark extra is not installed")
stage_module: Any = pytest.importorskip("aof2.engine.spark.stage")


def staged_records(folder: Path, batches: list[Any]) -> list[tuple[bytes, int, int]]:
    """Payload, ext_id and flags of every record; each is whole."""
    done = stage_module.stage(iter(batches), folder)
    found = []
    for payload_path, index_path in done.files:
        payload = Path(payload_path).read_bytes()
        index = SegmentIndex.decode(Path(index_path).read_bytes())
        assert index.check(payload, 0, 0, index.record_count) == index.record_count
        assert index.payload_bytes == len(payload)
        c = index.columns(0, index.record_count)
        found += [
            (payload[start : start + length], ext_id, flags)
            for start, length, ext_id, flags in zip(c.start, c.length, c.ext_id, c.flags, strict=True)
        ]
    assert done.records == len(found)
    return found


def test_batches_of_any_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "FILE_BYTES_MAX", 500)
    payloads = [os.urandom(n % 23) for n in range(100)]
    ids = [None if n % 7 == 0 else n - 50 for n in range(100)]
    whole = pa.record_batch(
        {
            "payload": pa.array(payloads, pa.binary()),
            "ext_id": pa.array(ids, pa.int64()),
            "flags": pa.array([n % 4 for n in range(100)], pa.int32()),
        }
    )
    cuts = [0, 3, 3, 50, 51, 100]
    found = staged_records(tmp_path, [whole.slice(a, b - a) for a, b in itertools.pairwise(cuts)])
    assert found == [(p, (i or 0) % 2**64, n % 4) for n, (p, i) in enumerate(zip(payloads, ids, strict=True))]
    assert len(list(tmp_path.glob("*.idx"))) > 1


def test_text_is_lines(tmp_path: Path) -> None:
    batch = pa.record_batch({"value": ["a", "", "drei €"]})
    found = staged_records(tmp_path, [batch, batch.slice(1, 1)])
    assert found == [(b"a\n", 0, 0), (b"\n", 0, 0), ("drei €\n".encode(), 0, 0), (b"\n", 0, 0)]


def test_a_task_without_rows_has_no_files(tmp_path: Path) -> None:
    assert stage_module.stage(iter([pa.record_batch({"value": pa.array([], pa.string())})]), tmp_path).files == []
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_fails_leaves_nothing(tmp_path: Path) -> None:
    good = pa.record_batch({"payload": [b"x"]})
    with pytest.raises(ValueError, match="null"):
        stage_module.stage(iter([good, pa.record_batch({"payload": [b"x", None]})]), tmp_path)
    with pytest.raises(ValueError, match="reserved bits"):
        stage_module.stage(iter([pa.record_batch({"payload": [b"x"], "flags": pa.array([4], pa.int32())})]), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        stage_module.stage(iter([good]), tmp_path / "over")


def test_what_is_old_is_swept(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    for name in ("old/a.idx", "new/b.idx"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "old" / "a.idx", (0, time.time() - 2 * stage_module.KEPT_S))
    stage_module.sweep(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["new", "new/b.idx"]
    stage_module.sweep(tmp_path / "absent")


def test_a_job_that_is_over_takes_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    stage_module.stage(iter([pa.record_batch({"payload": [b"x"]})]), folder)
    stage_module.remove_job(folder)
    stage_module.remove_job(folder)
    assert list(tmp_path.iterdir()) == []
