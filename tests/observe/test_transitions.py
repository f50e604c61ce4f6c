"""Tier transitions as log lines: one a segment, and one for all where a commit moves many."""

from __future__ import annotations

import logging

import pytest

from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition
from aof2.engine.observe import transitions

AT = LogPosition(3, 64, 100)


def told(records: RecordBatch, caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    with caplog.at_level(logging.INFO, transitions.log.name):
        transitions.log_transitions(7, records, AT)
    return [record.aof2_fields for record in caplog.records]  # type: ignore[attr-defined]


def test_a_few_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    records = RecordBatch()
    for i in range(transitions.LINES_MAX):
        records.add(p.UploadStarted("k"), segment_id=i)
        records.add(p.UploadDone("k", "e"), segment_id=i, logical_offset=10 * i)
    records.add(p.UploadDone("log", "e"), segment_id=LOG_SEGMENT_ID)
    lines = told(records, caplog)
    assert [(x["segment_id"], x["offset"]) for x in lines] == [(i, 10 * i) for i in range(transitions.LINES_MAX)]
    assert all("segments" not in x and (x["chunk_index"], x["chunk_offset"]) == (3, 64) for x in lines)


def test_many_are_one(caplog: pytest.LogCaptureFixture) -> None:
    records = RecordBatch()
    records.add_of_each(p.UploadDone("k", "e"), range(5, 105), [3] * 100)
    records.add(p.LocalEvicted(1), segment_id=9, logical_offset=1)
    many, one = told(records, caplog)
    assert (many["segments"], many["segment_id"], many["last_segment_id"], many["offset"]) == (100, 5, 104, 300)
    assert (many["action"], one["action"], one["segment_id"]) == ("UploadDone", "LocalEvicted", 9)
