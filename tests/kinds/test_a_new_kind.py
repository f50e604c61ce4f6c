"""A kind is a folder and a line: one that the engine does not know is mounted beside `files`, and asked everything."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.world import World, world

CONF = '[tenants.default]\nkind = "files"\n[tenants.talk]\nkind = "shouting"\nwords = "good morning"\n'


class ShoutingWorld(World):
    """Where the command has one kind more."""

    def command(self, verb: str, *args: object) -> list[str]:
        return [sys.executable, "-m", "tests.kinds.shouting", *super().command(verb, *args)[1:]]


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    made = ShoutingWorld(tmp_path, conf=CONF)
    try:
        made.mount()
        yield made
    finally:
        made.close()


def refused(path: Path, flags: int) -> int | None:
    try:
        os.close(os.open(path, flags, 0o644))
    except OSError as e:
        return e.errno
    return None


def test_a_kind_that_is_registered_is_served(w: World) -> None:
    talk = w.mnt / "talk"
    assert os.listdir(talk) == ["hello.txt"]
    assert (talk / "hello.txt").read_text() == "GOOD MORNING"
    assert (talk / "hello.txt").stat().st_size == len("good morning")
    assert sorted(os.listdir(w.mnt)) == [".aof2", "default", "talk"]
    # What it does not bring is refused, as a read-only kind's.
    assert refused(talk / "new", os.O_WRONLY | os.O_CREAT) == errno.EPERM
    assert refused(talk / "hello.txt", os.O_RDWR) == errno.EROFS
    for change in (lambda: (talk / "d").mkdir(), lambda: (talk / "hello.txt").unlink()):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(OSError, match="cross-device") as crossing:
        (talk / "hello.txt").rename(w.files / "hello.txt")
    assert crossing.value.errno == errno.EXDEV
    talk.chmod(0o750)
    os.setxattr(talk, "user.mood", b"loud")
    w.umount()
    w.mount()
    assert (talk.stat().st_mode & 0o7777, os.getxattr(talk, "user.mood")) == (0o750, b"loud")


def test_verbs_speak_of_it_as_of_any_tenant(w: World) -> None:
    (w.files / "file").write_bytes(b"beside it")
    w.ok("wait", w.mnt)
    w.ok("checkpoint", "talk", "--wait")
    tenants = {row["tenant"]: row["kind"] for row in json.loads(w.ok("status", "--json"))["tenants"]}
    assert tenants == {"default": "files", "talk": "shouting"}
    w.umount()
    w.verify("--remote")


@pytest.mark.usefixtures("w")
def test_a_release_without_the_kind_says_so(tmp_path: Path) -> None:
    with world(tmp_path / "elsewhere", conf=CONF) as plain:
        done = plain.run("mount")
    assert done.code == 1
    assert 'tenants.talk.kind = "shouting"' in done.err


def test_a_volume_with_a_kind_that_is_gone_does_not_mount(tmp_path: Path) -> None:
    made = ShoutingWorld(tmp_path, conf=CONF)
    try:
        made.mount()
        made.umount()
        again = World(tmp_path)
        done = again.run("mount")
        assert done.code == 1
        assert "of kind 99" in done.err
    finally:
        made.close()
