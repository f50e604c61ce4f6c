"""Killed at every named point of uploading, bundling, auditing, following and restoring, and again while recovering."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from aof2.engine.audit.format import ArtifactPublish, SegmentSeal
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.catalog.store import Catalog
from aof2.engine.env import Env, Files
from aof2.engine.manifest import retention, upload
from aof2.engine.replicate import audit, claim, follow, restore, stream
from aof2.engine.replicate.follow import Follower
from aof2.engine.replicate.reconcile import examine_stream
from aof2.engine.replicate.stream import log_state
from aof2.engine.replicate.uploader import ReplicateOptions
from tests.catalog.helpers import every_row
from tests.support.crash import CountingEnv, CrashEnv, crash_cases, is_killed

from .helpers import (
    TENANT,
    Rig,
    in_state,
    keys_of,
    make_file,
    make_tenant,
    open_directory,
    purged,
    rig,
    sealed,
)

MAP = 1 << 30
OPTIONS = ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=2)
OBJECTS = range(1, 5)
Workload = Callable[[Env, Path], None]


def killed_at(workload: Workload, root: Path, point: str, nth: int) -> bool:
    """Runs it in a child that dies at the nth `point`; False when it came to its end before."""
    return is_killed(lambda: workload(CrashEnv(Files(), point, nth), root), point)


# -- the writer --------------------------------------------------------------------------------------------------


def write_all(env: Env, root: Path) -> None:
    """Whatever is not done yet of a little life: objects that come and go, snapshots, bundles, anchors."""

    async def main() -> None:
        async with rig(root, env=env, options=OPTIONS) as r:
            await r.write(make_tenant, stream_id=0)
            for number in OBJECTS:
                for step in steps(number):
                    await r.write(step)
                await r.snapshot()
            await r.write(make_file(99))
            await r.settle()

    trio.run(main)


def steps(number: int) -> list[Callable[..., object]]:
    done = [sealed(number), in_state(number, ObjectState.PUBLISHED)]
    if number == 2:
        done += [in_state(2, ObjectState.TOMBSTONED), purged(2)]
    if number == 3:
        done += [in_state(3, ObjectState.TOMBSTONED), in_state(3, ObjectState.PUBLISHED)]
    return done


WRITER_POINTS = (
    *upload.CRASH_POINTS,
    *retention.CRASH_POINTS,
    *stream.CRASH_POINTS,
    *audit.CRASH_POINTS,
    *claim.CRASH_POINTS,
)


def writer_cases() -> Iterator[tuple[str, int]]:
    """(point, nth): the first pass, and one in the middle of it all."""
    for point in WRITER_POINTS:
        yield point, 1
        if point.startswith("manifest."):
            yield point, 4


def test_the_workload_passes_every_point(tmp_path: Path) -> None:
    env = CountingEnv()
    write_all(env, tmp_path)
    assert list(crash_cases(env.hits, WRITER_POINTS))
    check_remote(tmp_path)


@pytest.mark.parametrize(("point", "nth"), list(writer_cases()))
def test_a_killed_writer_goes_on(tmp_path: Path, point: str, nth: int) -> None:
    killed = killed_at(write_all, tmp_path, point, nth)
    killed_at(write_all, tmp_path, point, 1)  # and again, while it recovers
    assert killed or nth > 1
    write_all(Env(), tmp_path)
    check_remote(tmp_path)


def check_remote(root: Path) -> None:
    """Nothing is pending, the remote is what the log says, a follower sees the same, the audit log says it once."""

    async def main() -> None:
        async with rig(root, options=OPTIONS) as r:
            await r.settle()
            check_streams(r)
            with Follower(Env(), r.store, root / "second", map_bytes=MAP) as second:
                assert [s.missing for s in second.catch_up()] == [[], []]
                assert comparable(second.catalog) == comparable(r.catalog)

    trio.run(main)
    check_audit(root)


def check_streams(r: Rig) -> None:
    for stream_id in (0, TENANT):
        report = examine_stream(r.store, r.catalog, r.volume.directory(stream_id), stream_id, deep=True)
        assert report.clean, report
        state = log_state(r.catalog, stream_id)
        assert (state.pending_uploads, state.pending_deletes) == ([], [])
        assert sorted(state.objects) == keys_of(r.store, f"manifest/{stream_id}/")


def comparable(catalog: Catalog) -> dict[tuple[str, bytes], bytes]:
    with catalog.view() as view:
        return {k: v for k, v in every_row(view).items() if k[0] not in ("segments", "meta")}


def check_audit(root: Path) -> None:
    records = list(Replay(root / "state" / "audit" / f"{TENANT}.asl"))
    state = VisibleState.of(records)
    assert state.problems == []
    assert state.problems == []
    assert len(state) == 3  # 1, 3 and 4
    seals = [r.payload.segment_id for r in records if isinstance(r.payload, SegmentSeal)]
    assert seals == list(OBJECTS)
    published = [r.payload.artifact for r in records if isinstance(r.payload, ArtifactPublish)]
    # Each run of the workload publishes object 2 anew after it was purged; the others are published once.
    assert len(set(published)) == len(OBJECTS)


# -- restore -----------------------------------------------------------------------------------------------------

RESTORE_POINTS = (
    "replicate.follow.chunk",
    "replicate.follow.snapshot",
    "replicate.follow.jumped",
    "replicate.follow.replayed",
    *restore.CRASH_POINTS,
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A remote with everything on it. Nobody writes to it."""
    root = tmp_path_factory.mktemp("filled")
    write_all(Env(), root)
    return root


def restored_rows(root: Path) -> dict[tuple[str, bytes], bytes]:
    catalog = Catalog.open(Env(), root / "restored" / "catalog", map_bytes=MAP)
    try:
        return comparable(catalog)
    finally:
        catalog.abandon()


@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_killed_restore_is_done_again(tmp_path: Path, filled: Path, point: str) -> None:
    def workload(env: Env, root: Path) -> None:
        store = open_directory(filled)
        restore.restore(env, store, root / "restored", map_bytes=MAP)

    assert killed_at(workload, tmp_path, point, 1)
    if point != "replicate.restore.named":
        assert not (tmp_path / "restored").exists()
        assert killed_at(workload, tmp_path, point, 1)
        report = restore.restore(Env(), open_directory(filled), tmp_path / "restored", map_bytes=MAP)
        assert report.gaps == []
        assert report.tenants == ["default"]
    (tmp_path / "whole").mkdir()
    restore.restore(Env(), open_directory(filled), tmp_path / "whole" / "restored", map_bytes=MAP)
    assert restored_rows(tmp_path) == restored_rows(tmp_path / "whole")


# -- follow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", follow.CRASH_POINTS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_killed_follower_goes_on(tmp_path: Path, filled: Path, point: str, nth: int) -> None:
    def workload(env: Env, root: Path) -> None:
        with Follower(env, open_directory(filled), root / "second", map_bytes=MAP) as second:
            second.catch_up()

    killed_at(workload, tmp_path, point, nth)
    killed_at(workload, tmp_path, point, 1)
    with Follower(Env(), open_directory(filled), tmp_path / "second", map_bytes=MAP) as second:
        assert [s.missing for s in second.catch_up()] == [[], []]
        rows = comparable(second.catalog)
        with second.catalog.view() as view:
            assert list(view.scan(TENANT, t.RESIDENCY)) == []
    shutil.rmtree(tmp_path / "second")
    with Follower(Env(), open_directory(filled), tmp_path / "second", map_bytes=MAP) as second:
        second.catch_up()
        assert comparable(second.catalog) == rows
