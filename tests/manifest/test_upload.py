"""Upload, retry, compaction and retention, against a remote kept in a dictionary (the interface, not S3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.env import Env
from aof2.engine.errors import TransientError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest import retention
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID, ChunkHeader, LogPosition, ManifestIntegrityError
from aof2.engine.manifest.reader import Stream, chunk_headers
from aof2.engine.manifest.upload import ChunkUploader, RetryPolicy, UploadGaveUpError
from aof2.engine.manifest.writer import ManifestLogWriter, SealedChunk
from tests.manifest.replay import replay, take_snapshot

from .helpers import small, written


class Bucket:
    """Objects and their metadata; fails as often as told, with the reason told."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, Mapping[str, str]] = {}
        self.failures: list[int] = []

    def _maybe_fail(self) -> None:
        if self.failures:
            raise TransientError("told to fail", reason_code=self.failures.pop(0))

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        self._maybe_fail()
        self.objects[key] = data
        self.metadata[key] = metadata or {}
        return f"etag-{len(data)}"

    def compose(self, key: str, sources: Sequence[str]) -> str:
        self._maybe_fail()
        self.objects[key] = b"".join(self.objects[s] for s in sources)
        return "etag-bundle"

    def delete(self, keys: Iterable[str]) -> None:
        (key,) = keys
        self._maybe_fail()
        self.objects.pop(key, None)


