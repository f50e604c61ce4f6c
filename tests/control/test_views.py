"""What `.aof2/` in the mount shows, and which files a pin holds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from aof2.engine import namespace, pins
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.objects import ObjectGoneError
from aof2.fs.control import views
from tests.cli.logs import KEYS, run
from tests.cli.test_volume_verbs import write_conf
from tests.control.helpers import FakeMounted, run_mounted
from tests.engine.helpers import put_object, small_settings, unlink_object

TENANT = 1


def test_status_metrics_and_manifest(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        await put_object(mounted.volume, "default", b"a", b"x" * 5000)
        await mounted.volume.checkpoint("default")
        status = json.loads(views.status_json(mounted))
        assert status["tenants"][0]["bytes"] == 5000
        assert status["mount"]["mountpoint"] == str(mounted.mountpoint)
        assert b"aof2_dirty_bytes 0" in mounted.volume.metrics.render()
        records = [json.loads(line) for line in views.manifest_jsonl(mounted, "default")]
        assert tuple(records[0]) == KEYS
        assert [r["ordinal"] for r in records] == sorted(r["ordinal"] for r in records)
        assert "UploadDone" in {r["type"] for r in records}
        with pytest.raises(ObjectGoneError, match="there is no tenant 'x'"):
            list(views.manifest_jsonl(mounted, "x"))

    run_mounted(small_settings(tmp_path), body)


def test_a_history_that_only_the_remote_still_has(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    conf = write_conf(tmp_path)

    async def body(mounted: FakeMounted) -> None:
        await put_object(mounted.volume, "default", b"a", b"x" * 5000)
        await mounted.call("evict", paths=["default/a"])

    async def nothing(_: FakeMounted) -> None:
        pass

    run_mounted(settings, body)
    run_mounted(settings, nothing)  # the end of the log reaches the remote at the latest now
    whole = json.loads(run("why", "default/a", "--json", "--conf", conf).stdout)
    events = [step["event"] for step in whole["steps"]]
    assert (events[0], events[-1]) == ("SegmentOpened", "LocalEvicted")
    assert "UploadDone" in events
    *older, _ = sorted((tmp_path / "state" / "manifest" / str(TENANT)).glob("*.mlog"), key=lambda p: int(p.stem))
    for chunk in older:
        chunk.unlink()
    assert json.loads(run("why", "default/a", "--json", "--conf", conf).stdout)["steps"] == whole["steps"]
    local = run("why", "default/a", "--json", "--local", "--conf", conf)
    assert json.loads(local.stdout)["earlier_records"]
    (tmp_path / "remote").rename(tmp_path / "away")
    away = run("why", "default/a", "--conf", conf)
    assert away.exit_code == 0
    assert "the remote is away" in away.stderr
    assert "were not looked at" in away.stderr


def test_a_light_status_counts_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        assert json.loads(views.status_json(mounted))["tenants"][0]["objects"] == 0
        await put_object(mounted.volume, "default", b"a", b"x")
        assert json.loads(views.status_json(mounted))["tenants"][0]["objects"] == 0
        assert views.facts(mounted)["volume"].tenants[0].objects == 1
        assert json.loads(views.status_json(mounted))["tenants"][0]["objects"] == 1

    monkeypatch.setattr(views, "COUNTED_FOR_S", 60.0)
    run_mounted(small_settings(tmp_path), body)


def test_a_pin_holds_the_newest_content_only(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        volume = mounted.volume
        key = await put_object(volume, "default", b"a", b"x" * 5000)
        await volume.checkpoint("default")
        ino = key[1]
        change = partial(pins.pin, inos=[ino, ino + 1000])
        assert await result_of(volume.writer.submit(TENANT, change)) == 1
        assert await result_of(volume.writer.submit(TENANT, change)) == 0
        with volume.catalog.view() as view:
            row = view.get(TENANT, t.OBJECTS, (ino, 1))
            assert row is not None
            assert pins.holds(view, TENANT, row)
            assert not pins.holds(view, TENANT, ObjectRow(ino, 2, ObjectState.PUBLISHED))
            assert list(pins.pinned(view, TENANT)) == [(ino, 5000)]
        assert (await volume.evict([key]))[1] == [key]
        await unlink_object(volume, "default", b"a")
        with volume.catalog.view() as view:
            row = view.get(TENANT, t.OBJECTS, (ino, 1))
            assert row is not None
            assert not pins.holds(view, TENANT, row)
            assert list(pins.pinned(view, TENANT)) == []
        assert (await volume.evict([key]))[1] == []
        back = partial(namespace.undelete, ino=ino)
        await result_of(volume.writer.submit(TENANT, back))
        with volume.catalog.view() as view:
            assert pins.is_pinned(view, TENANT, ino)
        assert await result_of(volume.writer.submit(TENANT, partial(pins.unpin, inos=[ino, ino]))) == 2

    run_mounted(small_settings(tmp_path), body)
