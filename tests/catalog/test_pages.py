"""Snapshots that are taken while rows change: no reader is long, and the snapshot is one moment all the same."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.catalog import ops as o
from aof2.engine.catalog import pages, snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.snapshot import load_snapshot
from tests.catalog.helpers import Volume, volume
from tests.catalog.test_catalog import make_file, rows_of

FILES = 200
ROWS_A_PAGE = 16


def fill(v: Volume) -> None:
    for i in range(FILES):
        v.writer.call(1, changed_file(i))


def changed_file(i: int) -> Callable[[Batch], None]:
    def work(b: Batch) -> None:
        ino = make_file(b"f%d" % i, i)(b)
        b.apply(o.UpsertChunk(ChunkRow(i + 1, ino, 1, 0, i, b"h" * 32)))
        b.record(p.SegmentOpened(i, 1), segment_id=i + 1)

    return work


def removed_file(i: int) -> Callable[[Batch], None]:
    def work(b: Batch) -> None:
        b.delete(t.DENTRIES, (1, b"f%d" % i))
        b.apply(o.DeleteChunk(i + 1))
        b.record(p.LocalEvicted(i), segment_id=i + 1)

    return work


class Watched:
    """Does something after each view, on the thread that takes the snapshot, and counts the rows that one read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, between: Callable[[], object]) -> None:
        self.rows_max = self.views = 0
        self._between = between
        self._thread = threading.get_ident()
        counts: dict[int, int] = {}
        real_scan, real_exit = View.raw_scan, View.__exit__

        def scan(view: View, *args: Any) -> Iterator[tuple[bytes, bytes]]:
            for row in real_scan(view, *args):
                counts[id(view)] = counts.get(id(view), 0) + 1
                yield row

        def end(view: View, *exc: object) -> None:
            real_exit(view, *exc)
            if threading.get_ident() == self._thread:
                self.views += 1
                self.rows_max = max(self.rows_max, counts.pop(id(view), 0))
                self._between()

        monkeypatch.setattr(View, "raw_scan", scan)
        monkeypatch.setattr(View, "__exit__", end)


def rows_in(snapshot_id: int, v: Volume) -> dict[tuple[str, bytes], bytes]:
    snapshot = load_snapshot(v.directory(1), snapshot_id)
    prefix = t.STREAM.pack(1)
    return {
        (name.removeprefix(snapshots.SECTION_PREFIX), prefix + key): row
        for name, section in snapshot.sections.items()
        for key, row in snapshots.rows_of(section, name)
    }


def rows_now(v: Volume) -> dict[tuple[str, bytes], bytes]:
    return {key: row for key, row in rows_of(v).items() if key[0] not in t.DERIVED}


def test_no_view_is_longer_than_a_page_and_the_snapshot_is_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", ROWS_A_PAGE)
    with volume(tmp_path) as v:
        fill(v)
        todo = iter(
            [work for i in range(0, FILES, 8) for work in (changed_file(FILES + i), removed_file(FILES - 1 - i))]
        )

        def change_something() -> None:
            if (work := next(todo, None)) is not None:
                v.writer.call(1, work)

        with monkeypatch.context() as patch:
            watched = Watched(patch, change_something)
            taken = snapshots.take(v.env, v.catalog, v.writer, v.directory(1), 1)
        assert next(todo, None) is None, "too few pages for these changes"
        assert watched.views > FILES // ROWS_A_PAGE
        assert watched.rows_max <= ROWS_A_PAGE
        assert taken is not None
        assert rows_in(taken.snapshot_id, v) == rows_now(v)
        with v.catalog.view() as view:
            index = load_index(view, 1)
        assert load_snapshot(v.directory(1), taken.snapshot_id).index.entries == index.entries
        before = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    with volume(tmp_path) as v:
        assert rows_of(v) == before


def test_what_is_changed_after_the_last_view_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is read a little further than the view looks: those rows are as the view has them."""
    with volume(tmp_path) as v:
        fill(v)
        before = rows_now(v)
        real = pages.Touched.read_on
        calls = 0

        def read_on(touched: pages.Touched) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:  # within the last view
                writing = threading.Thread(target=lambda: v.writer.call(1, removed_file(3)))
                writing.start()
                writing.join()
            real(touched)

        monkeypatch.setattr(pages.Touched, "read_on", read_on)
        taken = snapshots.take(v.env, v.catalog, v.writer, v.directory(1), 1)
        assert taken is not None
        assert rows_in(taken.snapshot_id, v) == before
        now = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    with volume(tmp_path) as v:
        assert rows_of(v) == now


def test_a_damaged_end_of_the_log_still_gets_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with volume(tmp_path) as v:
        fill(v)
        views: list[View] = []
        real = Catalog.view

        def view_and_damage(catalog: Catalog) -> View:
            if not views:
                path = max(v.directory(1).glob("*.mlog"), key=lambda path: int(path.stem))
                with path.open("r+b") as f:
                    f.seek(80)
                    byte = f.read(1)
                    f.seek(80)
                    f.write(bytes([byte[0] ^ 1]))
            views.append(real(catalog))
            return views[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "view", view_and_damage)
            taken = snapshots.take(v.env, v.catalog, v.writer, v.directory(1), 1)
        assert taken is not None
        assert rows_in(taken.snapshot_id, v) == rows_now(v)
