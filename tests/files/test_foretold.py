"""A file is durable with its blob and the log of its seal: a remote that is copied when `wait` returns has no more."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.errors import TransientError
from aof2.engine.files import Files, stream_of
from aof2.engine.follow.heartbeat import Heartbeat, put_heartbeat
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.lost import Why
from aof2.engine.replicate.restore import RestoreReport, restore
from aof2.engine.replicate.tail import positions_of
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Severity
from aof2.engine.verify.run import verify
from tests.engine.helpers import small_settings
from tests.support.crash import Acks, CrashEnv, PowerLoss, is_killed, run_until_crash

from .helpers import Body, FakeKernel, content, make, row_of, run_files, scribble, waited_for

MAP = 1 << 30
TENANT = 1
CONTENT = b"small" * 800


def settings_at(root: Path, **retention: object) -> Settings:
    """A log that no timer seals: what is not asked for does not go up."""
    made = small_settings(root)
    return msgspec.structs.replace(
        made,
        manifest=msgspec.structs.replace(made.manifest, rotation_period_ms=3_600_000),
        retention=msgspec.structs.replace(made.retention, **retention),
    )


def run(root: Path, body: Body, *, env: Env | None = None, **retention: object) -> None:
    """Before it, nothing is under way that what it waits for would have to wait for; what is not goes up at its end."""

    async def drained(files: Files, kernel: FakeKernel) -> None:
        await files.volume.replicator.drain()
        await body(files, kernel)
        await files.volume.replicator.drain()

    run_files(settings_at(root, **retention), drained, env=env)


def copied(root: Path, name: str) -> Path:
    """The remote as it is now, in a root of its own."""
    shutil.copytree(root / "remote", root / name / "remote")
    return root / name


def restored(root: Path) -> RestoreReport:
    settings = settings_at(root)
    store = open_remote(Env(), settings.remote)
    try:
        return restore(Env(), store, settings.volume.state_dir, map_bytes=MAP)
    finally:
        store.close()


def contents_at(root: Path, names: Collection[str]) -> dict[str, bytes]:
    """What a volume that goes on there gives to read."""
    found: dict[str, bytes] = {}

    async def body(files: Files, _: FakeKernel) -> None:
        for name in names:
            ino = ino_of(files, name)
            if ino is not None:
                found[name] = await content(files, ino)

    run(root, body)
    return found


def ino_of(files: Files, name: str) -> int | None:
    with files.volume.catalog.view() as view:
        rows = [entry.ino for (_, raw), entry in view.scan(TENANT, t.DENTRIES) if raw == name.encode()]
    return rows[0] if rows else None


def is_durable(files: Files, ino: int) -> bool:
    with files.volume.catalog.view() as view:
        inode = view.get(TENANT, t.INODES, ino)
        return inode is not None and files.volume.is_durable(view, inode)


def test_the_remote_has_seal_and_blob_and_that_restores_it(tmp_path: Path) -> None:
    copies: list[Path] = []

    async def body(files: Files, _: FakeKernel) -> None:
        for n in range(3):
            await make(files, b"f%d" % n, CONTENT + b"%d" % n)
            await waited_for(files, f"f{n}")
            copies.append(copied(tmp_path, f"copy{n}"))
            ino = ino_of(files, f"f{n}")
            assert ino is not None
            assert is_durable(files, ino)
            # Its bytes here stay until the remote has the commit that says where they are.
            assert not files.volume.replication.has_published(TENANT, ino, 1)
            assert files.volume.log_ends([TENANT]) != files.volume.needed_log_ends([TENANT])

    run(tmp_path, body)
    for n, copy in enumerate(copies):
        report = restored(copy)
        assert report.lost == []
        assert report.gaps == []
        assert report.rescued == [f"default/f{n}"]  # of those before it, the log has the publication
        names = [f"f{i}" for i in range(n + 1)]
        assert contents_at(copy, names) == {name: CONTENT + name[1:].encode() for name in names}


@pytest.mark.parametrize("soon", [True, False])
def test_the_log_of_one_that_has_company_is_shared(tmp_path: Path, soon: bool) -> None:
    """A caller whose large file is on its way would not share it."""

    async def body(files: Files, _: FakeKernel) -> None:
        replication = files.volume.replication
        await make(files, b"f", CONTENT)
        with replication.waited_for([TENANT]) as other:
            other.begins(TENANT, soon=soon)
            await waited_for(files, "f")
        is_foretold = files.volume.log_ends([TENANT]) != files.volume.needed_log_ends([TENANT])
        assert is_foretold is not soon
        copied(tmp_path, "copy")

    run(tmp_path, body)
    assert restored(tmp_path / "copy").lost == []
    assert contents_at(tmp_path / "copy", ["f"]) == {"f": CONTENT}


def test_where_another_machine_follows_the_log_publishes(tmp_path: Path) -> None:
    """It shows what is published: what is durable is to be that, too."""

    async def body(files: Files, _: FakeKernel) -> None:
        volume = files.volume
        put_heartbeat(
            volume.remote, Heartbeat(format_version=1, id="0123456789abcdef", host="there", volume_uuid="", at_ms=1)
        )
        volume.followers.look()
        assert volume.followers.live_count == 1
        await make(files, b"f", CONTENT)
        await waited_for(files, "f")
        copied(tmp_path, "copy")

    run(tmp_path, body)
    report = restored(tmp_path / "copy")
    assert (report.lost, report.rescued) == ([], [])
    assert contents_at(tmp_path / "copy", ["f"]) == {"f": CONTENT}


def test_what_was_restored_like_that_stays(tmp_path: Path) -> None:
    """Neither its rows nor its blob go by themselves on the machine that goes on with it; verify is content."""

    async def first(files: Files, _: FakeKernel) -> None:
        await make(files, b"f", CONTENT)
        await waited_for(files, "f")
        copied(tmp_path, "copy")

    run(tmp_path, first)
    copy = tmp_path / "copy"
    restored(copy)

    async def second(files: Files, _: FakeKernel) -> None:
        ino = ino_of(files, "f")
        assert ino is not None
        assert row_of(files, ino).state == ObjectState.PUBLISHED
        runner = files.volume.jobs.runner
        await files.volume.jobs.prune(TENANT)
        with trio.fail_after(60):
            while runner.running or runner.live(TENANT):
                await trio.sleep(0.01)
        assert await content(files, ino) == CONTENT

    run(copy, second, purge_after_s=0.0, undelete_window_s=0.0)
    found = verify(settings_at(copy), deep_remote=True)
    assert [x for x in found.findings if x.severity is not Severity.NOTE] == []


def gone(blob: Path) -> None:
    blob.unlink()


def emptied(blob: Path) -> None:
    blob.write_bytes(b"")


def cut(blob: Path) -> None:
    blob.write_bytes(blob.read_bytes()[:-1])


def flipped(blob: Path) -> None:
    data = bytearray(blob.read_bytes())
    data[3] ^= 1
    blob.write_bytes(data)


def of_another(blob: Path) -> None:
    """Whole, and not what was sealed: the first that was put."""
    blob.write_bytes(min(blob.parents[1].rglob("*.blob")).read_bytes())


@pytest.mark.parametrize("harm", [gone, emptied, cut, flipped, of_another])
def test_a_blob_that_is_not_what_was_sealed_is_lost(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """And what there was before it is back."""

    def blobs() -> set[Path]:
        return set((tmp_path / "copy" / "remote").rglob("*.blob"))

    async def body(files: Files, _: FakeKernel) -> None:
        ino = await make(files, b"old", CONTENT)
        await waited_for(files, "old")
        await files.volume.replicator.drain()
        copied(tmp_path, "before")
        fh = await files.open(ino, os.O_RDWR)
        scribble(files, ino, b"changed")
        await files.release(fh)
        await make(files, b"new", CONTENT[1:])
        await waited_for(files, "old", "new")
        copied(tmp_path, "copy")

    run(tmp_path, body)
    before = {path.name for path in (tmp_path / "before" / "remote").rglob("*.blob")}
    victims = [path for path in blobs() if path.name not in before]
    assert len(victims) == 2
    for path in victims:
        harm(path)
    report = restored(tmp_path / "copy")
    assert sorted((x.path, x.why, x.outcome) for x in report.lost) == [
        ("default/new", Why.NEVER_UPLOADED, "dropped"),
        ("default/old", Why.NEVER_UPLOADED, "taken back to generation 1"),
    ]
    assert report.rescued == []
    assert contents_at(tmp_path / "copy", ["old", "new"]) == {"old": CONTENT}


def test_equal_contents_are_all_there(tmp_path: Path) -> None:
    """Only one of them has a blob under its own name: the others wait for the commit that says which."""
    names = ["a", "b", "c", "empty"]

    async def body(files: Files, _: FakeKernel) -> None:
        for name in names[:2]:
            await make(files, name.encode(), CONTENT)
        await make(files, b"empty", b"")
        await waited_for(files, "a", "b", "empty")
        copied(tmp_path, "one")
        await make(files, b"c", CONTENT)
        await waited_for(files, "c")
        copied(tmp_path, "two")

    run(tmp_path, body)
    for name, there in (("one", {"a", "b", "empty"}), ("two", set(names))):
        report = restored(tmp_path / name)
        assert report.lost == []
        expected = {one: b"" if one == "empty" else CONTENT for one in there}
        assert contents_at(tmp_path / name, names) == expected


def test_an_upload_that_failed_first_waits_for_its_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        store = files.volume.bare_remote
        put, failures = store.put_blob, [TransientError("a moment")]

        def failing(*args: Any, **kw: Any) -> str:
            if failures:
                raise failures.pop()
            return put(*args, **kw)

        monkeypatch.setattr(store, "put_blob", failing)
        await make(files, b"f", CONTENT)
        await waited_for(files, "f")
        assert not failures
        copied(tmp_path, "copy")

    run(tmp_path, body)
    assert restored(tmp_path / "copy").lost == []
    assert contents_at(tmp_path / "copy", ["f"]) == {"f": CONTENT}


def test_the_folder_tells_the_same(tmp_path: Path) -> None:
    """With no daemon, and after a restart."""
    inos: list[int] = []

    async def body(files: Files, _: FakeKernel) -> None:
        volume = files.volume
        for n in range(2):
            inos.append(await make(files, b"f%d" % n, CONTENT + b"%d" % n))
            await waited_for(files, f"f{n}")
        inos.append(await make(files, b"not waited for", CONTENT))
        with volume.catalog.view() as view:
            live, read = volume.replication, positions_of(Env(), view, volume.manifest_dir)
            for ino in inos:
                inode = view.get(TENANT, t.INODES, ino)
                assert inode is not None
                assert read.has_all_of(view, inode) == live.has_all_of(view, inode) == (ino != inos[-1])
                assert read.has_published(TENANT, ino, 1) == live.has_published(TENANT, ino, 1)
        await volume.evict([(stream_of(inos[1]), inos[1], 1)])
        assert row_of(files, inos[1]).backing is not None, "its publication is not there yet"

    run(tmp_path, body)


# -- killed ------------------------------------------------------------------------------------------------------

NAMES = ["f0", "f1", "f2"]
POINTS = (
    "seal.synced",
    "seal.recorded",
    "job.claimed",
    "publish.started",
    "publish.staged",
    "publish.uploaded",
    "publish.recorded",
    "job.finished",
    "catalog.commit.appended",
    "catalog.commit.logged",
    "catalog.commit.applied",
    "catalog.commit.synced",
    "manifest.rotate.sealed",
    "manifest.seal.flagged",
    "manifest.seal.synced",
    "manifest.seal.cut",
    "manifest.create.allocated",
    "manifest.commit.header",
    "manifest.upload.put",
    "manifest.upload.logged",
)


class ArmedEnv(CrashEnv):
    """Dies at the point once armed."""

    armed = False

    def failpoint(self, name: str) -> None:
        if self.armed:
            super().failpoint(name)


async def written(files: Files, name: str) -> None:
    """Also where it was created, and the process ended before a byte came."""
    ino, data = ino_of(files, name), CONTENT + name.encode()
    if ino is None:
        await make(files, name.encode(), data)
    elif await content(files, ino) != data:
        fh = await files.open(ino, os.O_RDWR)
        scribble(files, ino, data)
        await files.release(fh)


def write_some(env: Env, root: Path, acks: Acks) -> None:
    async def body(files: Files, _: FakeKernel) -> None:
        for name in NAMES:
            await written(files, name)
            await waited_for(files, name)
            acks.tell(name)
            if isinstance(env, ArmedEnv):
                env.armed = True

    run(root, body, env=env)


# The second commit after the first file is the one that publishes the next.
@pytest.mark.parametrize(("point", "nth"), [*((p, 1) for p in POINTS), *((p, 2) for p in POINTS if ".commit." in p)])
def test_killed_at_any_point_what_was_said_to_be_durable_is(tmp_path: Path, point: str, nth: int) -> None:
    acks = Acks(tmp_path / "acks")
    assert is_killed(lambda: write_some(ArmedEnv(Env().files, point, nth), tmp_path, acks), point)
    said = [str(name) for name in acks.told()]
    copy = copied(tmp_path, "copy")
    report = restored(copy)
    assert not {f"default/{name}" for name in said} & {x.path for x in report.lost}
    assert contents_at(copy, said) == {name: CONTENT + name.encode() for name in said}
    write_some(Env(), tmp_path, acks)  # what was begun is finished
    again = copied(tmp_path, "again")
    assert restored(again).lost == []
    assert contents_at(again, NAMES) == {name: CONTENT + name.encode() for name in NAMES}


# -- power lost --------------------------------------------------------------------------------------------------

POWER_POINTS = (
    "seal.synced",
    "publish.uploaded",
    "publish.recorded",
    "job.finished",
    "catalog.commit.logged",
    "manifest.seal.flagged",
    "manifest.seal.synced",
    "manifest.upload.put",
)


def powered(root: Path, remote: Path) -> Settings:
    """The remote is elsewhere: it loses nothing."""
    remote.mkdir(parents=True, exist_ok=True)
    settings = settings_at(root)
    return msgspec.structs.replace(settings, remote=msgspec.structs.replace(settings.remote, url=f"file://{remote}"))


def write_powered(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(files: Files, _: FakeKernel) -> None:
        await files.volume.replicator.drain()
        for name in NAMES:
            await make(files, name.encode(), CONTENT + name.encode())
            await waited_for(files, name)
            acks.tell(name)

    run_files(powered(root, root.parent / "remote"), body, env=env)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("point", POWER_POINTS)
def test_power_lost_at_any_point_what_was_said_to_be_durable_is(tmp_path: Path, point: str) -> None:
    """The commit that publishes a file was not synced before its caller was answered: the machine that comes back has
    the file all the same, and finds its blob again."""
    crash = run_until_crash(write_powered, tmp_path, point, nth=2)
    assert crash.killed
    said = [str(name) for name in crash.acks]
    expected = {name: CONTENT + name.encode() for name in said}
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "remote", tmp_path / "copy" / "remote")
    assert not {f"default/{name}" for name in said} & {x.path for x in restored(tmp_path / "copy").lost}
    assert contents_at(tmp_path / "copy", said) == expected
    for seed in range(2):
        disk = PowerLoss(crash).disk(tmp_path / f"disk{seed}", random.Random(seed))
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        remote = shutil.copytree(tmp_path / "remote", tmp_path / f"remote{seed}")
        blobs = {path.name for path in remote.rglob("*.blob")}
        found: dict[str, bytes] = {}

        async def body(files: Files, _: FakeKernel, found: dict[str, bytes] = found) -> None:
            for name in said:
                ino = ino_of(files, name)
                assert ino is not None
                await waited_for(files, name)
                assert is_durable(files, ino)
                found[name] = await content(files, ino)

        run_files(powered(disk, remote), body)
        assert found == expected
        assert blobs <= {path.name for path in remote.rglob("*.blob")}, "none was put anew instead"
        state = verify(powered(disk, remote), deep_remote=True)
        assert [x for x in state.findings if x.severity is not Severity.NOTE] == []
