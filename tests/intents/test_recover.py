"""Intent logs: records as both sides write them, folded in their order, once, whatever ends when."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.intents import fold
from aof2.engine.intents.format import RECORD, Intent, IntentKind, pack, parse
from aof2.engine.intents.log import FOLDER, log_name
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import small_settings

FH = 1 << 61
BORN, CLOSED, UNLINKED = IntentKind.BORN, IntentKind.CLOSED, IntentKind.UNLINKED


def birth(ino: int, parent: int, name: bytes, fh: int = FH) -> bytes:
    return pack(BORN, ino, parent=parent, name=name, mode=0o100640, uid=5, gid=6, time_ns=10**18, fh=fh)


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=8), st.data())
def test_a_cut_log_ends_at_a_whole_record(names: list[bytes], data: st.DataObject) -> None:
    records = [birth(i + 2, 1, name) for i, name in enumerate(names)]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole)))
    found = list(parse(whole[:cut], check=True))
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    assert [r.end for r in found] == [end for end in ends if end <= cut]
    assert [r.name for r in found] == names[: len(found)]


@given(st.integers(0, 79), st.integers(1, 255))
def test_a_damaged_record_is_the_end(at: int, flip: int) -> None:
    data = bytearray(birth(2, 1, b"abc") + pack(CLOSED, 2))
    data[at] ^= flip
    assert list(parse(bytes(data), check=True)) == []


def test_a_kind_of_a_later_release_is_the_end() -> None:
    data = pack(CLOSED, 2) + pack(99, 2) + pack(CLOSED, 3)  # type: ignore[arg-type]
    assert [r.end for r in parse(data, 100, check=True)] == [100 + RECORD.size]


def born_log(volume: Volume, names: list[bytes]) -> tuple[Path, int]:
    """What a channel leaves behind: backing files and a log, nothing of it folded."""
    stream_id = volume.tenants.named("default").tenant_id
    top = namespace.root_ino(stream_id)
    first = volume.writer.call(stream_id, partial(fold.reserve_inos, count=len(names)))
    data = b""
    for i, name in enumerate(names):
        path = volume.hot.path("default", first + i, 1)
        volume.env.make_dirs(path.parent)
        path.write_bytes(b"content of " + name)
        data += birth(first + i, top, name, FH | i)
        data += pack(CLOSED, first + i, fh=FH | i)
    folder = volume.state_dir / FOLDER
    volume.env.make_dirs(folder)
    log = folder / log_name(stream_id, 1)
    log.write_bytes(data)
    return log, first


def names_of(volume: Volume) -> dict[bytes, int]:
    stream_id = volume.tenants.named("default").tenant_id
    with volume.catalog.view() as view:
        return {
            name: row.ino for name, row in namespace.list_dir(view, stream_id, namespace.root_ino(stream_id), None, 100)
        }


def test_recovery_folds_what_was_born_and_never_twice(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    logs: list[bytes] = []

    async def leave() -> None:
        async with open_volume(settings, parts=()) as volume:
            log, _ = await trio.to_thread.run_sync(born_log, volume, [b"a", b"b", b"c"])
            logs.append(log.read_bytes() + birth(99, 1, b"torn")[:-1])
            log.write_bytes(logs[0])

    async def recovered() -> None:
        async with open_volume(settings, parts=()) as volume:
            found = names_of(volume)
            assert sorted(found) == [b"a", b"b", b"c"]
            assert sorted(volume.dirty_inos) == sorted(found.values())
            assert not list((volume.state_dir / FOLDER).iterdir())
            stream_id = volume.tenants.named("default").tenant_id
            with volume.catalog.view() as view:
                row = namespace.inode(view, stream_id, found[b"a"])
            assert row is not None
            assert (row.mode, row.uid, row.gid, row.mtime_ns, row.nlink) == (0o100640, 5, 6, 10**18, 1)
            work = partial(namespace.unlink, parent=namespace.root_ino(stream_id), name=b"b")
            await result_of(volume.writer.submit(stream_id, work))
            # The old log is back: the machine went down before its unlink was on the disk.
            (volume.state_dir / FOLDER / log_name(stream_id, 1)).write_bytes(logs[0])

    async def unchanged() -> None:
        async with open_volume(settings, parts=()) as volume:
            assert sorted(names_of(volume)) == [b"a", b"c"]

    trio.run(leave)
    trio.run(recovered)
    trio.run(unchanged)


def test_a_grant_that_was_lost_is_not_given_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_volume(small_settings(tmp_path), parts=()) as volume:
            stream_id = volume.tenants.named("default").tenant_id
            top = namespace.root_ino(stream_id)
            far = (stream_id << 40) + 5000
            intents = [Intent(BORN, far, top, b"far", 0o100644, 0, 0, 1, FH, 0, 80)]
            work = partial(fold.fold, intents=intents, number=1, chunk_bytes=1 << 20)
            await result_of(volume.writer.submit(stream_id, work))
            create = partial(namespace.create, parent=top, name=b"next", chunk_bytes=1 << 20)
            assert (await result_of(volume.writer.submit(stream_id, create))).ino == far + 1

    trio.run(main)


@pytest.mark.expects_warnings
def test_a_birth_whose_name_is_taken_is_said_and_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_volume(small_settings(tmp_path), parts=()) as volume:
            stream_id = volume.tenants.named("default").tenant_id
            top = namespace.root_ino(stream_id)
            first = (stream_id << 40) + 50
            intents = [Intent(BORN, first + i, top, b"same", 0o100644, 0, 0, 1, FH, 0, 80) for i in range(2)]
            work = partial(fold.fold, intents=intents, number=1, chunk_bytes=1 << 20)
            rows = await result_of(volume.writer.submit(stream_id, work))
            assert [row is not None for row in rows] == [True, False]
            with volume.catalog.view() as view:
                assert view.get(stream_id, t.COUNTERS, fold.POSITION) == 1 << 40 | 80

    trio.run(main)


def test_one_order_for_both_sides(tmp_path: Path) -> None:
    """A name is born, unlinked, born again: what is left is what the last record says."""
    settings = small_settings(tmp_path)
    inos: list[int] = []

    async def leave() -> None:
        async with open_volume(settings, parts=()) as volume:
            log, first = await trio.to_thread.run_sync(born_log, volume, [b"a", b"b"])
            inos.append(first)
            top = namespace.root_ino(volume.tenants.named("default").tenant_id)
            data = log.read_bytes()
            data += pack(UNLINKED, first, parent=top, name=b"a", time_ns=10**18 + 5)
            data += birth(first + 7, top, b"a", FH | 7)
            data += pack(UNLINKED, first + 1, parent=top, name=b"b", time_ns=10**18 + 9)
            volume.hot.path("default", first + 7, 1).write_bytes(b"again")
            log.write_bytes(data)

    async def recovered() -> None:
        async with open_volume(settings, parts=()) as volume:
            found = names_of(volume)
            assert found == {b"a": inos[0] + 7}
            with volume.catalog.view() as view:
                top = namespace.inode(view, 1, namespace.root_ino(1))
            assert top is not None and top.mtime_ns >= 10**18 + 9

    trio.run(leave)
    trio.run(recovered)
