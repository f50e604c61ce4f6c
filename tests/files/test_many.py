"""With many files open or unsealed, what is paid a tick, an open or a create stays what it is with few."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.files import Files, Mode, OpenFile
from aof2.engine.files.atchannel import AtChannel
from aof2.engine.files.rounds import LOOKS_A_TICK, Rounds
from tests.engine.helpers import MIB
from tests.files.helpers import FakeKernel, run_files, top, write
from tests.files.test_room import settings_of


def a_file(ino: int, mode: Mode = Mode.RANGED) -> OpenFile:
    file = OpenFile((1, ino, 1), "default", Path(f"/{ino}"))
    file.channel = AtChannel(mode)
    return file


def test_a_writer_is_looked_at_every_tick_and_idlers_in_turn() -> None:
    rounds = Rounds(looks=3)
    files = [a_file(ino) for ino in range(2, 22)]
    for file in files:
        rounds.add(file)
    busy = files[7]
    seen: list[set[int]] = []
    for _ in range(20):
        looked = rounds.next()
        assert len(looked) <= 6
        seen.append({file.ino for file in looked})
        for file in looked:
            rounds.looked_at(file, grew=file is busy)
    assert all(busy.ino in some for some in seen[-8:]), "one that grows is not looked at"
    for file in files:
        assert sum(file.ino in some for some in seen[-8:]) >= 1, "one is passed over"
    rounds.remove(busy)
    assert all(busy not in rounds.next() for _ in range(10))


@given(st.lists(st.tuples(st.integers(2, 9), st.booleans(), st.booleans())))
def test_counts_are_those_of_a_walk(steps: list[tuple[int, bool, bool]]) -> None:
    rounds = Rounds(looks=2)
    here: dict[int, OpenFile] = {}
    for ino, adds, passes in steps:
        file = here.get(ino) or a_file(ino, Mode.PASSTHROUGH if passes else Mode.RANGED)
        if adds:
            rounds.add(file)
            here[ino] = file
        else:
            rounds.remove(file)
            here.pop(ino, None)
        for mode in Mode:
            assert rounds.count(mode) == sum(1 for f in here.values() if f.channel.mode is mode)
        assert {f.ino for f in rounds} == set(here)


class Counted:
    """What is asked of the disk and of the catalog."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats = self.rows = 0
        stat, scan = OpenFile.stat, View.scan

        def counted_stat(file: OpenFile) -> os.stat_result:
            self.stats += 1
            return stat(file)

        def counted_scan(view: View, *args: Any, **kwargs: Any) -> Iterator[Any]:
            counts = t.UNPUBLISHED in args or t.DIRTY in args or t.RESIDENCY in args
            for row in scan(view, *args, **kwargs):
                self.rows += counts
                yield row

        monkeypatch.setattr(OpenFile, "stat", counted_stat)
        monkeypatch.setattr(View, "scan", counted_scan)


async def open_new(files: Files, name: str) -> tuple[int, int]:
    row, fh = await files.create(top(files.volume), name.encode(), os.O_RDWR, mode=0o644, uid=0, gid=0)
    return row.ino, fh


def paid(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """With so many writers open: stats in a second of ticks; rows for ten files made, written and closed."""
    found: list[int] = []

    async def body(files: Files, kernel: FakeKernel) -> None:
        for n in range(count):
            await open_new(files, f"open{n}")
        assert files.known.ledger.files == count
        counted = Counted(monkeypatch)
        await trio.sleep(1.1)
        found.append(counted.stats)
        counted.stats = counted.rows = 0
        for n in range(10):
            _, fh = await open_new(files, f"more{n}")
            await write(files, kernel, fh, 0, b"x" * 100)
            await files.release(fh)
        found.append(counted.rows)
        monkeypatch.undo()

    run_files(settings_of(root, "budget", hot_bytes=64 * MIB), body, passthrough=False)
    return found[0], found[1]


def test_a_tick_and_a_create_cost_the_same_with_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = paid(tmp_path / "few", 20, monkeypatch)
    many = paid(tmp_path / "many", 1200, monkeypatch)
    ticks = 6
    assert many[0] <= ticks * 2 * LOOKS_A_TICK, "every file is looked at, four times a second"
    assert many[1] <= few[1] + 50, "rows are scanned that grow with the files"
