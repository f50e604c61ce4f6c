"""What a daemon does when it is asked over the control socket, on a real volume."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.inspect.paths import Place
from aof2.engine.local.handles import Key
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.resilience import BreakerState
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume
from aof2.fs.control import durable, walk
from aof2.fs.control.client import ControlClient, NotMountedError
from aof2.fs.control.protocol import ControlError, Progress
from tests.control.helpers import FakeMounted, run_mounted
from tests.engine.helpers import (
    KIB,
    MIB,
    backing_path,
    put_object,
    read_object,
    small_settings,
    unlink_object,
    with_cache,
)

TENANT = 1


def data(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


async def mkdir(mounted: FakeMounted, parent: int, name: bytes) -> int:
    def work(b):  # type: ignore[no-untyped-def]
        return namespace.mkdir(b, parent, name)

    return (await result_of(mounted.volume.writer.submit(TENANT, work))).ino


async def move(mounted: FakeMounted, name: bytes, parent: int) -> None:
    def work(b):  # type: ignore[no-untyped-def]
        return namespace.rename(b, namespace.root_ino(TENANT), name, parent, name)

    await result_of(mounted.volume.writer.submit(TENANT, work))


def state(mounted: FakeMounted, name: bytes) -> ObjectState:
    ino = mounted.ino(TENANT, name)
    with mounted.volume.catalog.view() as view:
        row = view.get(TENANT, t.OBJECTS, (ino, 1))
    assert row is not None
    return row.state


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(NotMountedError, match="not mounted; run aof2 mount"):
        ControlClient(small_settings(tmp_path))


def test_ping_and_status(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        pong = await mounted.call("ping")
        assert (pong["mountpoint"], pong["pid"]) == (str(tmp_path / "mnt"), os.getpid())
        await mounted.files.write("default", b"a", data("a", 5000))
        mounted.files.opened.add(99)
        found = await mounted.call("status")
        assert found["volume"]["live"]
        assert found["volume"]["dirty_bytes"] == 5000
        mount = found["mount"]
        assert (mount["open_files"], mount["unsealed_files"], mount["unsealed_bytes"]) == (1, 1, 5000)
        assert (mount["passthrough"], mount["passthrough_why"]) == (False, "there is no mount")
        one = await mounted.call("status", path="default/a")
        assert (one["object"]["size"], one["object"]["durable"], one["open"]) == (5000, False, False)
        tree = await mounted.call("status", path=str(tmp_path / "mnt" / "default"))
        assert tree["tree"]["objects"] == 1
        light = await mounted.call("status", light=True)
        assert light["volume"]["dirty_bytes"] == 5000

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"verb": "fly"}, "no such verb"),
        ({"verb": "warm"}, "paths"),
        ({"verb": "warm", "paths": "a"}, "array"),
        ({"verb": "warm", "paths": ["default"], "fast": True}, "fast"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, request_: dict[str, object], says: str) -> None:
    async def body(mounted: FakeMounted) -> None:
        with pytest.raises(ControlError, match=says) as caught:
            await mounted.call(**request_)  # type: ignore[arg-type]
        assert caught.value.code == 2

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.parametrize("verb", ["warm", "evict", "pin", "unpin", "wait", "resident"])
def test_a_path_that_is_not_there(tmp_path: Path, verb: str) -> None:
    async def body(mounted: FakeMounted) -> None:
        with pytest.raises(ControlError, match="default/no: no such file"):
            await mounted.call(verb, paths=["default/no"])
        with pytest.raises(ControlError, match="there is no tenant 'x'"):
            await mounted.call(verb, paths=["x"])

    run_mounted(small_settings(tmp_path), body)


def test_evict_uploads_first_then_drops_everything_local(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        told: list[Progress] = []
        content = data("a", 300 * KIB)
        key = await mounted.files.write("default", b"a", content)
        moved = await mounted.call("evict", paths=["default/a"], on_progress=told.append)
        assert (moved["files"], moved["skipped"]) == (1, [])
        assert moved["bytes"] >= len(content)
        assert state(mounted, b"a") == ObjectState.PUBLISHED
        assert not backing_path(mounted.volume, key).exists()
        assert mounted.files.dropped == [key[1]]
        assert told[0].total == len(content)
        here = await mounted.call("resident", paths=["default"])
        assert (here["local_bytes"], here["bytes"]) == (0, len(content))
        assert await read_object(mounted.volume, key, 0, len(content)) == content

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.parametrize("held", ["open here", "by the channel"])
def test_evict_takes_a_close_that_is_on_its_way(tmp_path: Path, held: str) -> None:
    """close(2) does not wait for RELEASE, nor that for the channel to let go of the backing file."""

    async def body(mounted: FakeMounted) -> None:
        key = await mounted.files.write("default", b"a", data("a", 5000))
        await mounted.call("wait", paths=["default/a"])
        fd = os.open(backing_path(mounted.volume, key), os.O_RDONLY)
        mounted.files.opened |= {key[1]} if held == "open here" else set()

        async def release_soon() -> None:
            await trio.sleep(0.2)
            mounted.files.opened.clear()
            await trio.sleep(0.1)
            os.close(fd)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release_soon)
            moved = await mounted.call("evict", paths=["default/a"])
        assert (moved["files"], moved["skipped"]) == (1, []) and moved["bytes"]
        assert not backing_path(mounted.volume, key).exists()

    run_mounted(small_settings(tmp_path), body)


def test_evict_names_what_is_open_or_pinned(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        for name in (b"open", b"pinned", b"free", b"writing"):
            await mounted.files.write("default", name, data(str(name), 20 * KIB))
        mounted.files.opened |= {mounted.ino(TENANT, b"open"), mounted.ino(TENANT, b"writing")}
        await mounted.call("pin", paths=["default/pinned"])
        moved = await mounted.call("evict", paths=["."])
        mnt = str(tmp_path / "mnt" / "default")
        whys = {one["path"]: one["why"] for one in moved["skipped"]}
        assert whys == {f"{mnt}/open": "open", f"{mnt}/writing": "open", f"{mnt}/pinned": "pinned"}
        assert moved["files"] == 1

    run_mounted(small_settings(tmp_path), body)


def test_warm_a_directory(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        folder = await mkdir(mounted, namespace.root_ino(TENANT), b"d")
        deeper = await mkdir(mounted, folder, b"e")
        sizes = {b"x": 40 * KIB, b"y": 300 * KIB, b"empty": 0}
        for name, size in sizes.items():
            await put_object(mounted.volume, "default", name, data(str(name), size))
            await move(mounted, name, deeper if name == b"y" else folder)
        total = sum(sizes.values())
        await mounted.call("evict", paths=["default"])
        check = await mounted.call("resident", paths=["default/d"])
        assert (check["files"], check["local_bytes"], check["bytes"]) == (3, 0, total)
        told: list[Progress] = []
        moved = await mounted.call("warm", paths=["default/d", "default/d/x"], on_progress=told.append)
        assert (moved["files"], moved["bytes"], moved["skipped"]) == (3, total, [])
        check = await mounted.call("resident", paths=["default/d"])
        assert (check["local_files"], check["local_bytes"]) == (3, total)
        again = await mounted.call("warm", paths=["default"])
        assert again["bytes"] == 0

    run_mounted(small_settings(tmp_path), body)


def test_many_files_in_a_directory(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        for i in range(600):
            await put_object(mounted.volume, "default", b"%04d" % i, b"x")
        here = await mounted.call("resident", paths=["default"])
        assert (here["files"], here["local_files"]) == (600, 600)

    run_mounted(small_settings(tmp_path), body)


def test_warming_more_than_fits_is_refused(tmp_path: Path) -> None:
    settings = with_cache(small_settings(tmp_path, compression="none"), hot_bytes=1 * MIB)

    async def body(mounted: FakeMounted) -> None:
        for i in range(4):
            await put_object(mounted.volume, "default", b"%d" % i, data(str(i), 400 * KIB))
            await mounted.volume.checkpoint("default")
        with pytest.raises(ControlError, match="do not fit into cache"):
            await mounted.call("warm", paths=["default"])
        with pytest.raises(ControlError, match="would be pinned"):
            await mounted.call("pin", paths=["default"])

    run_mounted(settings, body)


def test_what_cannot_be_fetched_is_named(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        await put_object(mounted.volume, "default", b"a", data("a", 40 * KIB))
        await mounted.call("evict", paths=["default"])
        for blob in (tmp_path / "remote" / "checkpoints").rglob("*.blob"):
            blob.unlink()
        moved = await mounted.call("warm", paths=["default"])
        assert moved["skipped_files"] == 1
        assert "missing in the remote" in moved["skipped"][0]["why"]

    run_mounted(small_settings(tmp_path), body)


def test_pinned_files_survive_pressure_and_restart(tmp_path: Path) -> None:
    settings = with_cache(small_settings(tmp_path, compression="none"), hot_bytes=2 * MIB)

    async def first(mounted: FakeMounted) -> None:
        await put_object(mounted.volume, "default", b"keep", data("keep", 400 * KIB))
        await mounted.volume.checkpoint("default")
        await mounted.call("evict", paths=["default/keep"])
        moved = await mounted.call("pin", paths=["default/keep"])
        assert (moved["files"], moved["bytes"]) == (1, 400 * KIB)

    async def second(mounted: FakeMounted) -> None:
        for i in range(10):
            await put_object(mounted.volume, "default", b"%d" % i, data(str(i), 400 * KIB))
            await mounted.volume.checkpoint("default")
        here = await mounted.call("resident", paths=["default/keep"])
        assert here["local_bytes"] == 400 * KIB
        status = await mounted.call("status")
        assert (status["mount"]["pinned_files"], status["mount"]["pinned_bytes"]) == (1, 400 * KIB)
        assert status["mount"]["evictions"]
        assert (await mounted.call("unpin", paths=["default"]))["files"] == 1
        assert (await mounted.call("evict", paths=["default/keep"]))["skipped"] == []

    run_mounted(settings, first)
    run_mounted(settings, second)
    shutil.rmtree(settings.volume.state_dir / "catalog")  # the log has the pins, too

    async def third(mounted: FakeMounted) -> None:
        assert (await mounted.call("status"))["mount"]["pinned_files"] == 0

    run_mounted(settings, third)


def test_checkpoint_wait_and_flush(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        await mounted.files.write("default", b"a", data("a", 5000))
        sent = await mounted.call("checkpoint", tenant="default", wait=False)
        assert sent == {"files": 1, "bytes": 5000}
        await mounted.call("wait", paths=["default/a"])
        assert state(mounted, b"a") == ObjectState.PUBLISHED
        await mounted.files.write("default", b"b", data("b", 6000))
        assert await mounted.call("checkpoint", wait=True) == {"files": 1, "bytes": 6000}
        assert state(mounted, b"b") == ObjectState.PUBLISHED
        await mounted.files.write("default", b"c", data("c", 7000))
        assert await mounted.call("flush") == {"files": 1, "bytes": 7000}
        assert state(mounted, b"c") == ObjectState.PUBLISHED
        assert await mounted.call("flush", wait=False) == {"files": 0, "bytes": 0}
        with pytest.raises(ControlError, match="there is no tenant 'x'"):
            await mounted.call("checkpoint", tenant="x")

    run_mounted(small_settings(tmp_path), body)


def test_what_is_not_uploaded_is_what_a_walk_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every directory and file of a random tree with hard links, in which some files are uploaded: what `wait` takes
    for not uploaded is all that is."""
    monkeypatch.setattr(walk, "PAGE", 3)
    rng = random.Random(3)

    def by_walk(mounted: FakeMounted, places: list[Place]) -> set[int]:
        found: set[int] = set()
        for page in walk.files(mounted, places):
            with mounted.volume.catalog.view() as view:
                found |= {p.inode.ino for p in page if not walk.is_durable(walk.newest(view, p))}
        return found

    async def body(mounted: FakeMounted) -> None:
        root = namespace.root_ino(TENANT)
        folders = {"default": root}
        for n in range(6):
            above = rng.choice(list(folders))
            folders[f"{above}/d{n}"] = await mkdir(mounted, folders[above], b"d%d" % n)
        paths = list(folders)
        for n in range(30):
            where = rng.choice(list(folders))
            ino = (await mounted.files.write("default", b"f%d" % n, data(str(n), n)))[1]
            if folders[where] != root:
                await move(mounted, b"f%d" % n, folders[where])
            paths.append(f"{where}/f{n}")
            if not n % 4:
                other = rng.choice(list(folders.values()))
                work = partial(namespace.link, ino=ino, parent=other, name=b"l%d" % n)
                await result_of(mounted.volume.writer.submit(TENANT, work))
            if n in (9, 19):
                await mounted.call("checkpoint", wait=True)
            if n == 24:
                await mounted.files.seal()
        sizes = set()
        for path in paths:
            places = walk.find(mounted, [path])
            expected = by_walk(mounted, places)
            assert await walk.not_uploaded(mounted, places) == expected, path
            sizes.add(len(expected))
        assert 0 in sizes and max(sizes) == 10
        both = walk.find(mounted, paths[1:4])
        assert await walk.not_uploaded(mounted, both) == by_walk(mounted, both)
        await mounted.call("wait", paths=["default"])
        assert not by_walk(mounted, walk.find(mounted, ["default"]))

    run_mounted(small_settings(tmp_path), body)


