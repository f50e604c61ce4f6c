"""A stream's uploads: what a power loss or a full disk leaves is caught up with, and nothing is put over a gap."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.env import Env
from aof2.engine.manifest.chunk import sealed_rw
from aof2.engine.remote import fence
from aof2.engine.replicate.stream import StreamUploads, log_state
from tests.replicate.helpers import TENANT, make_file, open_directory, open_state


def fill(v: Any, *inos: int) -> None:
    """A sealed chunk each."""
    for ino in inos:
        v.writer.call(TENANT, make_file(ino), sync=True)
        v.writer.seal(TENANT, 10**9)
        v.writer.flush()


def uploads_of(v: Any, root: Path, put: list[int]) -> StreamUploads:
    env = v.env
    store = open_directory(root, env)
    claimed = fence.claim(env, store)
    told: Callable[[Any], None] = lambda chunk: put.append(chunk.header.chunk_index)  # noqa: E731
    return StreamUploads(env, v.catalog, v.writer, store, claimed, v.directory(TENANT), TENANT, on_put=told)


def run(uploads: StreamUploads) -> None:
    while uploads.is_due and uploads.step():
        pass


def test_a_chunk_that_was_never_cut_leaves_no_gap(tmp_path: Path) -> None:
    """To cut it to its length is not synced: a power loss may leave a sealed chunk as long as it was allocated."""
    env = Env()
    v = open_state(tmp_path, env, rotation_period_ms=3_600_000)
    fill(v, 100, 101, 102)
    path = v.directory(TENANT) / "1.mlog"
    v.close()
    with sealed_rw(env, path) as fd:
        os.ftruncate(fd, 16 << 10)
    v = open_state(tmp_path, env, rotation_period_ms=3_600_000)
    put: list[int] = []
    run(uploads_of(v, tmp_path, put))
    assert put[:3] == [0, 1, 2]
    v.close()


def test_an_upload_whose_commit_failed_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Env()
    v = open_state(tmp_path, env, rotation_period_ms=3_600_000)
    fill(v, 100, 101)
    put: list[int] = []
    uploads = uploads_of(v, tmp_path, put)
    submit, count = v.writer.submit, 0

    def full_once(*args: Any, **kwargs: Any) -> Future[Any]:
        nonlocal count
        count += 1
        if count != 1:
            return submit(*args, **kwargs)
        failed: Future[Any] = Future()
        failed.set_exception(OSError(errno.ENOSPC, "no room"))
        return failed

    monkeypatch.setattr(v.writer, "submit", full_once)
    with pytest.raises(OSError, match="no room"):
        run(uploads)
    run(uploads)
    is_uploaded = log_state(v.catalog, TENANT).is_uploaded(TENANT)
    assert put[:2] == [0, 1] and is_uploaded(0) and is_uploaded(1)
    v.close()
