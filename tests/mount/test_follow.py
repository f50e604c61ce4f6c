"""A follower on its own machine: the writer's tree, at once where it is durable, and nothing that changes it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from aof2.fs.bench.seaweed import REGION
from tests.mount.following import FILES, Pair, pair, tree_of
from tests.support.mount import until
from tests.support.seaweed import running_seaweed

ROUNDS = 40
STREAMS = {**FILES, "events": {"kind": "append"}}


def test_a_follower_shows_the_writers_tree_and_takes_no_change(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        (p.writer.path / "dir").mkdir()
        (p.writer.path / "dir" / "file").write_bytes(b"content")
        (p.writer.path / "large").write_bytes(os.urandom(3 << 20))
        os.symlink("dir/file", p.writer.path / "link")
        p.durable()
        assert (p.there(p.writer.path / "dir" / "file")).read_bytes() == b"content"
        assert tree_of(p.follower.path) == tree_of(p.writer.path)
        (p.writer.path / "dir" / "file").rename(p.writer.path / "moved")
        (p.writer.path / "large").unlink()
        p.durable()
        until(lambda: _alike(p), "the follower does not follow")
        _refuses_changes(p)
        status = p.follower.json("status")["mount"]
        assert status["read_only"]
        assert status["follow"]["lag_s"] < 60
        assert p.follower.complaints() == []


def _alike(p: Pair) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the follower comes to know of a removal while it is looked at
        return tree_of(p.follower.path) == tree_of(p.writer.path)
    return False


def _refuses_changes(p: Pair) -> None:
    at = p.follower.path
    for change in (
        lambda: (at / "new").touch(),
        lambda: (at / "moved").write_bytes(b"x"),
        lambda: (at / "moved").unlink(),
        lambda: (at / "moved").rename(at / "other"),
        lambda: (at / "dir").rmdir(),
        lambda: (at / "made").mkdir(),
        lambda: (at / "moved").chmod(0o600),
        lambda: os.truncate(at / "moved", 0),
        lambda: os.setxattr(at / "moved", b"user.x", b"y"),
    ):
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EROFS
    refused = p.follower.aof2("checkpoint")
    assert refused.returncode == 1
    assert "where its writer is mounted" in refused.stderr


def test_what_is_durable_is_there_at_once(tmp_path: Path) -> None:
    """Names that were asked for before they were made, too: no look that found nothing is remembered."""
    with pair(tmp_path) as p:
        for number in range(ROUNDS):
            path = p.writer.path / f"round{number}"
            assert not p.there(path).exists()
            path.write_bytes(b"%d" % number)
            p.durable(path)
            assert p.there(path).read_bytes() == b"%d" % number


def test_an_open_file_keeps_its_generation(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        path, old, new = p.writer.path / "file", os.urandom(2 << 20), os.urandom(100)
        path.write_bytes(old)
        p.durable(path)
        with open(p.there(path), "rb", buffering=0) as held:
            assert held.read(4096) == old[:4096]
            path.write_bytes(new)
            p.durable(path)
            (p.writer.path / "after").write_bytes(b"")
            p.durable()
            assert p.there(p.writer.path / "after").exists()  # so the rows have the new generation
            assert os.fstat(held.fileno()).st_size == len(old)
            assert held.read() == old[4096:]
            held.seek(0)
            assert held.read() == old
        until(lambda: p.there(path).read_bytes() == new, "the new generation is not shown")
        assert p.there(path).stat().st_size == len(new)


def test_a_file_that_is_being_rewritten_shows_what_was_last_durable(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        path = p.writer.path / "file"
        path.write_bytes(b"first")
        p.durable(path)
        with open(path, "r+b") as f:
            f.write(b"second, not closed")
            f.flush()
            (p.writer.path / "beside").write_bytes(b"")
            p.durable(p.writer.path / "beside")
            assert p.there(p.writer.path / "beside").exists()
            assert p.there(path).read_bytes() == b"first"
            assert p.there(path).stat().st_size == 5
        p.durable(path)
        until(lambda: p.there(path).read_bytes() == b"second, not closed", "the new generation is not shown")


def test_caches_are_its_own(tmp_path: Path) -> None:
    """Warm, evict, pin and why of the follower; all of it is there after a remount."""
    with pair(tmp_path) as p:
        path = p.writer.path / "file"
        path.write_bytes(os.urandom(1 << 20))
        p.durable(path)
        there = p.there(path)
        assert there.read_bytes() == path.read_bytes()
        resident = lambda: os.getxattr(there, b"user.aof2.residency")  # noqa: E731
        until(lambda: p.follower.json("status", there)["hot_bytes"] == 1 << 20, "it is not recorded")
        p.follower.evict(there)
        assert resident() == b"0.000"
        assert os.getxattr(path, b"user.aof2.residency") == b"1.000"
        p.follower.done("pin", there)
        assert resident() == b"1.000"
        p.writer.evict(path)
        p.durable()
        events = [step["event"] for step in p.follower.json("why", there)["steps"]]
        assert events.count("HydrationDone") >= 2
        assert "LocalEvicted" in events
        p.follower.umount()
        assert not list((tmp_path / "remote" / "followers").glob("*.json"))
        p.follower.remount()
        assert resident() == b"1.000"
        assert p.follower.json("status", there)["pinned"]
        p.follower.kill()
        p.follower.remount()
        assert resident() == b"1.000"
        assert p.follower.aof2("verify").returncode == 0


def test_resident_data_is_served_while_the_remote_is_away(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        path = p.writer.path / "file"
        path.write_bytes(b"here")
        p.durable(path)
        assert p.there(path).read_bytes() == b"here"
        (tmp_path / "remote").rename(tmp_path / "away")
        until(lambda: p.follower.json("status")["mount"]["follow"]["away_since_ms"] > 0, "it is not noticed")
        assert p.there(path).read_bytes() == b"here"
        assert not p.there(p.writer.path / "none").exists()
        (tmp_path / "away").rename(tmp_path / "remote")
        (p.writer.path / "later").write_bytes(b"late")
        p.durable()
        until(lambda: (p.follower.path / "later").exists(), "it does not catch up by itself")
        assert p.follower.json("status")["mount"]["follow"]["away_since_ms"] == 0


def test_a_follower_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and streams, out of a bucket."""
    with running_seaweed(tmp_path / "weed") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket}/follow"
        remote = {"url": url, "endpoint_url": server.endpoint_url, "region": REGION, "timeout": "10s"}
        with pair(tmp_path, tenants=STREAMS, remote=remote) as p:
            for number in range(5):
                path = p.writer.path / f"round{number}"
                assert not p.there(path).exists()
                path.write_bytes(b"%d" % number)
                p.durable(path)
                assert p.there(path).read_bytes() == b"%d" % number
            stream = p.writer.mountpoint / "events" / "clicks"
            stream.mkdir()
            with open(stream / "_append", "a") as f:
                f.write("one\ntwo\n")
            p.writer.done("seal", stream)
            p.durable(stream)
            there = p.there(stream)
            assert (there / "00000000000000000000.jsonl").read_bytes() == b"one\ntwo\n"
            assert (there / "_tail.jsonl").read_bytes() == b""
            (raw,) = (stream / ".segments").glob("*.seg")
            assert p.there(raw).read_bytes() == raw.read_bytes()
            with pytest.raises(OSError) as raised:
                open(there / "_append", "a")
            assert raised.value.errno == errno.EROFS
            assert p.follower.complaints() == []


