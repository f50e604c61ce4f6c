"""What one small file costs from its close to the moment the remote alone restores it. Counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aof2.engine.files import Files
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.remote import fence
from aof2.engine.volume import Volume
from tests.engine.helpers import small_settings

from .helpers import FakeKernel, make, run_files, waited_for

REQUESTS = ("put_blob", "put_if_absent", "replace_if_match", "get_blob", "get_range", "head_blob", "list")
CONTENT = b"small" * 800


class Costs:
    """Counts from now on. Commits that hold nothing but the log's own bookkeeping count as such."""

    def __init__(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        self._volume = volume
        self.counts: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._count_requests(monkeypatch)
        target, commit, to_thread = volume.target, volume.target.commit, trio.to_thread.run_sync

        def counted(*, sync: bool) -> None:
            staged = [stream.staged for stream in target.streams.values() if stream.staged]
            if any(set(records.segment_ids) != {LOG_SEGMENT_ID} for records in staged):
                self.counts["commits"] += 1
                self.counts["synced"] += sync
            elif staged:
                self.counts["bookkeeping"] += 1
            commit(sync=sync)

        async def crossed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            steps = getattr(getattr(work, "__func__", None), "__name__", "") == "step"
            self.counts["steps" if steps else "threads"] += 1
            return await to_thread(work, *args, **kwargs)

        monkeypatch.setattr(target, "commit", counted)
        monkeypatch.setattr(trio.to_thread, "run_sync", crossed)

    def _count_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of everybody: the fence has the store itself, the publisher one that is metered."""
        store = self._volume.bare_remote
        for name in REQUESTS:
            monkeypatch.setattr(store, name, self._counted(name, getattr(store, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.requests[name] += 1
            return call(*args, **kwargs)

        return counted


async def quiet(volume: Volume) -> None:
    await volume.replicator.drain()
    await trio.testing.wait_all_tasks_blocked(0.05)


def test_a_file_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "AHEAD_S_MAX", 60.0)  # however slow this machine is

    async def body(files: Files, _: FakeKernel) -> None:
        await make(files, b"first", CONTENT)
        await waited_for(files, "first")
        await make(files, b"second", CONTENT[1:])
        await quiet(files.volume)
        costs = Costs(files.volume, monkeypatch)
        await waited_for(files, "second")
        counts, requests = costs.counts.copy(), costs.requests.copy()
        # The seal with the claim of its upload, synced where the log's chunk is sealed; its publication with the end of
        # that, which the seal foretold.
        assert (counts["commits"], counts["synced"]) == (2, 0)
        # The blob; the log's chunk, after a look whether the volume is still ours.
        assert requests == {"put_blob": 1, "get_range": 1, "put_if_absent": 1}
        # Hashing, and the upload. The log's: the look ahead and the chunk; on a slow machine one in vain between them.
        assert counts["threads"] == 2
        assert counts["steps"] <= 3
        await quiet(files.volume)
        assert costs.counts["commits"] == 2
        assert costs.counts["bookkeeping"] <= 2

    run_files(small_settings(tmp_path), body)


def test_a_file_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        await make(files, b"first", CONTENT)
        await waited_for(files, "first")
        ino = await make(files, b"second", CONTENT[1:])
        await quiet(files.volume)
        costs = Costs(files.volume, monkeypatch)
        await files.sealer.seal_now()
        await files.volume.jobs.wait_published([(1, ino, 1)])
        # The seal; the plan with the claim; the publication with the end of the job.
        assert (costs.counts["commits"], costs.counts["synced"]) == (3, 1)
        assert costs.counts["threads"] == 2

    run_files(small_settings(tmp_path), body)
