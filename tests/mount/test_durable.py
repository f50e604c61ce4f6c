"""`wait`, the xattr, `checkpoint --wait`, `evict` and `umount` mean what they say: the remote alone restores it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.mount.portrait import differences, portrait
from tests.mount.world import HANG_S, World, kill, world
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


def until_replicated(w: World) -> None:
    """Until the log is there to its end, also what a caller does not wait for."""
    deadline_s = time.monotonic() + HANG_S
    while any(stream["lag_records"] for stream in ask(w, "status")["volume"]["replication"]):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_rounds_on_a_directory(w: World, copier: DirectoryCopier) -> None:
    DurableRounds(w, copier, seed=1).run(3)


def test_rounds_on_seaweedfs(tmp_path: Path, server: Seaweed) -> None:
    with s3_world(tmp_path / "w", server, prefix="rounds", timeout="30s") as w:
        w.mount()
        DurableRounds(w, S3Copier(server, "rounds"), seed=2).run(2)


@pytest.mark.parametrize("killing", [False, True])
def test_a_file_alone_is_restored_before_its_publication_is_there(tmp_path: Path, killing: bool) -> None:
    """Its blob went up beside the log of its seal, and no timer sends the rest of the log after them."""
    conf = '[manifest]\nrotation_period = "1h"\n[tenants.default]\nkind = "files"\n'
    with world(tmp_path / "w", conf=conf) as w:
        w.mount()
        copier = DirectoryCopier(w.root / "remote", w.root)
        for n in range(3):
            (w.files / f"f{n}").write_bytes(content(n, 4096))
            before = portrait(w.files)
            wait(w, f"f{n}")
            if killing:
                kill(w.daemon_pid())
            else:
                assert os.getxattr(w.files / f"f{n}", DURABLE) == b"1"
                assert ask(w, "status", path="default")["tree"]["durable"] is True
            with restored(w, copier, copier.copy(f"copy{n}"), f"back{n}") as (back, report):
                assert report["rescued"] == [f"default/f{n}"]
                assert report["lost"] == []
                assert differences(before, portrait(back.files)) == []
            if killing:
                w.mount()
            else:
                w.verify("--remote")
        w.umount()
        w.verify("--remote")


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


def change_mode(file: Path) -> None:
    file.chmod(0o600)


def write_anew(file: Path) -> None:
    file.write_bytes(os.urandom(200))


@pytest.mark.parametrize("change", [change_mode, write_anew])
def test_waits_share_uploads(w: World, change: Callable[[Path], None]) -> None:
    files = 100
    for n in range(files):
        (w.files / f"f{n}").write_bytes(content(n, 100))
    wait(w, "")
    before = log_objects(w)
    for n in range(files):
        change(w.files / f"f{n}")
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
    until_replicated(w)
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
