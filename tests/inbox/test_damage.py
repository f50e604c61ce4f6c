"""verify finds what is wrong with delivered bytes in the remote, and repairs it from this disk, as of any others."""

from __future__ import annotations

import os
from pathlib import Path

from aof2.engine.remote.keys import InboxPackKey, name_of
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from tests.inbox.helpers import Arena, run, settings_of, troubles

FILES = {"a": b"a" * 100, "b": b"b" * 5000, "large": bytes(range(251)) * 2500}


def test_damaged_and_missing_blobs_are_put_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        await a.deliver("job", "out", FILES)
        for path, data in FILES.items():
            assert await a.read(f"out/{path}") == data
        await a.volume.hydrator.settle()

    run(settings, body)
    blobs = sorted((tmp_path / "remote" / "inbox").rglob("*.blob"))
    pack, *chunks = sorted(blobs, key=lambda path: not path.name.startswith("pack-"))
    data = bytearray(pack.read_bytes())
    data[1] ^= 0xFF
    pack.write_bytes(data)
    chunks[0].unlink()
    found = verify(settings, deep_remote=True).findings
    assert {f.kind for f in found} >= {Kind.REMOTE_DAMAGED, Kind.REMOTE_MISSING}
    verify(settings, deep_remote=True, repair=True)
    assert [f for f in troubles(settings) if f.kind in (Kind.REMOTE_DAMAGED, Kind.REMOTE_MISSING)] == []

    async def again(a: Arena) -> None:
        for path, data in FILES.items():
            row = a.row(f"out/{path}")
            await a.volume.evict([(row.ino >> 40, row.ino, row.generation)])
            assert await a.read(f"out/{path}") == data

    run(settings, again)


def test_what_no_row_and_no_job_needs_is_told_once_it_is_old(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        await a.deliver("job", "out", FILES)

    run(settings, body)
    extra = tmp_path / "remote" / name_of(InboxPackKey("default", "other", "attempt", 1 << 63, bytes(32)))
    extra.parent.mkdir(parents=True)
    extra.write_bytes(b"left over")
    assert troubles(settings) == []
    os.utime(extra, (1_700_000_000, 1_700_000_000))
    assert [f.kind for f in troubles(settings)] == [Kind.REMOTE_ORPHAN]
