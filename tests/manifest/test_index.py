"""What records mean: the fold, and the shadow that must agree with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.index import ManifestIndex, Progress, Residency
from aof2.engine.manifest.shadow import ShadowState, as_json
from aof2.engine.manifest.writer import ManifestLogWriter
from tests.manifest.replay import replay

from .helpers import PAYLOADS, small


def fold(*records: p.Payload, segment_id: int = 1) -> ManifestIndex:
    index = ManifestIndex()
    for stamp, payload in enumerate(records):
        kind, data = p.encode(payload)
        index.apply(kind, segment_id, stamp, data)
    return index


def test_the_life_of_a_segment() -> None:
    index = fold(p.SegmentOpened(100, 1))
    entry = index.entries[1]
    assert (entry.opened, entry.base_offset, entry.residency) == (True, 100, Residency.TIER0)
    index = fold(
        p.SegmentOpened(100, 1),
        p.SealSegment(4096, 0xABC, 7, 12, 1),
        p.CompressionStarted(3),
        p.CompressionDone(1000, 2),
        p.UploadStarted("k"),
        p.UploadDone("k", "e"),
        p.LocalEvicted(4096),
    )
    entry = index.entries[1]
    assert (entry.sealed, entry.durable_bytes, entry.segment_crc64) == (True, 4096, 0xABC)
    assert (entry.ext_id, entry.coordinator_watermark, entry.flush_failure) == (7, 12, True)
    assert (entry.key, entry.etag, entry.upload) == ("k", "e", Progress.DONE)
    assert entry.residency == Residency.TIER1 | Residency.TIER2
    assert entry.reclaimed_bytes == 4096
    assert index.pending_uploads == {}


def test_failures_stay_pending_with_their_reason() -> None:
    index = fold(p.SegmentOpened(0, 1), p.UploadStarted("k"), p.UploadFailed("k", 3))
    assert index.pending_uploads == {(1, "k"): 3}
    assert (index.entries[1].upload, index.entries[1].reason_code) == (Progress.FAILED, 3)


def test_a_missing_remote_object_needs_repair_until_it_is_there_again() -> None:
    failed = [p.SegmentOpened(0, 1), p.UploadDone("k", "e"), p.HydrationStarted(2), p.HydrationFailed(4)]
    assert fold(*failed).needs_repair == [1]
    assert fold(*failed[:-1], p.HydrationFailed(0)).needs_repair == []
    assert fold(*failed, p.UploadDone("k2", "e")).needs_repair == []
    assert fold(*failed, p.HydrationDone(9)).needs_repair == []


def test_deletes_are_pending_until_done_and_clear_only_their_own_key() -> None:
    index = fold(p.SegmentOpened(0, 1), p.UploadDone("new", "e"), p.Tier2DeleteQueued("old"))
    assert index.pending_deletes == {(1, "old")}
    index = fold(p.SegmentOpened(0, 1), p.UploadDone("new", "e"), p.Tier2DeleteQueued("old"), p.Tier2Deleted("old"))
    assert (index.pending_deletes, index.entries[1].key) == (set(), "new")
    index = fold(p.SegmentOpened(0, 1), p.UploadDone("k", "e"), p.Tier2DeleteQueued("k"), p.Tier2Deleted("k"))
    assert (index.entries[1].key, index.entries[1].residency) == ("", Residency.TIER0)


def test_records_of_a_segment_may_come_before_it_is_opened() -> None:
    assert not fold(p.UploadDone("k", "e")).entries[1].opened
    index = fold(p.UploadDone("k", "e"), p.SegmentOpened(5, 1))
    assert index.entries[1].opened
    assert index.entries[1].key == "k"


def test_a_new_epoch_starts_over_but_remembers_the_remote_object() -> None:
    index = fold(p.SegmentOpened(0, 1), p.SealSegment(9, 9), p.UploadDone("k", "e"), p.SegmentOpened(0, 2))
    entry = index.entries[1]
    assert (entry.sealed, entry.epoch, entry.key) == (False, 2, "k")
    assert fold(p.SegmentOpened(0, 2), p.SealSegment(9, 9), p.SegmentOpened(0, 2)).entries[1].sealed


def test_the_logs_own_objects_are_not_segments() -> None:
    key = "manifest/1/0.mlog"
    index = fold(p.UploadStarted(key), p.UploadFailed(key, 0), segment_id=LOG_SEGMENT_ID)
    assert (index.entries, index.pending_uploads) == ({}, {(LOG_SEGMENT_ID, key): 0})
    index = fold(p.UploadStarted(key), p.UploadDone(key, "e"), segment_id=LOG_SEGMENT_ID)
    assert index.log_objects == {key: "e"}
    index = fold(p.UploadDone(key, "e"), p.Tier2DeleteQueued(key), p.Tier2Deleted(key), segment_id=LOG_SEGMENT_ID)
    assert (index.log_objects, index.pending_deletes) == ({}, set())


def divergence(shadow: ShadowState, index: ManifestIndex) -> list[int]:
    """Segments on which the JSON and the log disagree."""
    ours = {int(segment_id): s for segment_id, s in shadow.segments.items()}
    theirs = {segment_id: as_json(entry) for segment_id, entry in index.entries.items()}
    return sorted(s for s in ours.keys() | theirs.keys() if ours.get(s) != theirs.get(s))


@given(st.lists(st.tuples(PAYLOADS, st.integers(0, 3)), max_size=60))
def test_the_shadow_agrees_whatever_is_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[p.Payload, int]]
) -> None:
    directory = tmp_path_factory.mktemp("log")
    shadow = ShadowState()
    with ManifestLogWriter.open(Env(), directory, small(durable=False)) as w:
        for payload, segment_id in rows:
            w.append(payload, segment_id=segment_id)
            kind, data = p.encode(payload)
            shadow.observe(kind, segment_id, data)
    assert divergence(shadow, replay(directory)) == []
    shadow.save(Env(), directory)
    assert ShadowState.load(directory).segments == shadow.segments


def test_the_shadow_tells_what_the_log_missed(tmp_path: Path) -> None:
    shadow = ShadowState()
    opened = p.SegmentOpened(0, 1)
    with ManifestLogWriter.open(Env(), tmp_path, small()) as w:
        w.append(opened, segment_id=1)
        w.append(opened, segment_id=3)
    for segment_id, record in ((1, opened), (3, opened), (1, p.LocalEvicted(5)), (2, opened)):
        kind, data = p.encode(record)
        shadow.observe(kind, segment_id, data)
    assert divergence(shadow, replay(tmp_path)) == [1, 2]


def test_a_damaged_shadow_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "shadow.json").write_bytes(b"{nope")
    with pytest.raises(CorruptError):
        ShadowState.load(tmp_path)
    assert ShadowState.load(tmp_path / "nothing").segments == {}
