"""SIGKILL to daemon, channel or both while files are written: what was acknowledged is there after the next mount."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.fs.mountpoint import NO_DAEMON
from tests.mount.rounds import Rounds
from tests.mount.world import World, alive, is_mounted, kill, refuses, wait_for, world

SEED = 20


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "w") as made:
        made.mount()
        yield made


def state_of(w: World, path: Path) -> str:
    row = w.json("status", path)
    assert isinstance(row, dict)
    return str(row["state"])


def test_rounds_of_load_and_kill(tmp_path: Path) -> None:
    with world(tmp_path / "w") as w:
        rounds = Rounds(w, SEED)
        for kind in ("daemon", "both", "mounting"):
            rounds.one(kind)
        assert rounds.acknowledged > 0


def test_a_mount_without_its_daemon_answers_enotconn(w: World) -> None:
    held = os.open(w.files / "held", os.O_RDWR | os.O_CREAT, 0o600)
    (w.files / "other").write_bytes(b"there")
    channel = w.channel_pid()
    kill(w.daemon_pid())
    wait_for(lambda: not alive(channel), "the channel to end after its daemon")
    assert is_mounted(w.mnt) and refuses(w.mnt)
    for call in (
        lambda: os.open(w.files / "other", os.O_RDONLY),
        lambda: os.fsync(held),
        lambda: os.mkdir(w.files / "d"),
    ):
        with pytest.raises(OSError) as e:
            call()
        assert e.value.errno in NO_DAEMON
    os.close(held)
    w.mount()
    assert (w.files / "other").read_bytes() == b"there"
    w.umount()
    w.verify()


def test_a_daemon_without_its_channel_ends_and_says_so(w: World) -> None:
    (w.files / "a").write_bytes(b"closed")
    daemon = w.daemon_pid()
    kill(w.channel_pid())
    wait_for(lambda: not alive(daemon), "the daemon to end after its channel")
    said = "\n".join(w.complaints())
    assert "the channel ended by itself" in said and "Traceback" not in said
    w.mount()
    assert (w.files / "a").read_bytes() == b"closed"
    w.umount()
    w.verify()


def test_what_was_unlinked_stays_unlinked(w: World) -> None:
    folder = w.files / "d"
    folder.mkdir()
    for i in range(300):
        (folder / f"f{i}").write_bytes(b"%d" % i)
    before_ns = folder.stat().st_mtime_ns
    for i in range(0, 300, 2):
        (folder / f"f{i}").unlink()
    told_ns = folder.stat().st_mtime_ns
    kill(w.daemon_pid())
    w.mount()
    assert {path.name for path in folder.iterdir()} == {f"f{i}" for i in range(1, 300, 2)}
    assert all((folder / f"f{i}").read_bytes() == b"%d" % i for i in range(1, 300, 2))
    assert before_ns < folder.stat().st_mtime_ns == told_ns
    with pytest.raises(FileNotFoundError):
        (folder / "f0").unlink()
    (folder / "f0").write_bytes(b"again")
    (folder / "f1").unlink()
    (folder / "f1").mkdir()
    w.umount()
    w.verify()
    w.mount()
    assert (folder / "f0").read_bytes() == b"again" and (folder / "f1").is_dir()


STUCK = """
import time, trio, trio.testing
from aof2.fs import daemon
from aof2.fs.channel_wire import ChannelError

daemon.END_WITHOUT_CHANNEL_MAX_S = 0.5

class Channel:
    answer = at_once = next_names = kinds = None

    async def run(self, *_, **__):
        raise ChannelError("killed")

    @property
    def channel(self):
        return self

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, time.sleep, 100)
        await trio.testing.wait_all_tasks_blocked()
        await daemon._until_gone(Channel(), Channel(), nursery.cancel_scope)

trio.run(main)
"""


def test_a_daemon_without_its_channel_does_not_wait_for_what_cannot_be_stopped() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Timeout" in done.stderr and "Thread" in done.stderr


@pytest.mark.parametrize("holds", ["descriptor", "mapping"])
def test_who_still_holds_a_file_writes_across_a_restart(w: World, holds: str) -> None:
    """A file that somebody can write to past the daemon is not sealed, whoever is the daemon now."""
    path = w.files / "held"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"." * 10_000)
    mapping = mmap.mmap(fd, 10_000)
    if holds == "mapping":
        os.close(fd)

    def put(data: bytes) -> None:
        if holds == "mapping":
            mapping[: len(data)] = data
        else:
            os.pwrite(fd, data, 0)

    kill(w.daemon_pid())
    put(b"dead")
    w.mount()
    assert path.read_bytes()[:4] == b"dead"
    put(b"next")
    (w.files / "later").write_bytes(b"x")
    wait_for(lambda: state_of(w, w.files / "later") == "published", "a file closed after it to be sealed")
    assert state_of(w, path) == "dirty"
    put(b"last")
    assert path.read_bytes()[:4] == b"last"
    mapping.close()
    if holds == "descriptor":
        os.close(fd)
    w.ok("wait", path)
    w.ok("evict", path)
    assert path.read_bytes() == b"last" + b"." * 9_996
    w.umount()
    w.verify("--remote")


def test_a_mapping_from_before_a_restart_is_not_evicted_under(w: World) -> None:
    path = w.files / "read"
    path.write_bytes(b"mapped" * 1000)
    w.ok("wait", path)
    with open(path, "rb") as f:
        mapping = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    kill(w.daemon_pid())
    w.mount()
    w.run("evict", path)
    assert mapping[:] == b"mapped" * 1000
    mapping.close()
    w.ok("evict", path)
    assert path.read_bytes() == b"mapped" * 1000


def test_killed_while_it_hashes_and_uploads(w: World) -> None:
    """Many closed files, none of them durable yet: each is whole after the restart, and uploads go on by themselves."""
    expected = {f"f{i}": os.urandom(200_000) for i in range(60)}
    for name, data in expected.items():
        (w.files / name).write_bytes(data)
    for wait_s in (0.45, 0.7):
        time.sleep(wait_s)
        kill(w.daemon_pid())
        w.mount()
    w.ok("wait", w.files)
    w.ok("evict", w.files)
    assert {name: (w.files / name).read_bytes() for name in expected} == expected
    w.umount()
    w.verify("--remote")
