"""`wait`, the xattr, `checkpoint --wait`, `evict` and `umount` mean what they say: the remote alone restores it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.durable import (
    DirectoryCopier,
    DurableRounds,
    S3Copier,
    after_umount,
    ask,
    in_every_order,
    restored,
    wait,
)
from tests.mount.load import content
from tests.mount.outage import s3_world
from tests.mount.world import World, kill, world
from tests.support.seaweed import Seaweed, running_seaweed

DURABLE = "user.aof2.durable"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    remote = f'[remote]\nurl = "file://{tmp_path / "w" / "remote"}"\ntimeout = "2s"\n'
    with world(tmp_path / "w", remote=remote) as made:
        made.mount()
        yield made


@pytest.fixture
def copier(w: World) -> DirectoryCopier:
    return DirectoryCopier(w.root / "remote", w.root)


def log_objects(w: World, stream_id: int = 1) -> set[str]:
    return set(os.listdir(w.root / "remote" / "manifest" / str(stream_id)))


def test_rounds_on_a_directory(w: World, copier: DirectoryCopier) -> None:
    DurableRounds(w, copier, seed=1).run(3)


def test_rounds_on_seaweedfs(tmp_path: Path, server: Seaweed) -> None:
    with s3_world(tmp_path / "w", server, prefix="rounds", timeout="30s") as w:
        w.mount()
        DurableRounds(w, S3Copier(server, "rounds"), seed=2).run(2)


def test_what_is_closed_in_every_order_is_there_after_umount(w: World, copier: DirectoryCopier) -> None:
    in_every_order(w, 150, seed=3)
    after_umount(w, copier)


def test_a_published_file_that_is_renamed_since_is_waited_for(w: World, copier: DirectoryCopier) -> None:
    (w.files / "a").write_bytes(b"bytes")
    wait(w, "a")
    assert os.getxattr(w.files / "a", DURABLE) == b"1"
    (w.files / "dir").mkdir()
    (w.files / "a").rename(w.files / "dir" / "b")
    (w.files / "dir" / "b").chmod(0o600)
    wait(w, "dir/b")
    kill(w.daemon_pid())
    with restored(w, copier, copier.copy("copy"), "back") as (back, _):
        assert (back.files / "dir" / "b").read_bytes() == b"bytes"
        assert (back.files / "dir" / "b").stat().st_mode & 0o777 == 0o600
        assert not (back.files / "a").exists()


def test_the_xattr_and_status_say_no_until_the_log_is_there(w: World) -> None:
    """The log's prefix takes nothing more: blobs arrive, commits do not."""
    (w.files / "d").mkdir()
    (w.files / "d" / "f").write_bytes(b"one")
    wait(w, "")
    folder = w.root / "remote" / "manifest"
    away = w.root / "elsewhere"
    folder.rename(away)
    folder.write_text("in the way")
    try:
        (w.files / "d" / "f").chmod(0o600)
        (w.files / "new").write_bytes(b"two")
        ask(w, "checkpoint", wait=False)
        for path in ("d/f", "new"):
            assert os.getxattr(w.files / path, DURABLE) == b"0"
            assert ask(w, "status", path=f"default/{path}")["object"]["durable"] is False
        failed = w.run("wait", w.files / "new")
        assert (failed.code, "not durable" in failed.err) == (1, True), failed
        lag = next(s for s in ask(w, "status")["volume"]["replication"] if s["tenant"] == "default")
        assert lag["here"] > lag["there"], lag
        assert lag["lag_records"] > 0, lag
        assert lag["stands_because"], lag
        evicted = w.run("evict", w.files / "new")
        assert evicted.code == 1, evicted
        kill(w.daemon_pid())
        offline = w.json("status", w.files / "d" / "f")
        assert isinstance(offline, dict)
        assert offline["durable"] is False
    finally:
        folder.unlink()
        away.rename(folder)
    w.mount()
    wait(w, "")
    assert os.getxattr(w.files / "d" / "f", DURABLE) == b"1"
    assert os.getxattr(w.files / "new", DURABLE) == b"1"
    assert w.run("evict", w.files / "new").code == 0


def test_a_renamed_directory_makes_what_is_in_it_not_durable(w: World) -> None:
    (w.files / "a" / "b").mkdir(parents=True)
    (w.files / "a" / "b" / "f").write_bytes(b"one")
    os.link(w.files / "a" / "b" / "f", w.files / "link")
    wait(w, "")
    (w.files / "other").write_bytes(b"")  # a name beside it changes nothing
    assert os.getxattr(w.files / "a" / "b" / "f", DURABLE) == b"1"
    (w.files / "a").rename(w.files / "c")
    states = {os.getxattr(w.files / name, DURABLE) for name in ("c/b/f", "link")}
    assert states == {b"0"}, "unless the log was quicker than two getxattr"
    wait(w, "")
    assert os.getxattr(w.files / "link", DURABLE) == b"1"


def test_waits_share_uploads(w: World) -> None:
    files = 100
    for n in range(files):
        (w.files / f"f{n}").write_bytes(content(n, 100))
    wait(w, "")
    before = log_objects(w)
    for n in range(files):
        (w.files / f"f{n}").chmod(0o600)
    go = threading.Barrier(files)
    failed: list[object] = []

    def one(n: int) -> None:
        go.wait()
        try:
            wait(w, f"f{n}")
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(files)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(log_objects(w) - before) <= 10


def test_an_idle_log_is_left_alone_by_waits(w: World) -> None:
    """The log's own upload bookkeeping is nothing to wait for: it would never end."""
    (w.files / "f").write_bytes(b"one")
    w.ok("checkpoint", "--wait")
    wait(w, "")
    ask(w, "flush", wait=True)
    before = log_objects(w)
    for _ in range(20):
        wait(w, "f")
    assert log_objects(w) == before


def test_umount_says_what_is_not_replicated(w: World) -> None:
    (w.files / "f").write_bytes(b"one")
    wait(w, "")
    folder = w.root / "remote" / "manifest"
    away = w.root / "elsewhere"
    folder.rename(away)
    folder.write_text("in the way")
    (w.files / "f").chmod(0o600)
    failed = w.run("umount")
    assert failed.code == 1, failed
    assert "not durable" in failed.err, failed
    folder.unlink()
    away.rename(folder)
    w.umount()
    status = w.json("status")
    assert isinstance(status, dict)
    assert [s for s in status["replication"] if s["lag_records"]] == []
