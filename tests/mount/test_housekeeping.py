"""What a mounted volume tidies up by itself: uploads in a real S3 server that ended midway, cursors out of use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3

from aof2.fs.bench.seaweed import REGION
from tests.mount.world import World, world
from tests.support.mount import mounted_volume, until
from tests.support.seaweed import Seaweed, running_seaweed

MIB = 1 << 20


def client(server: Seaweed) -> Any:
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    return boto3.client("s3", endpoint_url=server.endpoint_url, region_name=REGION, **keys)


def begun(s3: Any, server: Seaweed, key: str) -> str:
    """An upload whose writer died after its first part."""
    upload_id: str = s3.create_multipart_upload(Bucket=server.bucket, Key=key)["UploadId"]
    s3.upload_part(Bucket=server.bucket, Key=key, UploadId=upload_id, PartNumber=1, Body=b"x" * (5 * MIB))
    return upload_id


def uploads(s3: Any, server: Seaweed) -> set[str]:
    return {row["UploadId"] for row in s3.list_multipart_uploads(Bucket=server.bucket).get("Uploads", ())}


def test_uploads_that_ended_midway_are_aborted(tmp_path: Path) -> None:
    with running_seaweed(tmp_path / "weed") as server:
        s3 = client(server)
        ours = begun(s3, server, "volume/checkpoints/default/7/chunk-1-1-aa.blob")
        others = begun(s3, server, "elsewhere/checkpoints/default/7/chunk-1-1-aa.blob")
        assert uploads(s3, server) == {ours, others}
        remote = (
            f'[remote]\nurl = "s3://{server.bucket}/volume"\nendpoint_url = "{server.endpoint_url}"\n'
            f'region = "{REGION}"\n[retention]\npurge_after = "1s"\n'
        )
        with world(tmp_path / "w", remote=remote, environ=server.environ()) as w:
            w.mount()
            _keeps_on_uploading(w)
            until(lambda: uploads(s3, server) == {others}, "what a writer left stays for ever")
            again = begun(s3, server, "volume/checkpoints/default/8/chunk-2-1-bb.blob")
            until(lambda: again not in uploads(s3, server), "it is looked for once only")
            w.umount()
            w.verify("--remote")
        assert uploads(s3, server) == {others}


def _keeps_on_uploading(w: World) -> None:
    """Uploads of this volume's own are under way meanwhile, and are none of those."""
    data = bytes(range(256)) * (160 * 1024)
    (w.files / "large").write_bytes(data)
    w.ok("wait", w.files / "large")
    w.ok("evict", w.files / "large")
    assert (w.files / "large").read_bytes() == data


def test_a_cursor_that_nobody_uses_expires(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, retention={"cursor_idle": "2s"}) as volume:
        volume.done("changes", "default", "--cursor", "gone")
        assert [one["cursor"] for one in volume.ask("cursors", tenant="default")] == ["gone"]
        until(lambda: not volume.ask("cursors", tenant="default"), "its cursor holds the feed back for ever")
        (volume.path / "file").write_bytes(b"x")
        ran = volume.aof2("changes", "default", "--cursor", "gone", "--json")
        assert [json.loads(line) for line in ran.stdout.splitlines()] == []
        assert "cursor gone is new" in ran.stderr
        assert not volume.complaints()
