"""An event of a schema that this version does not know is skipped and counted; it is no damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.manifest.check import check
from aof2.engine.manifest.examine import Kind
from aof2.engine.manifest.payloads import CustomEvent, SegmentOpened
from aof2.engine.manifest.writer import ManifestLogWriter
from tests.manifest.replay import replay


@pytest.mark.parametrize("blob", [b"", b"short", bytes(16), b"\xff" * 40])
def test_it_is_skipped_and_counted(tmp_path: Path, blob: bytes) -> None:
    with ManifestLogWriter.open(Env(), tmp_path) as log:
        log.append(SegmentOpened(0, 1), segment_id=3)
        log.append(CustomEvent(4711, blob), segment_id=0)
        log.append(SegmentOpened(0, 1), segment_id=4)
        log.commit()
        log.rotate()
    index = replay(tmp_path)
    assert sorted(index.entries) == [3, 4]
    assert index.unknown_schemas == {4711: 1}
    report = check(tmp_path)
    assert report.clean
    assert [f.kind for f in report.notes] == [Kind.UNKNOWN_EVENT]
    assert report.unknown_schemas == {4711: 1}
