"""The log as tables: what happened to a small volume, told from its log alone, here or in the remote, and what the
rows say beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.inspect.rows import MANIFEST_DIR, open_rows
from aof2.engine.remote.open import open_remote
from aof2.engine.settings import Settings
from aof2.engine.tiering.noting import note_uses
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, put_object, read_object, run_volume, small_settings, unlink_object

np = pytest.importorskip("numpy", reason="the report extra is not installed")

from aof2.engine.history.history import History, read_history  # noqa: E402
from aof2.engine.history.sources import Log  # noqa: E402

SIZE = 100 * KIB
FILES = 6
TENANT = 1


async def day(v: Volume) -> None:
    """Six files are made and uploaded; four are evicted; two of these come back, one of them twice; one is removed."""
    keys = [await put_object(v, "default", b"f%d" % i, bytes([i + 65]) * SIZE) for i in range(FILES)]
    await v.checkpoint("default")
    await v.evict(keys[:4])
    for key in (keys[0], keys[1], keys[5]):
        await read_object(v, key, 0, SIZE)
    await v.hydrator.settle()
    await v.evict([keys[0]])
    await read_object(v, keys[0], 0, SIZE)
    await v.hydrator.settle()
    await unlink_object(v, "default", b"f5")
    await note_uses(v)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = small_settings(tmp_path_factory.mktemp("history"), compression="none")
    run_volume(made, day)
    return made


def history_of(
    settings: Settings, *, local: bool = True, remote: bool = True, rows: Settings | None = None, **how: object
) -> History:
    store = open_remote(Env(), settings.remote) if remote else None
    directory = settings.volume.state_dir / MANIFEST_DIR if local else None
    try:
        with open_rows((rows or settings).volume.state_dir) as opened, opened.view() as view:
            return read_history(Log(directory, store), view, **how)  # type: ignore[arg-type]
    finally:
        if store is not None:
            store.close()


def test_what_happened(settings: Settings) -> None:
    found = history_of(settings)
    assert found.whole
    assert found.notes == []
    assert found.totals["seals"] == FILES
    assert found.totals["sealed_bytes"] == FILES * SIZE
    assert found.totals["evictions"] == 5
    assert found.totals["evicted_bytes"] == 5 * SIZE
    assert found.totals["misses"] == 3
    assert found.totals["hydrated_bytes"] == 3 * SIZE
    assert found.totals["returns"] == found.totals["quick_returns"] == found.returned["under a minute"] == 3
    assert found.totals["uploaded_bytes"] == FILES * SIZE
    assert found.types["SealSegment"] == FILES
    assert sum(found.types.values()) == found.records
    assert [(one.path, one.returns) for one in found.returners] == [("default/f0", 2), ("default/f1", 1)]
    assert found.cost.gets == 3
    assert found.cost.puts == sum(count for name, count in found.requests.items() if name.startswith("put_"))
    assert found.requests["put_pack"] == 1


def test_the_tiers_at_the_end_are_those_of_the_rows(settings: Settings) -> None:
    found = history_of(settings)
    hot = warm = 0
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        for chunk_id, here in view.scan(TENANT, t.RESIDENCY):
            chunk = view.get(TENANT, t.CHUNKS, chunk_id)
            assert chunk is not None
            hot += objects.mask_bytes(here.mask, chunk.length, settings.engine.block_bytes)
            warm += here.warm_bytes
    assert found.tiers["hot"] == hot == 4 * SIZE
    assert found.tiers["warm"] == warm
    last = {tier: found.series.values[f"{tier}_bytes"][-1] for tier in found.tiers}
    assert last == found.tiers


def test_directories_and_hours_add_up(settings: Settings) -> None:
    found = history_of(settings)
    assert [cell.directory for cell in found.hottest] == ["default"]
    assert sum(cell.misses for cell in found.heat) == found.totals["misses"] + found.totals["warm_misses"]
    assert sum(cell.fetched_bytes for cell in found.heat) == found.totals["hydrated_bytes"]
    assert sum(cell.evictions for cell in found.heat) == found.totals["evictions"]
    assert sum(cell.opens for cell in found.heat) == found.measured.uses


def test_opens_are_counted_as_hits_and_misses(settings: Settings) -> None:
    found = history_of(settings)
    assert (found.measured.uses, found.measured.missed) == (4, 3)
    assert found.hit_rate == 0.25
    same = found.what_if[0]
    assert same.hot_bytes == settings.cache.hot_bytes
    assert same.hit_rate == same.measured_rate == found.hit_rate


def test_the_remote_alone_tells_the_same(settings: Settings) -> None:
    """After a clean end the remote has the whole log but the records about its last upload."""
    here, there = history_of(settings), history_of(settings, local=False)
    assert there.whole
    assert there.tiers == here.tiers
    assert there.measured == here.measured
    for name in ("seals", "evictions", "hydrations", "returns", "uploaded_bytes"):
        assert there.totals[name] == here.totals[name]
    assert there.records <= here.records


def test_a_history_that_begins_at_a_snapshot_says_so(settings: Settings) -> None:
    """Retention took the first chunks here, and the remote is not asked: the sums begin with the snapshot's."""
    found = history_of(settings, remote=False)
    assert not found.whole
    assert found.tiers == history_of(settings).tiers
    assert found.totals["seals"] == 0


def test_a_log_without_its_beginning_says_so(settings: Settings, tmp_path: Path) -> None:
    copy = tmp_path / "manifest"
    shutil.copytree(settings.volume.state_dir / MANIFEST_DIR, copy)
    for path in copy.glob("*/snapshot_*"):
        path.unlink()
    found = read_history(Log(copy, None), None)
    assert not found.whole
    assert any("no snapshot says what was before" in note for note in found.notes)


def test_a_damaged_chunk_costs_its_records_alone(settings: Settings, tmp_path: Path) -> None:
    copy = small_settings(tmp_path)
    assert settings.remote.directory is not None
    assert copy.remote.directory is not None
    shutil.copytree(settings.remote.directory, copy.remote.directory, dirs_exist_ok=True)
    victim = min((copy.remote.directory / "manifest" / "0").glob("*.mlog"), key=lambda path: int(path.stem))
    data = bytearray(victim.read_bytes())
    data[80] ^= 1
    victim.write_bytes(data)
    found = history_of(copy, local=False, rows=settings)
    assert any(f"manifest/0/{victim.name}" in note for note in found.notes)
    assert found.totals["evictions"] == 5


def test_a_volume_without_history(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def nothing(v: Volume) -> None:
        await trio.lowlevel.checkpoint()

    run_volume(settings, nothing, parts=())
    found = history_of(settings)
    assert (found.hit_rate, found.what_if, found.heat, found.returners) == (None, [], [], [])
    assert found.tiers == {"hot": 0, "warm": 0, "remote": 0}
    empty = read_history(Log(None, None), None)
    assert (empty.records, empty.series.times_ms, empty.from_ms) == (0, [], 0)
