"""The positions of a log here and there: what is in between, by file, and the same when it is read from the folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from aof2.engine import namespace
from aof2.engine.catalog.recovery import open_catalog
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.manifest.writer import LogSettings
from aof2.engine.replicate import position as p
from aof2.engine.replicate.position import Replication
from aof2.engine.replicate.tail import read_tail

STREAM = 1


class Logged:
    """A catalog whose commits are noted, and nothing uploaded but what the test says."""

    def __init__(self, root: Path) -> None:
        self.manifest = root / "manifest"
        (self.manifest / str(STREAM)).mkdir(parents=True)
        self.opened = open_catalog(Env(), root / "catalog", self.manifest, LogSettings())
        self.target = CatalogTarget(Env(), self.opened.catalog, self.opened.streams, None)
        self.replication = self.target.observer = Replication(Env())
        self.writer = CatalogWriter(self.target).start()
        self.writer.call(STREAM, namespace.make_root)
        self.root = namespace.root_ino(STREAM)

    def make(self, name: bytes, parent: int | None = None, *, directory: bool = False) -> int:
        make = namespace.mkdir if directory else namespace.create
        more = {} if directory else {"chunk_bytes": 1 << 20}
        work = partial(make, parent=parent or self.root, name=name, **more)
        return int(self.writer.call(STREAM, work).ino)

    def uploaded(self) -> None:
        self.replication.uploaded(STREAM, self.replication.end(STREAM))

    def has(self, ino: int) -> bool:
        with self.opened.catalog.view() as view:
            row = namespace.inode(view, STREAM, ino)
            return row is not None and self.replication.has_all_of(view, row)

    def close(self) -> None:
        self.writer.close()
        self.opened.catalog.close()


@pytest.fixture
def log(tmp_path: Path) -> Logged:
    return Logged(tmp_path)


def test_a_commit_counts_until_it_is_there(log: Logged) -> None:
    one = log.make(b"one")
    assert not log.has(one)
    log.uploaded()
    assert log.has(one)
    two = log.make(b"two")
    assert log.has(one)  # its directory's time changed, its names did not
    assert not log.has(two)
    log.close()


def test_the_name_of_an_ancestor_counts(log: Logged) -> None:
    top = log.make(b"top", directory=True)
    below = log.make(b"below", top, directory=True)
    file = log.make(b"file", below)
    log.uploaded()
    assert log.has(file)
    rename = partial(namespace.rename, parent=log.root, name=b"top", new_parent=log.root, new_name=b"other")
    log.writer.call(STREAM, rename)
    assert not log.has(file)
    log.uploaded()
    assert log.has(file)
    log.close()


def test_past_what_is_remembered_every_file_counts(log: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    old = log.make(b"old")
    log.uploaded()
    monkeypatch.setattr(p, "TOUCHED_MAX", 4)
    for n in range(5):
        log.make(b"%d" % n)
    assert not log.has(old)
    log.uploaded()
    assert log.has(old)
    log.close()


def test_the_folder_tells_the_same(log: Logged) -> None:
    for n in range(20):
        log.make(b"%d" % n)
    with log.opened.catalog.view() as view:
        tail = read_tail(view, log.manifest / str(STREAM), STREAM)
        live = log.replication._streams[STREAM]
        assert (tail.here, tail.there) == (live.here, live.there)
        assert set(tail.touched) == set(live.touched)
        assert set(tail.named) == set(live.named)
    log.close()


def test_marks_stay_few_and_the_lag_is_the_oldest_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "MARKS_MAX", 8)
    now_ms = 1000
    replication = Replication(Env(now_ms=lambda: now_ms))
    for n in range(1, 101):
        now_ms = 1000 * n
        replication.committed(STREAM, n, 10, [])
    (lag,) = replication.lags({})
    assert (lag.here, lag.there, lag.lag_records, lag.lag_bytes) == (100, 0, 100, 1000)
    assert lag.lag_s == 99.0
    replication.uploaded(STREAM, 100)
    (lag,) = replication.lags({})
    assert (lag.lag_records, lag.lag_bytes, lag.lag_s, lag.stands_since_ms) == (0, 0, 0.0, None)
