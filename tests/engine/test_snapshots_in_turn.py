"""Two snapshots asked for at once, as a due one and the one at an unmount are: each has its own number."""

from __future__ import annotations

from pathlib import Path

import trio

from aof2.engine.manifest.snapshot import list_snapshots
from aof2.engine.volume import Volume
from tests.engine.helpers import put_object, run_volume, small_settings


def test_snapshots_at_once_have_their_own_numbers(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        await put_object(v, "default", b"a", b"bytes")
        before = list_snapshots(v.manifest_dir / "1")
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(v.log_snapshots.take, 1)
        last = before[-1] if before else 0
        assert list_snapshots(v.manifest_dir / "1")[-1] == last + 3

    run_volume(small_settings(tmp_path), body, parts=())
