"""`aof2 spark verify`: executors prove what is in the remote; the findings are the local verifier's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Exit
from aof2.engine.verify.run import verify
from tests.verify.faults import FAULTS, copied, make_volume, told, wrong


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_volume(tmp_path_factory.mktemp("faults"))


def on_spark(spark: Any, settings: Settings) -> Any:
    from aof2.engine.spark.pipelines import verify as pipeline
    from aof2.engine.spark.pipelines.seam import silent

    return pipeline.run(spark, pipeline.Arguments(settings), silent)


def test_a_whole_volume(spark: Any, template: Settings) -> None:
    local, summary = verify(template, deep_remote=True), on_spark(spark, template)
    assert summary.exit_code == Exit.CLEAN
    assert summary.report["clean"]
    assert (summary.report["blobs"], summary.report["remote_bytes"]) == (local.blobs, local.remote_bytes)
    assert dict(summary.facts)["verdict"] == "clean"


def test_faults_of_every_kind_at_once(spark: Any, template: Settings, tmp_path: Path) -> None:
    """Those that leave the logs readable to their end, so that every one of them can be told."""
    settings = copied(template, tmp_path)
    rng = random.Random(11)
    kinds = ("wrong rows", "blob", "pack member", "snapshot", "bundle", "audit", "extra object")
    made = [FAULTS[kind](settings, rng) for kind in kinds]
    local, summary = verify(settings, deep_remote=True), on_spark(spark, settings)
    assert summary.exit_code == local.exit_code == Exit.LEFT
    found = {(f["kind"], f.get("tenant", ""), f.get("key", "")) for f in summary.report["findings"]} - {
        (f.kind, f.tenant, f.key) for f in local.findings if f not in wrong(local)
    }
    assert {one for one in found if one[2] or one[0] in ("object", "counter")} >= told(local)
    for fault in made:
        assert any(kind == fault.kind and (not fault.key or key == fault.key) for kind, _, key in found), fault
    assert len(summary.complaints) == len(summary.report["findings"])


def test_what_is_cut_into_tasks(template: Settings) -> None:
    from aof2.engine.catalog.rows import BlobRow
    from aof2.engine.spark.pipelines import verify as pipeline
    from aof2.engine.verify.pieces import BlobPiece

    wave: list[Any] = [BlobPiece(1, BlobRow(f"k{n:03}", 10 << 20, 0, 1), b"", None, 0) for n in range(100)]
    tasks = list(pipeline._tasks(wave, 8))
    assert [at for task in tasks for at, _ in task] == list(range(100))
    assert 8 <= len(tasks) <= 20
    assert max(len(task) for task in tasks) * (10 << 20) <= pipeline.TASK_BYTES + (10 << 20)
    assert len(list(pipeline._tasks(wave[:1], 8))) == 1
