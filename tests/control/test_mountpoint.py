"""What is found at a mountpoint, without touching what may not answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.settings import Settings
from aof2.fs import launch
from aof2.fs import mountpoint as mp
from aof2.fs.cli.client import in_mount
from aof2.fs.cli.errors import CliError
from tests.control.helpers import FakeMounted, run_mounted
from tests.engine.helpers import run_volume, small_settings

LINE = "36 35 98:0 / {path} rw,noatime shared:1 - {fstype} {source} rw,user_id=0\n"


def info(tmp_path: Path, *lines: tuple[str, str, str]) -> Path:
    path = tmp_path / "mountinfo"
    text = "".join(LINE.format(path=p, fstype=f, source=s) for p, f, s in lines)
    path.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\ngarbage\n" + text)
    return path


def test_mountinfo(tmp_path: Path) -> None:
    table = info(tmp_path, ("/a\\040b", "tmpfs", "none"), ("/a\\040b", "fuse.aof2", "aof2"), ("/c\\134d", "ext4", "x"))
    assert mp.mounted_at(Path("/a b"), table) == mp.MountEntry("98:0", Path("/a b"), "fuse.aof2", "aof2")
    assert mp.mounted_at(Path("/c\\d"), table) is not None
    assert mp.mounted_at(Path("/a"), table) is None
    assert mp.mounted_at(Path("/")) is not None


def test_symlinks_before_the_mountpoint_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert mp.real_mountpoint(tmp_path / "link" / "mnt") == Path(os.path.realpath(tmp_path)) / "real" / "mnt"


@pytest.mark.parametrize("code", sorted(mp.NO_DAEMON))
def test_ask_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def statvfs(_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert mp.ask(tmp_path) is mp.Answer.DEAD


def test_ask(tmp_path: Path) -> None:
    assert mp.ask(tmp_path) is mp.Answer.LIVE
    assert mp.ask(tmp_path / "no") is mp.Answer.LIVE


def test_an_answer_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda _: over.wait(10))
    assert mp.ask(tmp_path, timeout_s=0.05) is mp.Answer.SILENT
    over.set()


def test_a_place_to_mount_on(tmp_path: Path) -> None:
    mp.make_mountpoint(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "file").touch()
    with pytest.raises(mp.MountError, match="not empty"):
        mp.make_mountpoint(tmp_path / "a")
    for path in (tmp_path / "a" / "file", tmp_path / "a" / "file" / "below"):
        with pytest.raises(mp.MountError, match="not a directory"):
            mp.make_mountpoint(path)


def test_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)
    mountpoint = settings.volume.mountpoint
    assert launch.prepare(settings)
    assert mountpoint.is_dir()
    monkeypatch.setattr(launch, "CHANGING_MAX_S", 0.2)

    async def mounted(m: FakeMounted) -> None:
        assert not await trio.to_thread.run_sync(launch.prepare, settings)
        moved = msgspec.structs.replace(settings.volume, mountpoint=tmp_path / "other")
        with pytest.raises(mp.MountError, match=f"mounted at {mountpoint}; umount it first"):
            await trio.to_thread.run_sync(launch.prepare, msgspec.structs.replace(settings, volume=moved))

    run_mounted(settings, mounted)
    entry = mp.MountEntry("0:1", mountpoint, "ext4", "/dev/x")
    monkeypatch.setattr(launch, "mounted_at", lambda _: entry)
    with pytest.raises(mp.MountError, match="something else is mounted there"):
        launch.prepare(settings)
    entry = entry._replace(fstype=mp.FSTYPE)
    with pytest.raises(mp.MountError, match="another aof2 volume"):
        launch.prepare(settings)
    detached: list[Path] = []
    monkeypatch.setattr(launch, "ask", lambda _: mp.Answer.DEAD)
    monkeypatch.setattr(launch, "detach", detached.append)
    assert launch.prepare(settings)
    assert detached == [mountpoint]


def test_somebody_else_has_the_volume_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(tmp_path)
    monkeypatch.setattr(launch, "CHANGING_MAX_S", 0.2)

    async def body(_: object) -> None:
        with pytest.raises(mp.MountError, match="another aof2 process"):
            launch.prepare(settings)

    run_volume(settings, body)  # a volume that is open without a mount


def test_a_daemon_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def body(_: object) -> None:
        ready.append(await trio.to_thread.run_sync(started.wait, 5))
        await trio.sleep(0.3)

    def prepare() -> None:
        started.set()
        ready.append(launch.prepare(settings))

    ready: list[bool] = []
    started = threading.Event()
    thread = threading.Thread(target=prepare)

    async def starting(v: object) -> None:
        thread.start()
        await body(v)

    run_volume(settings, starting)
    thread.join(20)
    assert ready == [True, True]


def test_paths_in_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Settings = small_settings(tmp_path)
    mnt = tmp_path / "mnt"
    (tmp_path / "link").symlink_to(mnt)
    (tmp_path / "deep").symlink_to("link/default/d")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)

    def one(text: object) -> str:
        return in_mount(settings, [str(text)])[0]

    assert one(mnt) == one("mnt/") == one("link") == "."
    assert one(mnt / "default" / "a") == one("mnt/default/a") == one("./mnt//default/x/../a") == "default/a"
    assert one("link/default/a") == "default/a"
    assert one("deep/a") == "default/d/a"
    assert one("default/a") == "default/a"  # as TENANT/…
    assert one("loop/a") == "loop/a"
    for text in ("/etc/passwd", tmp_path / "mntx" / "a", mnt / ".." / "x"):
        with pytest.raises(CliError, match="not below the mountpoint"):
            one(text)
    with pytest.raises(CliError, match="empty"):
        one("")
