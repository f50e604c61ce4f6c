"""The birth log: records as the channel writes them, folded once whatever ends when."""

from __future__ import annotations

import struct
import zlib
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.files import birthlog
from aof2.engine.files.birthlog import Birth, Release
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import small_settings

FH = 1 << 61


def record(kind: int, ino: int, *, parent: int = 0, name: bytes = b"", fh: int = FH, flags: int = 0) -> bytes:
    size = (birthlog.RECORD.size + len(name) + 7) & ~7
    fixed = birthlog.RECORD.pack(size, 0, kind, len(name), 0o100640, ino, parent, 5, 6, 10**18, fh, flags)
    body = (fixed + name).ljust(size, b"\0")[8:]
    return struct.pack("<II", size, zlib.crc32(body)) + body


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=8), st.data())
def test_a_cut_log_ends_at_a_whole_record(names: list[bytes], data: st.DataObject) -> None:
    records = [record(birthlog.BORN, i + 2, parent=1, name=name) for i, name in enumerate(names)]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole)))
    found = list(birthlog.parse(whole[:cut], check=True))
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    assert [r.end for r in found] == [end for end in ends if end <= cut]
    assert [r.name for r in found if isinstance(r, Birth)] == names[: len(found)]


@given(st.integers(8, 79), st.integers(1, 255))
def test_a_damaged_record_is_the_end(at: int, flip: int) -> None:
    data = bytearray(record(birthlog.BORN, 2, parent=1, name=b"abc") + record(birthlog.RELEASED, 2))
    data[at] ^= flip
    assert list(birthlog.parse(bytes(data), check=True)) == []


def born_log(volume: Volume, names: list[bytes]) -> tuple[Path, int]:
    """What a channel leaves behind: backing files and a log, nothing of it folded."""
    stream_id = volume.tenant("default").tenant_id
    top = namespace.root_ino(stream_id)
    first = volume.writer.call(stream_id, partial(birthlog.reserve_inos, count=len(names)))
    data = b""
    for i, name in enumerate(names):
        path = volume.hot.path("default", first + i, 1)
        volume.env.make_dirs(path.parent)
        path.write_bytes(b"content of " + name)
        data += record(birthlog.BORN, first + i, parent=top, name=name, fh=FH | i)
        data += record(birthlog.RELEASED, first + i, fh=FH | i)
    folder = volume.state_dir / "births"
    volume.env.make_dirs(folder)
    log = folder / birthlog.log_name(stream_id, 1)
    log.write_bytes(data)
    return log, first


def names_of(volume: Volume) -> dict[bytes, int]:
    stream_id = volume.tenant("default").tenant_id
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
            logs.append(log.read_bytes() + record(birthlog.BORN, 99, parent=1, name=b"torn")[:-1])
            log.write_bytes(logs[0])

    async def recovered() -> None:
        async with open_volume(settings, parts=()) as volume:
            found = names_of(volume)
            assert sorted(found) == [b"a", b"b", b"c"]
            assert sorted(volume.dirty_inos) == sorted(found.values())
            assert not list((volume.state_dir / "births").iterdir())
            stream_id = volume.tenant("default").tenant_id
            with volume.catalog.view() as view:
                row = namespace.inode(view, stream_id, found[b"a"])
            assert row is not None
            assert (row.mode, row.uid, row.gid, row.mtime_ns, row.nlink) == (0o100640, 5, 6, 10**18, 1)
            work = partial(namespace.unlink, parent=namespace.root_ino(stream_id), name=b"b")
            await result_of(volume.writer.submit(stream_id, work))
            # The old log is back: the machine went down before its unlink was on the disk.
            (volume.state_dir / "births" / birthlog.log_name(stream_id, 1)).write_bytes(logs[0])

    async def unchanged() -> None:
        async with open_volume(settings, parts=()) as volume:
            assert sorted(names_of(volume)) == [b"a", b"c"]

    trio.run(leave)
    trio.run(recovered)
    trio.run(unchanged)


def test_a_grant_that_was_lost_is_not_given_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_volume(small_settings(tmp_path), parts=()) as volume:
            stream_id = volume.tenant("default").tenant_id
            top = namespace.root_ino(stream_id)
            far = (stream_id << 40) + 5000
            birth = Birth(far, top, b"far", 0o100644, 0, 0, 1, FH, 0, 80)
            work = partial(birthlog.fold, births=[birth], position=1 << 40 | 80, chunk_bytes=1 << 20)
            await result_of(volume.writer.submit(stream_id, work))
            create = partial(namespace.create, parent=top, name=b"next", chunk_bytes=1 << 20)
            assert (await result_of(volume.writer.submit(stream_id, create))).ino == far + 1

    trio.run(main)


@pytest.mark.expects_warnings
def test_a_birth_whose_name_is_taken_is_said_and_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_volume(small_settings(tmp_path), parts=()) as volume:
            stream_id = volume.tenant("default").tenant_id
            top = namespace.root_ino(stream_id)
            births = [Birth((stream_id << 40) + 50 + i, top, b"same", 0o100644, 0, 0, 1, FH, 0, 80) for i in range(2)]
            work = partial(birthlog.fold, births=births, position=1 << 40 | 80, chunk_bytes=1 << 20)
            rows = await result_of(volume.writer.submit(stream_id, work))
            assert [row is not None for row in rows] == [True, False]
            with volume.catalog.view() as view:
                assert view.get(stream_id, t.COUNTERS, birthlog.POSITION) == 1 << 40 | 80

    trio.run(main)


def test_a_release_is_told_apart() -> None:
    (found,) = birthlog.parse(record(birthlog.RELEASED, 7, flags=1), 100, check=True)
    assert found == Release(7, FH, dropped=True, end=172)
