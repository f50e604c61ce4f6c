"""Blobs that are a range of an object: every reader finds them at (key, offset, length), and nothing beside them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.jobs.verify import check_blob
from aof2.engine.local.handles import Key
from aof2.engine.remote.location import LocatedBlob, Location
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.restore import restore
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.verify.findings import Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, MIB, cold_read, put_object, read_object, run_volume, small_settings
from tests.replicate.helpers import Replicated, run_replicated

CHUNK = MIB
BLOCK = 256 * KIB
DATA = random.Random(11).randbytes(2 * CHUNK + 700)
SHARED = "checkpoints/default/77/shared.blob"
GAP = b"\xee" * 4099  # odd on purpose: nothing is aligned


def move(v: Volume, remote: RemoteStore, key: Key) -> None:
    """Puts the object's blobs into one remote object, one behind the other, and says so in the rows."""
    stream_id, ino, generation = key
    with v.catalog.view() as view:
        row = view.get(stream_id, t.OBJECTS, (ino, generation))
        assert row is not None
        chunks = [view.get(stream_id, t.CHUNKS, chunk_id) for chunk_id in row.chunks]
        blobs = {c.sha256: view.get(stream_id, t.BLOBS, c.sha256) for c in chunks if c is not None}
    data, places = bytearray(GAP), dict[bytes, BlobRow]()
    for sha256, blob in blobs.items():
        assert blob is not None
        stored = remote.get_range(blob.key, 0, blob.stored_bytes)
        places[sha256] = msgspec.structs.replace(blob, key=SHARED, offset=len(data))
        data += stored + GAP
        remote.delete([blob.key])
    remote.put_blob(SHARED, bytes(data), len(data))

    def work(b: Batch) -> None:
        for sha256, blob in places.items():
            b.put(t.BLOBS, sha256, blob)
        for chunk in chunks:
            assert chunk is not None
            at = places[chunk.sha256].offset
            b.put(t.CHUNKS, chunk.chunk_id, msgspec.structs.replace(chunk, key=SHARED, offset=at))

    v.writer.call(stream_id, work, sync=True)


def blobs_of(v: Volume, stream_id: int) -> list[tuple[bytes, BlobRow]]:
    with v.catalog.view() as view:
        return list(view.scan(stream_id, t.BLOBS))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_reader_goes_by_offset(tmp_path: Path, compression: str) -> None:
    settings = small_settings(tmp_path, chunk_bytes=CHUNK, block_bytes=BLOCK, compression=compression)
    data = DATA if compression == "none" else DATA[: CHUNK // 2] + bytes(CHUNK + 5) + DATA[:1000]

    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        move(v, v.bare_remote, key)
        await v.evict([key])
        async with v.opened_object(key) as handle:
            at = CHUNK + BLOCK + 17
            seen = await v.hydrator.glance(handle, at, 100)
            assert seen == (data[at : at + 100] if compression == "none" else None)
        scanned = bytearray()

        async def sink(piece: bytes) -> None:
            scanned.extend(piece)

        await cold_read(v, key, 0, len(data), sink)
        assert bytes(scanned) == data
        assert await read_object(v, key, 0, len(data)) == data
        blobs = blobs_of(v, key[0])
        assert {blob.key for _, blob in blobs} == {SHARED} and all(blob.offset for _, blob in blobs)
        for sha256, blob in blobs:
            check_blob(v.remote, sha256, blob)

    run_volume(settings, body, parts=("jobs",))
    report = verify(settings, deep_remote=True)
    assert [f.message for f in report.findings if f.severity is not Severity.NOTE] == []


def test_restored_by_offset(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, chunk_bytes=CHUNK, block_bytes=BLOCK, compression="none")
    manifest = msgspec.structs.replace(settings.manifest, rotation_period_ms=50)
    settings = msgspec.structs.replace(settings, manifest=manifest)
    keys: list[Key] = []

    async def fill(r: Replicated) -> None:
        keys.append(await put_object(r.volume, "default", b"a", DATA))
        await r.volume.checkpoint("default")
        move(r.volume, r.volume.bare_remote, keys[0])
        await r.settle()

    async def look(r: Replicated) -> None:
        assert await read_object(r.volume, keys[0], 0, len(DATA)) == DATA

    run_replicated(settings, fill)
    settings.volume.state_dir.rename(tmp_path / "lost")
    with closing(open_remote(Env(), RemoteSettings(url=settings.remote.url))) as store:
        report = restore(Env(), store, settings.volume.state_dir, map_bytes=1 << 30)
    assert not report.lost
    run_replicated(settings, look)


def test_no_read_leaves_its_blob(tmp_path: Path) -> None:
    remote = open_remote(Env(), RemoteSettings(url=f"file://{tmp_path}"))
    remote.put_blob(SHARED, b"aaabbbccc", 9)
    blob = LocatedBlob(remote, Location(SHARED, 3, 3))
    assert blob.read(0, 3) == b"bbb" and blob.read(1, 1) == b"b"
    for start, length in ((0, 4), (3, 1), (-1, 1)):
        with pytest.raises(CorruptError):
            blob.read(start, length)


def test_an_object_named_after_a_chunk_ends_with_its_blob() -> None:
    own = "checkpoints/default/1/chunk-1-1-" + "0" * 64 + ".blob"
    assert Location(own, 0, 10).fits(10) and not Location(own, 0, 10).fits(11) and not Location(own, 0, 10).fits(9)
    assert (
        Location(SHARED, 5, 10).fits(15) and Location(SHARED, 5, 10).fits(99) and not Location(SHARED, 5, 10).fits(14)
    )
