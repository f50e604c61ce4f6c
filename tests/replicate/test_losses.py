"""Whatever a remote loses: a follower has the rows of some moment of the writer's, and says what it lacks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.env import Env
from aof2.engine.replicate.follow import Follower, StreamFollowed
from aof2.engine.replicate.restore import RestoreError, restore
from aof2.engine.replicate.uploader import ReplicateOptions

from .helpers import TENANT, Rig, make_file, make_tenant, open_directory, run_rig
from .test_follow import rows_of

MAP = 1 << 30
Rows = dict[tuple[str, bytes], bytes]


class Past:
    """A remote, and the writer's rows after every commit that got there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moments: list[Rows] = [{}]


@pytest.fixture(scope="module", params=[0, 3])
def past(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Without snapshots, and with one every three commits and bundles of two."""
    every = int(request.param)
    made = Past(tmp_path_factory.mktemp("past"))

    async def body(r: Rig) -> None:
        await r.write(make_tenant, stream_id=0)
        for i in range(12):
            await r.write(changed(i))
            made.moments.append(rows_of(r.catalog))
            if every and i % every == 2:
                await r.snapshot()

    options = ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=2 if every else 64)
    run_rig(made.root, body, options=options)
    return made


def changed(i: int) -> object:
    def work(b: Batch) -> None:
        make_file(i)(b)
        b.delete(t.INODES, max(0, i - 3))

    return work


def harm(remote: Path, rng: random.Random) -> int:
    """Deletes, cuts or flips some of the tenant's objects; how many."""
    files = sorted((remote / "manifest" / str(TENANT)).iterdir())
    victims = rng.sample(files, rng.randrange(1, 4))
    for path in victims:
        data = bytearray(path.read_bytes())
        kind = rng.randrange(3)
        path.unlink()
        if kind == 1:
            path.write_bytes(data[: rng.randrange(len(data))])
        elif kind == 2:
            data[rng.choice([0, *range(16, 56)])] ^= 1 << rng.randrange(8)  # not the version: that means "upgrade"
            data[rng.randrange(64, len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    return len(victims)


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_is_never_wrong(tmp_path: Path, past: Past, seed: int) -> None:
    rng = random.Random(seed)
    shutil.copytree(past.root / "remote", tmp_path / "remote")
    store = open_directory(tmp_path)
    with Follower(Env(), store, tmp_path / "second", map_bytes=MAP) as second:
        if seed % 2:
            hide(tmp_path / "remote", rng)
            second.catch_up()
            shutil.rmtree(tmp_path / "remote" / "manifest" / str(TENANT))
            shutil.copytree(
                past.root / "remote" / "manifest" / str(TENANT), tmp_path / "remote" / "manifest" / str(TENANT)
            )
        harm(tmp_path / "remote", rng)
        done = second.catch_up()
        check(past, rows_of(second.catalog), done)
        again = second.catch_up()
        check(past, rows_of(second.catalog), again)
    with Follower(Env(), store, tmp_path / "second", map_bytes=MAP) as second:
        check(past, rows_of(second.catalog), again)
    try:
        report = restore(Env(), store, tmp_path / "restored", map_bytes=MAP)
    except RestoreError:
        return
    assert report.tenants == ["default"]


def hide(remote: Path, rng: random.Random) -> None:
    """The listing of an earlier moment: nothing from some chunk on."""
    limit = rng.randrange(1, 10)
    for path in (remote / "manifest" / str(TENANT)).iterdir():
        if path.suffix != ".mlog" or int(path.stem) >= limit:
            path.unlink()


def check(past: Past, rows: Rows, done: list[StreamFollowed]) -> None:
    known = [without_audit(moment) for moment in past.moments]
    assert without_audit(rows) in known
    if without_audit(rows) != known[-1]:
        followed = [s for s in done if s.stream_id == TENANT]
        # Only what is missing at the very end goes unsaid: nobody can know that there was more.
        assert not followed or followed[0].missing or followed[0].position is None or at_end(followed[0])


def at_end(followed: StreamFollowed) -> bool:
    return followed.position is not None and followed.remote_chunk_last <= followed.position.chunk_index


def without_audit(rows: Rows) -> Rows:
    """Counters of the audit log and of the change feed move with commits of their own."""
    return {k: v for k, v in rows.items() if k[0] != "meta"}