def test_the_writer_sees_its_followers(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        (p.writer.path / "file").write_bytes(b"x")
        p.durable()
        beats = tmp_path / "remote" / "followers"
        until(lambda: bool(list(beats.glob("*.json"))), "there is no heartbeat")
        p.writer.done("gc")  # which looks who follows
        (one,) = p.writer.json("status")["mount"]["followers"]
        assert one["live"]
        assert f"{one['id']}.json" in [path.name for path in beats.iterdir()]


def test_a_warm_standby_takes_over(tmp_path: Path) -> None:
    """With its cache warm; the writer that did not leave is fenced."""
    with pair(tmp_path) as p:
        path = p.writer.path / "file"
        path.write_bytes(os.urandom(1 << 20))
        p.durable(path)
        content = p.there(path).read_bytes()
        p.follower.done("pin", p.there(path))
        p.follower.umount()
        p.follower.options = []
        refused = p.follower.aof2("mount")
        assert refused.returncode == 1
        assert "--take" in refused.stderr
        p.writer.kill()
        p.follower.done("mount", "--take")
        assert os.getxattr(p.there(path), b"user.aof2.residency") == b"1.000"
        assert p.follower.json("status", p.there(path))["pinned"]
        (p.follower.path / "mine").write_bytes(b"written by the new writer")
        p.follower.done("wait", p.follower.path)
        assert p.there(path).read_bytes() == content
        refused = p.writer.aof2("mount")
        assert refused.returncode == 1
        assert "taken this volume over" in refused.stderr
        p.follower.umount()
        assert p.follower.aof2("verify", "--remote").returncode == 0


def test_a_folder_keeps_its_part(tmp_path: Path) -> None:
    with pair(tmp_path, mount=False) as p:
        p.writer.umount()
        refused = p.writer.aof2("mount", "-o", "follow")
        assert refused.returncode == 1
        assert "writer's" in refused.stderr
        p.follower.mount()
        p.follower.umount()
        p.follower.options = []
        p.follower.mount()  # the writer left: it becomes one
        (p.follower.path / "file").write_bytes(b"x")
        assert not p.follower.json("status")["mount"]["read_only"]
