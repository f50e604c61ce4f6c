"""Two machines, one remote: the one that holds the log goes on, the one that was left behind refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.outage import s3_world
from tests.mount.world import World, kill, wait_for, world
from tests.support.seaweed import running_seaweed


@contextlib.contextmanager
def machine(root: Path, name: str) -> Iterator[World]:
    """A state_dir and a mountpoint of its own; the remote is everybody's."""
    (root / "remote").mkdir(exist_ok=True)
    remote = f'[remote]\nurl = "file://{root / "remote"}"\ntimeout = "5s"\n'
    conf = '[cache]\nhot_bytes = "256MiB"\nwarm_bytes = "0"\nmin_free = "1MiB"\n[tenants.default]\nkind = "files"\n'
    with world(root / name, remote=remote, conf=conf) as w:
        yield w


def restore(w: World, root: Path) -> None:
    done = w.run("restore", "--from", f"file://{root / 'remote'}")
    assert w.state.exists(), done.err


def durable(w: World) -> None:
    """Everything in the mount is in the remote, log included."""
    w.ok("wait", w.files)


def durable_log(w: World) -> None:
    """What is committed is in the remote."""
    seen: list[Path] = []
    while (now := sorted((w.root.parent / "remote" / "manifest").rglob("*.mlog"))) != seen:
        seen = now
        time.sleep(1.5)


def mount_json(w: World) -> dict[str, object]:
    found = json.loads(w.ok("status", "--json"))["mount"]
    assert isinstance(found, dict)
    return found


def is_fenced(w: World) -> bool:
    return bool(mount_json(w)["fenced"])


def test_an_old_machine_that_comes_back_refuses_and_the_healthy_one_goes_on(tmp_path: Path) -> None:
    with machine(tmp_path, "a") as a, machine(tmp_path, "b") as b:
        a.mount()
        (a.files / "first").write_bytes(b"one")
        durable(a)
        kill(a.daemon_pid())

        restore(b, tmp_path)
        b.mount()
        assert (b.files / "first").read_bytes() == b"one"
        (b.files / "second").write_bytes(b"two")
        durable(b)

        refused = a.run("mount")
        assert refused.code == 1
        assert "another machine" in refused.err
        assert "aof2 restore" in refused.err
        assert len(refused.err.strip().splitlines()) == 1, refused.err

        (b.files / "third").write_bytes(b"three")
        durable(b)
        assert not is_fenced(b)
        b.umount()
        b.verify("--remote")


def test_a_restore_that_is_older_than_its_writer_refuses(tmp_path: Path) -> None:
    with machine(tmp_path, "a") as a, machine(tmp_path, "b") as b:
        a.mount()
        (a.files / "first").write_bytes(b"one")
        durable(a)
        restore(b, tmp_path)
        (a.files / "second").write_bytes(b"two")
        durable(a)
        refused = b.run("mount")
        assert refused.code == 1, refused
        assert "has written this volume since" in refused.err
        (a.files / "third").write_bytes(b"three")
        durable(a)
        assert not is_fenced(a)


def unchangeable(folder: Path) -> list[str]:
    """Files there that not even root can remove."""
    shown = subprocess.run(["lsattr", "-R", folder], capture_output=True, text=True, check=False).stdout
    return [line for line in shown.splitlines() if not line.startswith("/") and "i" in line.partition(" ")[0]]


def test_a_machine_that_lost_its_volume_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    with machine(tmp_path, "a") as a, machine(tmp_path, "b") as b:
        a.mount()
        (a.files / "first").write_bytes(b"one")
        (a.files / "cold").write_bytes(b"cold" * 1000)
        durable(a)
        a.ok("evict", a.files / "cold")
        with open(a.files / "open", "wb") as f:
            f.write(b"before")
            f.flush()
            durable_log(a)
            restore(b, tmp_path)
            b.mount()
            (b.files / "theirs").write_bytes(b"b")
            with contextlib.suppress(OSError):
                (a.files / "late").write_bytes(b"late")
            wait_for(lambda: is_fenced(a), "the old writer to notice")
            wait_for(lambda: bool(mount_json(a)["read_only"]), "the mount to be read-only")
            for change in (
                lambda: (a.files / "new").write_bytes(b"x"),
                lambda: os.mkdir(a.files / "dir"),
                lambda: os.unlink(a.files / "first"),
                lambda: os.rename(a.files / "first", a.files / "other"),
                lambda: os.truncate(a.files / "open", 1),
                lambda: os.close(os.open(a.files / "open", os.O_WRONLY)),
                lambda: os.chmod(a.files / "first", 0o600),
            ):
                with pytest.raises(OSError) as e:
                    change()
                assert e.value.errno == errno.EROFS, e.value
            with pytest.raises(OSError) as e:
                f.write(b"after")
                f.flush()
            assert e.value.errno in (errno.EPERM, errno.EROFS)
            with contextlib.suppress(OSError):
                f.close()
        assert (a.files / "first").read_bytes() == b"one"
        assert (a.files / "cold").read_bytes() == b"cold" * 1000
        assert (a.files / "open").read_bytes() == b"before"
        assert "another" in str(mount_json(a)["read_only_why"])
        assert "fenced" in a.ok("status")
        assert "aof2_read_only 1" in (a.mnt / ".aof2" / "metrics").read_text()
        assert any("fenced" in line for line in a.complaints())
        a.run("umount")
        a.run("umount", "--no-wait")
        refused = a.run("mount")
        assert refused.code == 1
        assert "only here" in refused.err
        assert not unchangeable(a.state)
        assert sorted(os.listdir(b.files)) == ["cold", "first", "theirs"]
        b.umount()
        b.verify("--remote")


def test_a_remote_that_was_away_when_the_old_machine_came_back(tmp_path: Path) -> None:
    with (
        running_seaweed(tmp_path) as server,
        s3_world(tmp_path / "a", server, "machines") as a,
        s3_world(tmp_path / "b", server, "machines") as b,
    ):
        a.mount()
        (a.files / "first").write_bytes(b"one")
        a.umount()
        done = b.run("restore", "--from", f"s3://{server.bucket}/machines")
        assert b.state.exists(), done.err
        b.mount()
        (b.files / "second").write_bytes(b"two")
        b.umount()
        server.stop()
        a.mount()  # nobody to ask: what is here is served
        assert (a.files / "first").read_bytes() == b"one"
        (a.files / "offline").write_bytes(b"kept")
        server.start()
        wait_for(lambda: is_fenced(a), "the late claim to be refused")
        with pytest.raises(OSError) as e:
            (a.files / "new").write_bytes(b"x")
        assert e.value.errno == errno.EROFS
        assert (a.files / "offline").read_bytes() == b"kept"
        a.run("umount", "--no-wait")
        b.mount()
        assert (b.files / "second").read_bytes() == b"two"
        b.umount()
        b.verify("--remote")


def test_a_writer_that_was_killed_goes_on_by_itself(tmp_path: Path) -> None:
    with machine(tmp_path, "a") as a:
        for n in range(4):
            a.mount()
            (a.files / f"file{n}").write_bytes(b"%d" % n)
            if n % 2:
                durable(a)
            kill(a.daemon_pid())
        a.mount()
        assert sorted(os.listdir(a.files)) == [f"file{n}" for n in range(4)]
        assert not is_fenced(a)
        a.umount()
        a.verify("--remote")