class Log:
    """A writer with an uploader on it, and the chunks sealed so far."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bucket = Bucket()
        self.writer = ManifestLogWriter.open(Env(seed=1), directory, small())
        self.slept: list[float] = []
        self.uploader = ChunkUploader(
            self.writer.env, 7, self.bucket, self._append, policy=RetryPolicy(attempts=3), sleep_s=self.slept.append
        )

    def _append(self, batch: RecordBatch) -> LogPosition:
        self.writer.append_batch(batch)
        return self.writer.commit()

    def seal(self, segment_id: int) -> SealedChunk:
        self.writer.append(p.SegmentOpened(0, 1), segment_id=segment_id)
        sealed = self.writer.rotate()
        assert sealed is not None
        return sealed


def kinds(directory: Path) -> list[tuple[int, str]]:
    return [
        (r.chunk_index, r.type)
        for r in Stream(directory).records()
        if r.segment_id == LOG_SEGMENT_ID and r.type_id != 15
    ]


def test_an_upload_is_told_in_the_next_chunk(tmp_path: Path) -> None:
    log = Log(tmp_path)
    sealed = log.seal(1)
    log.uploader.upload(sealed, snapshot_id=5)
    assert kinds(tmp_path) == [(1, "UploadStarted"), (1, "UploadDone")]
    key = "manifest/7/0.mlog"
    assert log.bucket.metadata[key] == {
        "chunk_crc64": f"{sealed.header.chunk_crc64:016x}",
        "base_record": "0",
        "record_count": "2",
        "snapshot_id": "5",
    }
    index = replay(tmp_path)
    assert index.log_objects == {key: f"etag-{len(log.bucket.objects[key])}"}
    assert index.pending_uploads == {}
    first = log.bucket.objects[key]
    log.uploader.upload(sealed)
    assert log.bucket.objects[key] == first  # the uploaded flag set meanwhile does not change what is put


def test_a_tail_that_was_not_cut_is_not_uploaded(tmp_path: Path) -> None:
    log = Log(tmp_path)
    sealed = log.seal(1)
    sealed.path.chmod(0o600)
    with open(sealed.path, "r+b") as f:
        f.truncate(8192)  # the cut of the seal was not durable
    log.uploader.upload(sealed)
    assert len(log.bucket.objects["manifest/7/0.mlog"]) == sealed.header.committed_len


def test_failures_are_logged_and_retried_with_backoff(tmp_path: Path) -> None:
    log = Log(tmp_path)
    sealed = log.seal(1)
    log.bucket.failures = [0, 3]
    log.uploader.upload(sealed)
    told = [r.decoded() for r in Stream(tmp_path).records() if r.type_id == 7]
    assert told == [p.UploadFailed("manifest/7/0.mlog", 0), p.UploadFailed("manifest/7/0.mlog", 3)]
    assert kinds(tmp_path)[-1] == (1, "UploadDone")
    assert log.uploader.retries == 2
    assert len(log.slept) == 2
    assert 0.1 <= log.slept[0] <= 0.2 <= log.slept[1] <= 0.4


@pytest.mark.parametrize(("failures", "attempts"), [([3, 3, 3], 3), ([2], 1)])
def test_giving_up_leaves_the_upload_pending(tmp_path: Path, failures: list[int], attempts: int) -> None:
    log = Log(tmp_path)
    sealed = log.seal(1)
    log.bucket.failures = list(failures)
    with pytest.raises(UploadGaveUpError) as e:
        log.uploader.upload(sealed)
    assert e.value.reason_code == failures[-1]
    assert len([k for k in kinds(tmp_path) if k[1] == "UploadFailed"]) == attempts
    assert replay(tmp_path).pending_uploads == {(LOG_SEGMENT_ID, "manifest/7/0.mlog"): failures[-1]}
    log.uploader.upload(sealed)
    assert replay(tmp_path).pending_uploads == {}


def test_a_chunk_damaged_on_disk_is_not_uploaded(tmp_path: Path) -> None:
    log = Log(tmp_path)
    sealed = log.seal(1)
    data = bytearray(sealed.path.read_bytes())
    data[80] ^= 1
    sealed.path.chmod(0o600)
    sealed.path.write_bytes(data)
    with pytest.raises(ManifestIntegrityError):
        log.uploader.upload(sealed)
    assert log.bucket.objects == {}


def test_chunks_that_go_up_together_share_their_commits(tmp_path: Path) -> None:
    log = Log(tmp_path)
    chunks = [log.seal(i) for i in range(3)]
    before = log.writer.fsyncs
    told: list[int] = []
    log.uploader.upload_all(chunks, on_put=lambda sealed: told.append(sealed.header.chunk_index))
    assert log.writer.fsyncs - before == 1
    assert kinds(tmp_path) == [(3, "UploadStarted")] * 3 + [(3, "UploadDone")] * 3
    assert list(log.bucket.objects) == [f"manifest/7/{i}.mlog" for i in range(3)]
    assert told == [0, 1, 2]
    assert [h.uploaded for _, h in chunk_headers(tmp_path)[:3]] == [True] * 3
    assert replay(tmp_path).pending_uploads == {}


def test_of_chunks_that_go_up_together_one_fails(tmp_path: Path) -> None:
    log = Log(tmp_path)
    chunks = [log.seal(i) for i in range(3)]
    original = log.bucket.put

    def put(key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        log.bucket.failures = [2] if key.endswith("/1.mlog") else []
        return original(key, data, metadata)

    log.bucket.put = put  # type: ignore[method-assign]
    told: list[int] = []
    with pytest.raises(UploadGaveUpError):
        log.uploader.upload_all(chunks, on_put=lambda sealed: told.append(sealed.header.chunk_index))
    assert (told, list(log.bucket.objects)) == ([0], ["manifest/7/0.mlog"])
    assert [h.uploaded for _, h in chunk_headers(tmp_path)[:3]] == [True, False, False]
    index = replay(tmp_path)
    assert list(index.log_objects) == ["manifest/7/0.mlog"]
    assert sorted(key for _, key in index.pending_uploads) == ["manifest/7/1.mlog", "manifest/7/2.mlog"]
    log.bucket.put = original  # type: ignore[method-assign]
    log.bucket.failures = []
    log.uploader.upload_all(chunks[1:])
    assert replay(tmp_path).pending_uploads == {}


def test_a_damaged_chunk_does_not_hold_up_those_before_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    chunks = [log.seal(i) for i in range(3)]
    data = bytearray(chunks[1].path.read_bytes())
    data[80] ^= 1
    chunks[1].path.chmod(0o600)
    chunks[1].path.write_bytes(data)
    assert len(log.uploader.upload_all(chunks)) == 1
    with pytest.raises(ManifestIntegrityError):
        log.uploader.upload_all(chunks[1:])
    assert list(log.bucket.objects) == ["manifest/7/0.mlog"]


def test_compaction_pairs_its_deletes_and_the_bundle_reads_like_the_chunks(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for i in range(4):
        log.uploader.upload(log.seal(i))
    rows = written(tmp_path)
    snapshot = take_snapshot(log.writer, replay(tmp_path))
    marker = p.SnapshotMarker(snapshot.position.chunk_index, snapshot.position.chunk_offset, snapshot.snapshot_id)
    log.bucket.failures = [0, 0]  # the composition and a delete
    original = log.bucket.compose
    log.bucket.compose = lambda key, sources: (original(key, sources), log.bucket.failures.append(3))[0]  # type: ignore[method-assign]
    log.uploader.compact(0, 2, marker)
    assert sorted(log.bucket.objects) == ["manifest/7/3.mlog", "manifest/7/bundle-0-2.mlogs"]
    told = [kind for _, kind in kinds(tmp_path)]
    assert told.count("Tier2DeleteQueued") == told.count("Tier2Deleted") == 3
    index = replay(tmp_path)
    assert (index.pending_deletes, index.pending_uploads) == (set(), {})
    assert sorted(index.log_objects) == sorted(log.bucket.objects)
    log.writer.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "bundle-0-2.mlogs").write_bytes(log.bucket.objects["manifest/7/bundle-0-2.mlogs"])
    (elsewhere / "3.mlog").write_bytes(log.bucket.objects["manifest/7/3.mlog"])
    copied = written(elsewhere)
    assert copied == rows[: len(copied)]
    assert [r[2] for r in copied if r[1] == 0] == [0, 1, 2, 3]


def test_deletes_cut_short_are_resumed_from_the_index(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for i in range(3):
        log.uploader.upload(log.seal(i))
    log.bucket.failures = []
    original = log.bucket.delete
    log.bucket.delete = lambda key: (_ for _ in ()).throw(TransientError("down", reason_code=3))  # type: ignore[method-assign]
    with pytest.raises(UploadGaveUpError):
        log.uploader.compact(0, 1, p.SnapshotMarker(2, 64, 1))
    pending = sorted(key for _, key in replay(tmp_path).pending_deletes)
    assert pending == ["manifest/7/0.mlog", "manifest/7/1.mlog"]
    log.bucket.delete = original  # type: ignore[method-assign]
    log.uploader.finish_deletes(pending)
    assert replay(tmp_path).pending_deletes == set()
    assert "manifest/7/0.mlog" not in log.bucket.objects


def headers(*states: str) -> list[ChunkHeader]:
    flags = {"u": 3, "s": 1, "a": 0}
    return [ChunkHeader(i, 0, flags=flags[s]) for i, s in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "covered", "gone"),
    [
        ("uuuuua", 5, [0, 1, 2]),
        ("uuuuua", None, []),
        ("uuuuua", 2, [0, 1]),
        ("ususua", 5, [0]),
        ("uua", 2, []),
        ("suuuua", 5, []),
        ("uuuuu", 9, [0, 1, 2]),
    ],
)
def test_retention_as_written(states: str, covered: int | None, gone: list[int]) -> None:
    position = None if covered is None else LogPosition(covered, 64, 0)
    assert retention.plan(headers(*states), [], position).chunks == gone


@given(st.text("us", max_size=12), st.integers(0, 14))
def test_retention_never_makes_a_hole(states: str, covered: int) -> None:
    chunks = retention.plan(headers(*states, "a"), [1, 2, 3], LogPosition(covered, 64, 0)).chunks
    assert chunks == list(range(len(chunks)))
    assert all(states[i] == "u" and i < covered for i in chunks)
    assert len(chunks) <= max(0, len(states) - 2)


def test_what_retention_deletes_is_not_missed(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for i in range(6):
        log.uploader.upload(log.seal(i))
    for _ in range(3):
        snapshot = take_snapshot(log.writer, replay(tmp_path))
    whole = replay(tmp_path)
    assert retention.apply(log.writer.env, tmp_path, snapshot.position, uploaded=lambda i: i < 2) == ([0, 1], [1])
    decided = retention.apply(log.writer.env, tmp_path, snapshot.position)
    assert decided == ([2, 3], [])
    assert replay(tmp_path).same_state(whole)
    assert retention.apply(log.writer.env, tmp_path, snapshot.position) == ([], [])
    found = [h for _, h in chunk_headers(tmp_path)]
    assert retention.violations(found, snapshot.position) == []
    assert retention.violations(found, None) == ["no usable snapshot covers the chunks before 4"]
    log.writer.close()
