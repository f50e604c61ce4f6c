"""What a user may rely on: when bytes and names are safe, what a crash takes, what a lost remote does."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.fs.mountpoint import NO_DAEMON
from tests.posix.conftest import MODES
from tests.posix.helpers import code, names, opened
from tests.support.mount import MountedVolume, mounted_volume, until

BLOCK = 1 << 20


SOON = {"timeout": "1s", "retries": 1}


@pytest.fixture(params=list(MODES))
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MountedVolume]:
    """A mount to kill."""
    with mounted_volume(tmp_path, options=MODES[request.param], remote=SOON) as volume:
        yield volume


@pytest.fixture
def one(tmp_path: Path) -> Iterator[MountedVolume]:
    """The same where the mode does not matter."""
    with mounted_volume(tmp_path, remote=SOON) as volume:
        yield volume


def verify(volume: MountedVolume) -> None:
    ran = volume.aof2("verify", "--remote")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_is_read_is_durable_all_the_same(own: MountedVolume) -> None:
    """The writer closed it; a reader, which never does, keeps it neither from being sealed nor from being uploaded."""
    path = own.path / "log"
    with open(path, "wb") as out:
        out.write(b"one\n" * 1000)
        out.flush()
        reader = open(path, "rb")
    own.done("wait", path)
    assert os.getxattr(path, "user.aof2.durable") == b"1"
    with open(path, "ab") as out:
        out.write(b"two\n")
    own.done("checkpoint", "--wait")
    assert os.getxattr(path, "user.aof2.durable") == b"1"
    assert reader.read() == b"one\n" * 1000 + b"two\n"
    assert own.aof2("evict", path).returncode == 1  # in use
    reader.close()
    own.done("evict", path)
    assert path.read_bytes() == b"one\n" * 1000 + b"two\n"
    own.umount()
    verify(own)


def test_the_daemons_death_takes_nothing(own: MountedVolume) -> None:
    """Without any fsync: what a call has answered is there again, files being written too."""
    top = own.path
    (top / "closed").write_bytes(b"closed")
    (top / "d" / "e").mkdir(parents=True)
    os.symlink("closed", top / "link")
    (top / "old").write_bytes(b"moved")
    os.rename(top / "old", top / "d" / "new")
    os.link(top / "closed", top / "d" / "second")
    (top / "gone").write_bytes(b"gone")
    os.unlink(top / "gone")
    os.chmod(top / "closed", 0o640)
    os.setxattr(top / "closed", "user.x", b"kept")
    fd = os.open(top / "being-written", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 3_000_000)
    mapped = mmap.mmap(fd, 3_000_000)
    mapped[5:10] = b"by map"[:5]
    inode = (top / "d" / "new").stat().st_ino
    own.kill()
    assert code(os.statvfs, top) in {errno.errorcode[one] for one in NO_DAEMON}
    mapped.close()
    code(os.close, fd)
    own.remount()
    assert names(top) == ["being-written", "closed", "d", "link"]
    assert names(top / "d") == ["e", "new", "second"]
    assert (top / "link").read_bytes() == b"closed"
    assert (top / "d" / "new").read_bytes() == b"moved"
    assert (top / "d" / "new").stat().st_ino == inode
    assert ((top / "closed").stat().st_nlink, (top / "closed").stat().st_mode & 0o777) == (2, 0o640)
    assert os.getxattr(top / "closed", "user.x") == b"kept"
    written = (top / "being-written").read_bytes()
    assert len(written) == 3_000_000
    assert written[:5] == b"x" * 5
    if own.json("status")["mount"]["passthrough"]:
        assert written[5:10] == b"by ma"
    own.umount()
    verify(own)


def test_killed_over_and_over(own: MountedVolume) -> None:
    """Each life adds something, and everything of the lives before is there."""
    for life in range(3):
        (own.path / f"f{life}").write_bytes(b"%d" % life * 100_000)
        with opened(own.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
            os.write(fd, b"%d\n" % life)
        own.kill()
        own.remount()
        assert (own.path / "log").read_bytes() == b"".join(b"%d\n" % n for n in range(life + 1))
        for n in range(life + 1):
            assert (own.path / f"f{n}").read_bytes() == b"%d" % n * 100_000
    own.umount()
    verify(own)


def test_a_partly_fetched_file_survives_the_daemon(own: MountedVolume) -> None:
    """Written where it was not here, synced, killed: old and new bytes."""
    path = own.path / "f"
    data = os.urandom(3 * BLOCK + 777)
    path.write_bytes(data)
    own.evict(path)
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"NEW", BLOCK + 5)
        os.fsync(fd)
        own.kill()
    own.remount()
    assert path.read_bytes() == data[: BLOCK + 5] + b"NEW" + data[BLOCK + 8 :]
    own.umount()
    verify(own)


def test_an_unlinked_open_file_is_gone_after_the_daemon(one: MountedVolume) -> None:
    fd = os.open(one.path / "f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 1_000_000)
    os.unlink(one.path / "f")
    one.kill()
    code(os.close, fd)
    one.remount()
    assert names(one.path) == []
    one.umount()
    verify(one)
    left = [p for p in (one.state_dir / "hot_cache").rglob("*") if p.is_file() and p.stat().st_size]
    assert not left


def test_close_does_not_wait_for_the_remote_and_the_remote_gets_it(one: MountedVolume) -> None:
    path = one.path / "f"
    path.write_bytes(b"soon" * 1000)
    until(lambda: os.getxattr(path, "user.aof2.durable") == b"1")
    assert any(one.remote.rglob("*.blob"))


def test_umount_uploads_what_is_left(one: MountedVolume) -> None:
    for i in range(20):
        (one.path / str(i)).write_bytes(b"%d" % i * 1000)
    (one.path / "large").write_bytes(os.urandom(9 * BLOCK))
    one.umount()
    verify(one)
    one.remount()
    for i in range(20):
        assert os.getxattr(one.path / str(i), "user.aof2.durable") == b"1"
    one.evict(one.path)
    assert [(one.path / str(i)).read_bytes() for i in range(20)] == [b"%d" % i * 1000 for i in range(20)]


def test_an_empty_machine_gets_everything_back(one: MountedVolume, tmp_path: Path) -> None:
    (one.path / "d").mkdir()
    (one.path / "d" / "f").write_bytes(b"from the remote" * 1000)
    os.symlink("d/f", one.path / "l")
    one.umount()
    one.state_dir.rename(tmp_path / "lost")
    one.done("restore", "--from", f"file://{one.remote}")
    one.remount()
    assert (one.path / "l").read_bytes() == b"from the remote" * 1000


# -- the remote is away --------------------------------------------------------------------------------------------


def test_without_the_remote(own: MountedVolume) -> None:
    """What is here is read and written as ever; what is not fails with EIO after a while; and it all catches up."""
    here, away = own.path / "here", own.path / "away"
    here.write_bytes(b"here")
    away.write_bytes(os.urandom(2 * BLOCK))
    own.evict(away)
    assert here.read_bytes() == b"here"
    own.remote.rename(own.root / "unplugged")
    (own.path / "new").write_bytes(b"written without it")
    assert (own.path / "new").read_bytes() == b"written without it"
    assert here.read_bytes() == b"here"
    os.rename(own.path / "new", own.path / "renamed")
    with opened(own.path / "renamed", os.O_RDWR) as fd:
        os.pwrite(fd, b"W", 0)
        os.fsync(fd)
    assert away.stat().st_size == 2 * BLOCK
    assert code(away.read_bytes) == "EIO"
    assert os.getxattr(own.path / "renamed", "user.aof2.durable") == b"0"
    (own.root / "unplugged").rename(own.remote)
    assert len(away.read_bytes()) == 2 * BLOCK
    own.done("wait", own.path)
    assert os.getxattr(own.path / "renamed", "user.aof2.durable") == b"1"


# -- deleted and replaced ------------------------------------------------------------------------------------------


def test_undelete(one: MountedVolume) -> None:
    path = one.path / "f"
    path.write_bytes(b"precious" * 1000)
    one.done("wait", path)
    os.unlink(path)
    assert not path.exists()
    one.done("undelete", path)
    assert path.read_bytes() == b"precious" * 1000


def test_what_was_never_uploaded_cannot_be_undeleted(one: MountedVolume) -> None:
    path = one.path / "f"
    with opened(path) as fd:
        os.write(fd, b"too soon")
        os.unlink(path)
    assert one.aof2("undelete", path).returncode == 1


# -- eviction ------------------------------------------------------------------------------------------------------


def test_an_open_file_is_not_evicted(each_volume: MountedVolume, each_here: Path) -> None:
    path = each_here / "f"
    path.write_bytes(b"in use" * 1000)
    each_volume.done("wait", path)
    with opened(path, os.O_RDONLY) as fd:
        ran = each_volume.aof2("evict", path)
        assert ran.returncode == 1
        assert "open" in ran.stderr
        assert os.pread(fd, 6, 0) == b"in use"
    each_volume.evict(path)


def test_a_mapped_file_is_not_evicted_under_its_user(each_volume: MountedVolume, each_here: Path) -> None:
    """The descriptor is closed, the mapping lives: its bytes stay what they are."""
    path = each_here / "f"
    path.write_bytes(b"mapped" * 1000)
    each_volume.done("wait", path)
    with opened(path, os.O_RDONLY) as fd:
        view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    each_volume.aof2("evict", path)
    assert view[:] == b"mapped" * 1000
    view.close()


def test_readers_of_an_evicted_file_get_the_same_bytes(each_volume: MountedVolume, each_here: Path) -> None:
    """Several at once, each in its own order, of a file of which nothing is here."""
    path = each_here / "f"
    data = os.urandom(4 * BLOCK + 99)
    path.write_bytes(data)
    each_volume.evict(path)
    wrong: list[int] = []

    def work(step: int) -> None:
        with opened(path, os.O_RDONLY) as fd:
            for i in range(40):
                at = i * step * 104_729 % len(data)
                if os.pread(fd, 5000, at) != data[at : at + 5000]:
                    wrong.append(at)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert path.read_bytes() == data