def test_wait_says_what_is_still_open(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        key = await mounted.files.write("default", b"a", data("a", 5000))
        mounted.files.opened.add(key[1])
        with pytest.raises(ControlError, match="mnt/default/a: still open for writing"):
            await mounted.call("wait", paths=["default"])
        mounted.files.opened.clear()
        await mounted.call("wait", paths=["default"])
        assert await mounted.call("wait", paths=["."]) == {"files": 0, "bytes": 0}

    run_mounted(small_settings(tmp_path), body)


def test_wait_tries_again_what_was_opened_in_the_moment_of_its_seal(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        await mounted.files.write("default", b"a", data("a", 5000))
        mounted.files.held = 2
        assert await mounted.call("wait", paths=["default"]) == {"files": 1, "bytes": 5000}
        await mounted.files.write("default", b"b", data("b", 5000))
        mounted.files.held = 10**6
        with pytest.raises(ControlError, match="mnt/default/b: not sealed yet"):
            await mounted.call("wait", paths=["default"])

    run_mounted(small_settings(tmp_path), body)


def test_wait_takes_a_close_that_is_on_its_way(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        key = await mounted.files.write("default", b"a", data("a", 5000))
        mounted.files.opened.add(key[1])

        async def release_soon() -> None:
            await trio.sleep(0.3)
            mounted.files.opened.clear()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release_soon)
            assert await mounted.call("wait", paths=["default/a"]) == {"files": 1, "bytes": 5000}
        assert state(mounted, b"a") == ObjectState.PUBLISHED

    run_mounted(small_settings(tmp_path), body)


def test_verbs_see_what_the_channel_created_a_moment_ago(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        async def fold() -> None:
            mounted.files.catches_up = trio.lowlevel.checkpoint
            await mounted.files.write("default", b"born", data("b", 3000))

        mounted.files.catches_up = fold
        assert await mounted.call("wait", paths=["default/born"]) == {"files": 1, "bytes": 3000}

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.expects_warnings
def test_a_remote_that_is_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path, timeout_s=1.0)

    def away(*_: object, **__: object) -> str:
        raise RemoteUnavailableError("away")

    async def body(mounted: FakeMounted) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(mounted.volume.bare_remote, "put_blob", away)
            await mounted.files.write("default", b"a", data("a", 5000))
            started_s = trio.current_time()
            with pytest.raises(ControlError, match=r"does not answer: nothing moved for 1 s.*--no-wait"):
                await mounted.call("flush")
            assert trio.current_time() - started_s < 20
            assert await mounted.call("flush", wait=False) == {"files": 1, "bytes": 5000}
        with trio.fail_after(30):
            assert await mounted.call("wait", paths=["default/a"]) == {"files": 1, "bytes": 5000}

    run_mounted(settings, body)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("comes_back", [True, False])
def test_wait_asks_again_when_the_breaker_lets_it(tmp_path: Path, comes_back: bool) -> None:
    """The remote is back, but is not asked before its cool-down is over, which is later than patience lasts."""
    settings = small_settings(tmp_path, timeout_s=0.5, retries=0)
    remote, away = tmp_path / "remote", tmp_path / "away"

    async def body(mounted: FakeMounted) -> None:
        volume = mounted.volume
        await put_object(volume, "default", b"before", b"x")
        await volume.checkpoint("default")
        weather: Any = volume.bare_remote._weather  # type: ignore[attr-defined]
        remote.rename(away)
        await mounted.files.write("default", b"a", data("a", 5000))
        while weather.stats().breaker is not BreakerState.OPEN:
            with contextlib.suppress(ControlError):
                await mounted.call("wait", paths=["default/a"])
        weather._cool_down_s, weather._probe_at_s = 8.0, volume.env.monotonic_s() + 3.0
        if comes_back:
            away.rename(remote)
            with trio.fail_after(20):
                assert await mounted.call("wait", paths=["default/a"]) == {"files": 1, "bytes": 5000}
            return
        before = volume.remote.stats().unavailable
        with trio.fail_after(20), pytest.raises(ControlError, match="does not answer"):
            await mounted.call("wait", paths=["default/a"])
        assert volume.remote.stats().unavailable > before  # it was asked
        away.rename(remote)

    run_mounted(settings, body)


def test_undelete(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        for content in (b"old", b"newer"):
            await put_object(mounted.volume, "default", b"a", content)
            await mounted.volume.checkpoint("default")
            await unlink_object(mounted.volume, "default", b"a")
        back = await mounted.call("undelete", path="default/a")
        assert (back["path"], back["size"]) == (str(tmp_path / "mnt/default/a"), 5)
        assert mounted.channel.invalidated == [(namespace.root_ino(TENANT), b"a")]
        assert await read_object(mounted.volume, (TENANT, mounted.ino(TENANT, b"a"), 1), 0, 9) == b"newer"
        with pytest.raises(ControlError, match="there is a file of that name"):
            await mounted.call("undelete", path="default/a")
        with pytest.raises(ControlError, match="nothing of that name"):
            await mounted.call("undelete", path="default/b")
        for path in ("default", "."):
            with pytest.raises(ControlError, match="name a file in a tenant"):
                await mounted.call("undelete", path=path)
        with pytest.raises(ControlError, match="no such file"):
            await mounted.call("undelete", path="default/no/b")

    run_mounted(small_settings(tmp_path), body)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        name = b"caf\xe9"
        await put_object(mounted.volume, "default", name, b"x")
        path = f"default/{os.fsdecode(name)}"
        assert (await mounted.call("status", path=path))["object"]["path"] == path
        assert (await mounted.call("warm", paths=[path]))["files"] == 1

    run_mounted(small_settings(tmp_path), body)


def test_a_read_only_volume_says_so(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    run_mounted(settings, _nothing)
    off: Settings = msgspec.structs.replace(
        settings, manifest=msgspec.structs.replace(settings.manifest, enabled=False)
    )

    async def body(mounted: FakeMounted) -> None:
        assert (await mounted.call("status"))["mount"]["read_only"]

    run_mounted(off, body)


async def _nothing(_: FakeMounted) -> None:
    pass


def test_many_files_are_waited_for_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits does not stop the others: each look takes some of the files, empty ones too, until all are over."""
    monkeypatch.setattr(durable, "LOOK_AT_FILES", 2)
    looks: list[int] = []
    real = durable._drop_done

    def counted(volume: Volume, left: deque[tuple[Key, int]]) -> int:
        before = len(left)
        try:
            return real(volume, left)
        finally:
            looks.append(before - len(left))

    monkeypatch.setattr(durable, "_drop_done", counted)

    async def body(mounted: FakeMounted) -> None:
        for n in range(9):
            await mounted.files.write("default", b"%d" % n, b"x" * n if n % 2 else b"")
        done = await mounted.call("wait", paths=["default"])
        assert done["files"] == 9
        assert all(state(mounted, b"%d" % n) == ObjectState.PUBLISHED for n in range(9))
        assert sum(looks) == 9 and max(looks) <= 2

    run_mounted(small_settings(tmp_path), body)


def test_the_end(tmp_path: Path) -> None:
    """After an unmount that copies of the mount outlive: what is open in one of them keeps the daemon."""

    async def body(mounted: FakeMounted) -> None:
        key = await mounted.files.write("default", b"a", b"x")
        mounted.files.opened.add(key[1])
        with pytest.raises(ControlError, match=r"1 file\(s\) are \(default/a\) open in another mount namespace"):
            await mounted.call("end")
        assert not mounted.ended
        mounted.files.opened.clear()
        await mounted.call("end")
        assert mounted.ended

    run_mounted(small_settings(tmp_path), body)


def test_who_waits_is_told_for_what(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        told: list[Progress] = []
        heard = trio.Event()

        async def tell(progress: Progress) -> None:
            told.append(progress)
            heard.set()

        async def seal_when_heard(inos: object = None, *, begin: bool = False) -> int:
            await heard.wait()
            return 0

        await mounted.files.write("default", b"a", b"x")
        mounted.files.seal = seal_when_heard  # type: ignore[method-assign]
        await durable.sealed(mounted, tell)  # type: ignore[arg-type]
        assert told[-1] == Progress("seal", 0, 1, "files")
        heard = trio.Event()
        volume = mounted.volume
        never = volume.replication.end(TENANT) + 1_000_000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(durable.replicated, volume, {TENANT: never}, tell)
            await heard.wait()
            nursery.cancel_scope.cancel()
        assert (told[-1].what, told[-1].total, told[-1].unit) == ("log", never, "records")

    run_mounted(small_settings(tmp_path), body)
