"""Files that come by the inbox: there at once and whole, cold, once; what they replace goes; restore has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.inbox import RefusedError
from tests.inbox.helpers import Arena, run, settings_of, some_files, troubles


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
