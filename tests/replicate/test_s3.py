"""The same against a real S3 server: metadata, bundles of small parts, following and restoring."""

from __future__ import annotations

from pathlib import Path

from aof2.engine.env import Env
from aof2.engine.replicate.follow import Follower
from aof2.engine.replicate.reconcile import Status, examine_stream
from aof2.engine.replicate.restore import restore
from aof2.engine.replicate.uploader import ReplicateOptions
from tests.remote.conftest import OpenStore

from .helpers import TENANT, Rig, Weather, keys_of, make_file, make_tenant, run_rig
from .test_follow import rows_of

MAP = 1 << 30
OPTIONS = ReplicateOptions(backoff_s=0.01, backoff_max_s=0.05, bundle_chunks=3)


def test_a_log_on_s3(tmp_path: Path, open_s3: OpenStore) -> None:
    store = Weather(open_s3())

    async def body(r: Rig) -> None:
        await r.write(make_tenant, stream_id=0)
        for i in range(10):
            await r.write(make_file(i))
            if i % 3 == 2:
                await r.snapshot()
        store.down = True
        r.replicator.kick()
        store.down = False
        await r.write(make_file(11))
        found = keys_of(store, f"manifest/{TENANT}/")
        bundles = [k for k in found if k.endswith(".mlogs")]
        assert bundles == [f"manifest/{TENANT}/bundle-0-2.mlogs", f"manifest/{TENANT}/bundle-3-5.mlogs"]
        chunk = next(k for k in found if k.endswith(".mlog"))
        assert sorted(store.head_blob(chunk).metadata) == [
            "base_record",
            "chunk_crc64",
            "record_count",
            "snapshot_id",
            "writer_epoch",
        ]
        report = examine_stream(store, r.catalog, r.volume.directory(TENANT), TENANT, deep=True)
        assert {f.status for f in report.objects} == {Status.OK}
        with Follower(Env(), store, tmp_path / "second", map_bytes=MAP) as second:
            assert [s.missing for s in second.catch_up()] == [[], []]
            assert rows_of(second.catalog) == rows_of(r.catalog)
        restored = restore(Env(), store, tmp_path / "restored", map_bytes=MAP)
        assert restored.gaps == []

    run_rig(tmp_path, body, store=store, options=OPTIONS)
