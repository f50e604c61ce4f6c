"""Files that come by the inbox: there at once and whole, cold, once; what they replace goes; restore has them."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from aof2.engine import generations, namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.inbox import RefusedError
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.restore import restore
from aof2.engine.settings.remote import RemoteSettings
from aof2.fs.bench.seaweed import REGION
from tests.engine.helpers import job_over
from tests.inbox.helpers import Arena, lines, run, settings_of, some_files, troubles
from tests.support.seaweed import running_seaweed


def test_a_job_of_files_is_there_whole_and_cold(tmp_path: Path) -> None:
    settings, files = settings_of(tmp_path), some_files()

    async def body(a: Arena) -> None:
        done = await a.deliver("job-1", "reports/2026", files)
        assert done is not None
        assert (done.files, done.bytes) == (len(files), sum(map(len, files.values())))
        assert a.tree("reports/2026") == sorted(files)
        assert a.volume.quota.tenant_usage("default").used_bytes == 0
        for path, data in files.items():
            assert await a.read(f"reports/2026/{path}") == data
            row = a.row(f"reports/2026/{path}")
            obj = a.volume.catalog.get(row.ino >> 40, t.OBJECTS, (row.ino, row.generation))
            assert obj is not None and obj.state == ObjectState.PUBLISHED
            with a.volume.catalog.view() as view:
                assert a.volume.is_durable(view, row)
        assert not [key for key in a.listed() if ".knock" in key or ".refused" in key]

    run(settings, body)
    assert troubles(settings) == []


def test_a_job_comes_once_however_often_it_is_committed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        first = await a.deliver("again", "there", {"a": b"1"})
        second = await a.deliver("again", "there", {"a": b"2"})  # by one that took the first for dead
        assert first is not None and second is not None and first.time_ms == second.time_ms
        assert a.tree("there") == ["a"] and await a.read("there/a") == b"1"
        assert sum(key.endswith(".blob") for key in a.listed()) == 1  # the second's attempt went

    run(settings, body)
    assert troubles(settings) == []


def test_overwrite_replaces_a_directory_by_one_step(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        await a.deliver("old", "out", {"x=1/a": b"old a", "x=2/b": b"old b", "c": b"old c"})
        with pytest.raises(RefusedError, match="overwrite"):
            await a.deliver("clash", "out", {"c": b"new c", "d": b"new d"})
        assert a.tree("out") == ["c", "x=1/a", "x=2/b"]
        await a.deliver("new", "out", {"x=2/b": b"new b", "d": b"new d"}, mode="overwrite")
        assert a.tree("out") == ["d", "x=2/b"]
        assert await a.read("out/x=2/b") == b"new b"

    run(settings, body)
    assert troubles(settings) == []


def test_what_was_delivered_is_restored(tmp_path: Path) -> None:
    """On an empty machine, from the remote as it was copied when the last job was answered."""
    settings, files = settings_of(tmp_path / "a"), some_files()
    records = lines("record", 400)
    copied = tmp_path / "copied"

    async def body(a: Arena) -> None:
        await a.deliver("old", "out", {"gone": b"gone"})
        await a.deliver("files", "out", files, mode="overwrite")
        await a.deliver_records("records", "clicks", records)
        shutil.copytree(tmp_path / "a" / "remote", copied)

    run(settings, body)
    again = settings_of(tmp_path / "b", remote_url=f"file://{copied}")
    report = restore(Env(), open_remote(Env(), again.remote), again.volume.state_dir)
    assert report.lost == []

    async def restored(a: Arena) -> None:
        assert a.tree("out") == sorted(files)
        for path, data in files.items():
            assert await a.read(f"out/{path}") == data
        assert await a.world.sealed() == b"".join(records)
        done = await a.deliver("files", "out", {"other": b"x"})  # it knows its jobs, too
        assert done is not None and a.tree("out") == sorted(files)

    run(again, restored)
    assert troubles(again) == []


def test_small_files_in_packs_are_rewritten_and_undeleted_as_others(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    files = {f"f{n:02}": bytes([n]) * 3000 + b"%d" % n for n in range(40)}

    async def body(a: Arena) -> None:
        await a.deliver("packed", "out", files)
        (pack,) = [key for key in a.listed() if "/pack-" in key]
        assert not [key for key in a.listed() if "/chunk-" in key]
        tenant_id = a.volume.tenants.named("default").tenant_id
        for n in range(2, 40):
            row = a.row(f"out/f{n:02}")
            work = partial(namespace.unlink, parent=row.parent, name=row.last_name)
            await result_of(a.volume.writer.submit(tenant_id, work))
        with a.volume.catalog.view() as view:
            (found, *_) = namespace.deleted(view, tenant_id, a.row("out").ino, b"f09")
        await result_of(a.volume.writer.submit(tenant_id, partial(namespace.undelete, ino=found.ino), sync=True))
        assert await a.read("out/f09") == files["f09"]
        assert pack in a.listed()

    async def pruned(a: Arena) -> None:
        tenant_id = a.volume.tenants.named("default").tenant_id
        await job_over(a.volume.jobs, tenant_id, await a.volume.jobs.prune(tenant_id))

    async def rewritten(a: Arena) -> None:
        tenant_id = a.volume.tenants.named("default").tenant_id
        await pruned(a)
        await job_over(a.volume.jobs, tenant_id, await a.volume.jobs.rewrite(tenant_id, now=True))
        assert a.tree("out") == ["f00", "f01", "f09"]
        with a.volume.catalog.view() as view:
            places = {blob.key.split("/")[0] for _, blob in view.scan(tenant_id, t.BLOBS)}
        assert places == {"checkpoints"}
        for name in ("f00", "f01", "f09"):
            assert await a.read(f"out/{name}") == files[name]

    run(settings, body)
    month_ms = 30 * 86_400_000
    run(settings, pruned, env=Env(now_ms=lambda: time.time_ns() // 1_000_000 + month_ms))
    run(settings, rewritten, env=Env(now_ms=lambda: time.time_ns() // 1_000_000 + 2 * month_ms))
    assert troubles(settings) == []


def test_generations_go_on_behind_what_was_delivered(tmp_path: Path) -> None:
    """A delivered file is written to like any other, and what it was can be had again."""
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        files = a.world.kind.files
        await a.deliver("one", "", {"file": b"delivered" * 5000})
        row = a.row("file")
        fh = await files.open(row.ino, os.O_RDWR)
        await files.handle(fh).write(0, b"WRITTEN")
        await files.release(fh)
        await files.sealer.seal_now()
        await a.volume.checkpoint("default")
        assert (await a.read("file"))[:18] == b"WRITTENeddelivered"
        revert = partial(generations.revert, ino=row.ino, generation=1, purge_after_ms=0)
        await result_of(a.volume.writer.submit(row.ino >> 40, revert, sync=True))
        assert await a.read("file") == b"delivered" * 5000

    run(settings, body)
    assert troubles(settings) == []


def test_on_a_real_s3_server(tmp_path: Path) -> None:
    """The same through SeaweedFS: files in packs and alone, records, a commit put twice, a sweep."""
    (tmp_path / "weed").mkdir()
    with running_seaweed(tmp_path / "weed") as server, pytest.MonkeyPatch.context() as patched:
        for name, value in server.environ().items():
            patched.setenv(name, value)
        settings = settings_of(tmp_path / "v")
        remote = RemoteSettings(url=f"s3://{server.bucket}/v", endpoint_url=server.endpoint_url, region=REGION)
        settings = msgspec.structs.replace(settings, remote=remote)
        files, records = some_files(), lines("record", 300)

        async def body(a: Arena) -> None:
            done = await a.deliver("files", "out", files)
            again = await a.deliver("files", "out", {"other": b"x"})
            assert done is not None and again is not None and again.time_ms == done.time_ms
            for path, data in files.items():
                assert await a.read(f"out/{path}") == data
            await a.deliver_records("records", "clicks", records)
            assert await a.world.sealed() == b"".join(records)
            with pytest.raises(RefusedError, match="something of that name"):
                await a.deliver("clash", "out", {"empty": b"2"})
            await a.intake.sweep()
            assert len([key for key in a.listed("inbox/default/clash/") if key.endswith(".blob")]) == 0

        run(settings, body)
        assert troubles(settings) == []
