"""The receipt of a durable file: the log up to there restores it, one record less does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.recovery import replay_stream
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.inspect.paths import Place, resolve
from aof2.engine.inspect.receipt import Receipt, find_receipt
from aof2.engine.inspect.rows import MANIFEST_DIR, open_rows, temporary_catalog
from aof2.engine.manifest.format import LogPosition
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, put_object, read_object, run_volume, small_settings

TENANT = 1


async def body(v: Volume) -> None:
    keys = [await put_object(v, "default", b"f%d" % n, bytes([n]) * 20 * KIB) for n in range(3)]
    await v.checkpoint("default")
    root = namespace.root_ino(TENANT)
    work = partial(namespace.rename, parent=root, name=b"f1", new_parent=root, new_name=b"moved")
    await result_of(v.writer.submit(TENANT, work))
    await v.evict([keys[2]])
    await read_object(v, keys[2], 0, 10)  # back again: no new publication
    await v.hydrator.settle()
    await put_object(v, "default", b"later", b"x")
    await v.checkpoint("default")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = small_settings(tmp_path_factory.mktemp("receipt"))
    run_volume(made, body, parts=("jobs",))
    return made


def receipt_of(settings: Settings, path: str) -> tuple[Receipt, Place]:
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        place = resolve(view, settings.volume.mountpoint, path)
        assert place is not None
        found = find_receipt(view, settings.volume.state_dir / MANIFEST_DIR, place)
        assert found is not None
        return found, place


def is_whole(settings: Settings, place: Place, upto: LogPosition) -> bool:
    """Whether the log up to there has the file under its name, published."""
    with temporary_catalog() as catalog:
        folder = settings.volume.state_dir / MANIFEST_DIR / str(TENANT)
        replay_stream(Env(), catalog, folder, TENANT, upto=upto, quiet=True)
        with catalog.view() as view:
            row = view.get(TENANT, t.OBJECTS, (place.inode.ino, 1))
            name = view.get(TENANT, t.DENTRIES, (namespace.root_ino(TENANT), place.name.encode()))
    return row is not None and row.state == ObjectState.PUBLISHED and name is not None


@pytest.mark.parametrize("name", ["f0", "moved", "f2", "later"])
def test_the_log_up_to_there_has_the_file_and_not_before(settings: Settings, name: str) -> None:
    found, place = receipt_of(settings, f"default/{name}")
    assert found.exact
    assert found.stream_id == TENANT
    at = LogPosition(found.chunk_index, found.chunk_offset, found.ordinal)
    assert is_whole(settings, place, at)
    ends = [one for one in commit_ends(settings) if one.ordinal < found.ordinal]
    assert not is_whole(settings, place, ends[-1])


def commit_ends(settings: Settings) -> list[LogPosition]:
    from aof2.engine.manifest.reader import Stream

    folder = settings.volume.state_dir / MANIFEST_DIR / str(TENANT)
    ends = []
    for chunk in Stream(folder).read():
        for record in chunk.records():
            if record.type_id == 15 and record.payload[:4] == b"\1\0\0\0":
                ends.append(LogPosition(chunk.index, record.chunk_offset + 72, record.ordinal + 1))
    return ends


def test_status_gives_it(settings: Settings, tmp_path: Path) -> None:
    """Of a file that is durable only: nothing of this volume's log is in the remote."""
    import json

    from tests.cli.logs import run

    made = small_settings(tmp_path)

    async def durable(v: Volume) -> None:
        await put_object(v, "default", b"f", b"x" * 100)
        await v.checkpoint("default")
        await trio.lowlevel.checkpoint()

    run_volume(made, durable)
    conf = tmp_path / "mount.conf"

    def status(of: Settings) -> dict:
        conf.write_text(
            f'[volume]\nmountpoint = "{of.volume.mountpoint}"\nstate_dir = "{of.volume.state_dir}"\n'
            f'[remote]\nurl = "{of.remote.url}"\n'
        )
        name = "default/f" if of is made else "default/f0"
        result = run("status", name, "--json", "--conf", conf)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    found = status(made)
    assert found["durable"]
    assert found["receipt"]["stream_id"] == TENANT
    assert found["receipt"]["exact"]
    assert found["receipt"]["ordinal"] > 0
    assert status(settings)["receipt"] is None
