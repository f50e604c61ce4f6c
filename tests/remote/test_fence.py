"""One writer a volume: the second takes over, the first turns read-only before it can damage anything."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.upload import ChunkUploader, ManifestRemote, UploadGaveUpError
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.fence import Fence, claim, read_volume
from aof2.engine.remote.keys import VOLUME_KEY
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import Identity, save_identity, take_claim
from tests.remote.conftest import OpenStore
from tests.remote.helpers import get, keys_of, put
from tests.support.seaweed import Fault, FaultProxy

ENV = Env(seed=1, now_ms=lambda: 1_700_000_000_000)


def test_the_first_claim_makes_the_volume(store: RemoteStore) -> None:
    assert read_volume(store) is None
    fence = claim(ENV, store)
    assert fence.epoch == 1
    content = msgspec.json.decode(get(store, VOLUME_KEY))
    assert content == {
        "format_version": 1,
        "volume_uuid": fence.record.volume_uuid,
        "writer_epoch": 1,
        "writer_id": fence.record.writer_id,
        "claimed_at_ms": 1_700_000_000_000,
        "host": socket.gethostname(),
    }
    fence.check()
    again = claim(ENV, store)
    assert (again.epoch, again.record.volume_uuid) == (2, fence.record.volume_uuid)


@pytest.mark.expects_warnings
def test_a_stale_writer_turns_read_only(store: RemoteStore, caplog: pytest.LogCaptureFixture) -> None:
    old = claim(ENV, store)
    old.put("manifest/0/0.mlog", b"zero", {"record_count": "1"})
    new = claim(ENV, store)
    with pytest.raises(FencedError, match="epoch 2, ours 1"):
        old.put("manifest/0/1.mlog", b"one")
    with pytest.raises(FencedError):
        old.require()
    assert [r.levelno for r in caplog.records if r.levelno >= logging.WARNING] == [logging.ERROR]
    requests = store.stats().requests
    for write in (
        lambda: old.put("manifest/0/2.mlog", b"two"),
        lambda: old.compose("manifest/0/bundle-0-0.mlogs", ["manifest/0/0.mlog"]),
        lambda: old.delete(["manifest/0/0.mlog"]),
        old.check,
        old.require,
    ):
        with pytest.raises(FencedError):
            write()
    assert store.stats().requests == requests
    assert keys_of(store, "manifest/") == ["manifest/0/0.mlog"]
    new.put("manifest/0/1.mlog", b"mine")
    new.check()
    head = store.head_blob("manifest/0/1.mlog")
    assert head is not None
    assert head.metadata == {"writer_epoch": "2"}


@pytest.mark.expects_warnings
def test_anothers_bytes_under_a_manifest_key_latch(store: RemoteStore) -> None:
    fence = claim(ENV, store)
    store.put_if_absent("manifest/0/5.mlog", b"theirs")
    with pytest.raises(FencedError):
        fence.put("manifest/0/5.mlog", b"ours")
    with pytest.raises(FencedError):
        fence.require()
    with pytest.raises(FencedError):
        fence.put("manifest/0/6.mlog", b"ours")
    assert get(store, "manifest/0/5.mlog") == b"theirs"


@pytest.mark.expects_warnings
def test_anothers_bundle_latches(store: RemoteStore) -> None:
    fence = claim(ENV, store)
    fence.put("manifest/0/0.mlog", b"a")
    store.put_if_absent("manifest/0/bundle-0-0.mlogs", b"theirs")
    with pytest.raises(FencedError):
        fence.compose("manifest/0/bundle-0-0.mlogs", ["manifest/0/0.mlog"])
    with pytest.raises(FencedError):
        fence.require()


def test_putting_the_same_chunk_again_is_fine(store: RemoteStore) -> None:
    fence = claim(ENV, store)
    etag = fence.put("manifest/0/0.mlog", b"a")
    assert fence.put("manifest/0/0.mlog", b"a") == etag
    again = claim(ENV, store)
    assert again.put("manifest/0/0.mlog", b"a") == etag


def test_of_claims_at_the_same_moment_each_epoch_has_one_owner(open_store: OpenStore) -> None:
    fences: list[Fence] = []

    def take() -> None:
        store = open_store()
        try:
            fences.append(claim(ENV, store))
        except FencedError:
            return

    threads = [threading.Thread(target=take) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fences
    epochs = [fence.epoch for fence in fences]
    assert len(set(epochs)) == len(epochs)
    found = read_volume(open_store())
    assert found is not None
    owner = [fence for fence in fences if fence.record.writer_id == found[0].writer_id]
    assert [fence.epoch for fence in owner] == [max(epochs)]


@pytest.mark.expects_warnings
def test_a_volume_that_vanished_latches(store: RemoteStore) -> None:
    fence = claim(ENV, store)
    store.delete([VOLUME_KEY])
    with pytest.raises(FencedError, match="gone"):
        fence.put("manifest/0/0.mlog", b"a")
    assert keys_of(store) == []


@pytest.mark.expects_warnings
@pytest.mark.parametrize("content", [b'{"format_version": 2}', b"garbage"])
def test_a_newer_program_that_took_over_latches(store: RemoteStore, content: bytes) -> None:
    fence = claim(ENV, store)
    put(store, VOLUME_KEY, content)
    for _ in range(2):
        with pytest.raises(FencedError, match="read-only"):
            fence.put("manifest/0/0.mlog", b"a")
    with pytest.raises(FencedError):
        fence.require()
    assert keys_of(store) == [VOLUME_KEY]


def test_another_volume_is_not_taken_over(store: RemoteStore, tmp_path: Path) -> None:
    save_identity(ENV, tmp_path, Identity(volume_uuid="6f1c"))
    with pytest.raises(RemoteMissingError, match="right url"):
        take_claim(ENV, store, tmp_path)
    fence = claim(ENV, store)
    with pytest.raises(FencedError, match=r"belongs to 6f1c"):
        take_claim(ENV, store, tmp_path)
    fence.check()


def test_a_claim_over_a_record_that_is_replaced_meanwhile_fails(store: RemoteStore) -> None:
    claim(ENV, store)
    found = read_volume(store)
    fence = claim(ENV, store, over=found)
    with pytest.raises(FencedError):
        claim(ENV, store, over=found)
    fence.check()


def test_a_newer_format_is_left_alone(store: RemoteStore) -> None:
    newer = b'{"format_version": 2, "something": "else"}'
    put(store, VOLUME_KEY, newer)
    with pytest.raises(UnsupportedError, match="volume format 2"):
        claim(ENV, store)
    assert get(store, VOLUME_KEY) == newer


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff", b'{"format_version": 0, "volume_uuid": "u", "writer_epoch": 1, "writer_id": "w"}'],
)
def test_a_damaged_record_is_reported(store: RemoteStore, content: bytes) -> None:
    put(store, VOLUME_KEY, content)
    with pytest.raises(CorruptError, match=r"volume\.json"):
        claim(ENV, store)
    assert get(store, VOLUME_KEY) == content


def test_a_claim_whose_answer_got_lost_is_ours(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url, sleep_s=lambda s: None)
    for epoch in (1, 2):
        proxy.add(Fault(lambda seen: seen.method == "PUT", drop_after=True))
        fence = claim(ENV, store)
        assert fence.epoch == epoch
        fence.check()


class Log:
    """A manifest log that uploads through a fence."""

    def __init__(self, directory: Path, remote: ManifestRemote) -> None:
        self.writer = ManifestLogWriter.open(Env(seed=1), directory, LogSettings(chunk_capacity=16 << 10))
        self.uploader = ChunkUploader(self.writer.env, 7, remote, self._append, sleep_s=lambda s: None)

    def _append(self, batch: RecordBatch) -> LogPosition:
        self.writer.append_batch(batch)
        return self.writer.commit()

    def upload_one(self, segment_id: int) -> str:
        self.writer.append(p.SegmentOpened(0, 1), segment_id=segment_id)
        sealed = self.writer.rotate()
        assert sealed is not None
        return self.uploader.upload(sealed)


@pytest.mark.expects_warnings
def test_the_manifest_log_uploads_compacts_and_is_fenced(store: RemoteStore, tmp_path: Path) -> None:
    log = Log(tmp_path / "log", claim(ENV, store))
    for segment_id in range(3):
        log.upload_one(segment_id)
    chunks = [f"manifest/7/{i}.mlog" for i in range(3)]
    assert keys_of(store, "manifest/") == chunks
    joined = b"".join(get(store, key) for key in chunks)
    etag = log.uploader.compact(0, 2, p.SnapshotMarker(2, 0, 1))
    assert keys_of(store, "manifest/") == ["manifest/7/bundle-0-2.mlogs"]
    info, data = store.get_blob("manifest/7/bundle-0-2.mlogs")
    assert (info.etag, data) == (etag, joined)
    claim(ENV, store)
    with pytest.raises(FencedError):
        log.upload_one(9)
    assert keys_of(store, "manifest/") == ["manifest/7/bundle-0-2.mlogs"]
    log.writer.close()


def test_the_manifest_log_stops_at_denied(open_s3: OpenStore, proxy: FaultProxy, tmp_path: Path) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url, sleep_s=lambda s: None)
    log = Log(tmp_path / "log", claim(ENV, store))
    proxy.add(Fault(times=None, status=403, code="AccessDenied"))
    proxy.seen.clear()
    with pytest.raises(UploadGaveUpError) as e:
        log.upload_one(1)
    assert e.value.reason_code == 2
    assert len(proxy.seen) <= 2  # by the quick way, then by the SDK
    log.writer.close()
