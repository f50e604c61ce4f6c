"""Streams in trouble: no room, a full disk, a disk that fails to sync, damage, a clock that goes back."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env, Files
from aof2.engine.errors import FatalIOError
from aof2.engine.segment.reader import SegmentReader
from tests.append.helpers import KIB, ROOT, World, run_streams, stream_settings

LINE = b"x" * 99 + b"\n"


class FailingFiles(Files):
    """A disk that is full, or fails to sync, of what is in `segments/`, while it is told to."""

    def __init__(self) -> None:
        self.full = False
        self.torn = False
        self.unsynced = False

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().preallocate(fd, offset, length)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self.torn and self._is_segment(fd):
            super().pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        if self.unsynced and self._is_segment(fd):
            raise FatalIOError("fsync failed")
        super().fsync(fd)

    def _is_segment(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")


def failed(e: pytest.ExceptionInfo[OSError], code: int) -> None:
    assert e.value.errno == code


def test_a_tenant_s_quota_holds_and_lets_go(tmp_path: Path) -> None:
    """Where nothing is uploaded, the writer is told; what was acknowledged stays."""

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        written = 0
        with pytest.raises(OSError) as e:
            while True:
                await w.write(fh, LINE * 20)
                written += 20
        failed(e, errno.EDQUOT)
        assert written
        usage = w.volume.quota.tenant_usage("events")
        assert usage.used_bytes + usage.reserved_bytes <= 256 * KIB
        assert await w.everything() == LINE * written

    settings = stream_settings(tmp_path, quota_bytes=256 * KIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aof2.engine.files.seek.RoomSeeker._patience_s", lambda _: 0.5)
        run_streams(settings, body, parts=())


def test_more_than_the_cache_holds_goes_through_it(tmp_path: Path) -> None:
    """Segments are sealed, uploaded and evicted under the writer."""

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        for n in range(400):
            await w.write(fh, (b"%d " % n + LINE) * 40)
            usage = w.volume.quota.usage
            assert usage.used_bytes + usage.reserved_bytes <= 512 * KIB
        await w.close(fh)
        await w.stream().seal()
        assert await w.sealed() == b"".join((b"%d " % n + LINE) * 40 for n in range(400))

    run_streams(stream_settings(tmp_path, hot_bytes=512 * KIB), body)


@pytest.mark.expects_warnings
def test_a_full_disk_takes_nothing_of_a_write(tmp_path: Path) -> None:
    files = FailingFiles()

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        await w.write(fh, LINE * 10 + b"begun ")
        files.full = True
        taken = 10
        with pytest.raises(OSError) as e:
            while True:
                await w.write(fh, b"here\n" + LINE * 50 + b"begun ")
                taken += 50
        failed(e, errno.ENOSPC)
        files.full = False
        await w.write(fh, b"ended\n")
        found = await w.everything()
        assert found.count(LINE) == taken
        assert found.endswith(b"begun ended\n")

    run_streams(stream_settings(tmp_path), body, env=Env(files=files))


def test_a_write_that_failed_half_way_leaves_no_trace(tmp_path: Path) -> None:
    files = FailingFiles()

    async def body(w: World) -> None:
        w.kind.streams.native = False
        await w.mkdir()
        fh = await w.open_append()
        await w.write(fh, LINE)
        files.torn = True
        with pytest.raises(OSError) as e:
            await w.write(fh, LINE * 3)
        failed(e, errno.EIO)
        files.torn = False
        await w.write(fh, b"after\n")
        await w.stream().seal()
        assert await w.sealed() == LINE + b"after\n"
        assert await w.raw_payloads(tmp_path) == [LINE, b"after\n"]

    run_streams(stream_settings(tmp_path), body, env=Env(files=files))


@pytest.mark.expects_warnings
def test_a_failed_sync_is_told_and_sealed_as_such(tmp_path: Path) -> None:
    files = FailingFiles()

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        await w.write(fh, b"one\n")
        files.unsynced = True
        with pytest.raises(OSError) as e:
            await w.opens.get(fh).sync()
        failed(e, errno.EIO)
        files.unsynced = False
        await w.write(fh, b"two\n")
        await w.stream().seal()
        assert await w.sealed() == b"one\ntwo\n"
        flags = []
        for name in w.ls("clicks/.segments"):
            if name.endswith(".seg"):
                (tmp_path / name).write_bytes(await w.read(f"clicks/.segments/{name}"))
                with SegmentReader(w.volume.env, tmp_path / name) as reader:
                    assert reader.footer is not None
                    flags.append(reader.footer.flush_failure)
        assert flags[0]  # what came while the flush failed may be in it, too

    run_streams(stream_settings(tmp_path), body, env=Env(files=files))


@pytest.mark.expects_warnings
def test_a_damaged_segment_is_neither_served_nor_written_on(tmp_path: Path) -> None:
    settings = stream_settings(tmp_path)

    async def write(w: World) -> None:
        await w.mkdir()
        await w.put(b"one\n" * 50)
        await w.stream().commit()

    run_streams(settings, write)
    [path] = (tmp_path / "state" / "segments").rglob("*.seg")
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # of the header
    path.write_bytes(data)

    async def look(w: World) -> None:
        assert await w.read("clicks/_tail.jsonl") == b""
        with pytest.raises(OSError) as e:
            await w.put(b"two\n")
        failed(e, errno.EIO)
        await w.mkdir(b"other")
        await w.put(b"fine\n", path="other")
        assert path.read_bytes() == data  # left as it is, for a person to look at

    run_streams(settings, look)


@pytest.mark.expects_warnings
def test_a_stream_with_the_number_of_one_that_was_lost_has_none_of_its_records(tmp_path: Path) -> None:
    """The log lost the mkdir with the power, the disk has the segment; and the next stream has that number again."""
    settings, inos = stream_settings(tmp_path / "now"), []

    async def write(w: World) -> None:
        await w.mkdir()
        await w.put(b"lost\n" * 50)
        inos.append(w.ino("clicks"))

    async def nothing(w: World) -> None: ...

    async def begin_anew(w: World) -> None:
        assert "clicks" not in w.ls()
        await w.mkdir()
        inos.append(w.ino("clicks"))
        await w.put(b"new\n")

    async def look(w: World) -> None:
        assert await w.everything() == b"new\n"

    run_streams(settings, nothing)
    shutil.copytree(tmp_path / "now", tmp_path / "before")
    run_streams(settings, write)
    shutil.move(tmp_path / "now" / "state" / "segments", tmp_path / "segments")
    shutil.rmtree(tmp_path / "now")
    shutil.move(tmp_path / "before", tmp_path / "now")
    shutil.rmtree(tmp_path / "now" / "state" / "segments", ignore_errors=True)
    shutil.move(tmp_path / "segments", tmp_path / "now" / "state" / "segments")
    for body in (begin_anew, look):
        run_streams(settings, body)
    assert inos[0] == inos[1]
    kept = [path.read_bytes() for path in (tmp_path / "now").rglob("*.torn")]
    assert len(kept) == 1 and b"lost\n" in kept[0]


@pytest.mark.expects_warnings
@pytest.mark.parametrize("which", ["payload", "index"])
def test_what_is_damaged_here_comes_from_the_remote(tmp_path: Path, which: str) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        await w.put(LINE * 60)
        await w.stream().seal()
        await w.volume.checkpoint("events")
        ino = w.ino("clicks/00000000000000000000.jsonl") + (which == "index")
        path = w.volume.hot.path("events", ino, 1)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert await w.sealed() == LINE * 60
        assert await w.raw_payloads(tmp_path) == [LINE] * 60

    run_streams(stream_settings(tmp_path), body)


def test_a_clock_that_goes_back_takes_no_record_along(tmp_path: Path) -> None:
    now_ms = [1_700_000_000_000]

    async def body(w: World) -> None:
        await w.mkdir()
        for n in range(6):
            await w.put(b"%d\n" % n)
            now_ms[0] += -60_000 if n % 2 else 1000
            if n == 3:
                await w.stream().seal()
        await w.stream().seal()
        assert await w.sealed() == b"0\n1\n2\n3\n4\n5\n"
        times: list[int] = []
        for name in sorted(w.ls("clicks/.segments")):
            if name.endswith(".seg"):
                (tmp_path / name).write_bytes(await w.read(f"clicks/.segments/{name}"))
                with SegmentReader(w.volume.env, tmp_path / name) as reader:
                    times += [record.timestamp_ms for record in reader.records()]
        assert times == sorted(times)

    run_streams(stream_settings(tmp_path), body, env=Env(now_ms=lambda: now_ms[0]))


def test_a_truncation_races_readers(tmp_path: Path) -> None:
    """A reader that has a segment open reads it to its end; one that comes later does not find it."""

    async def body(w: World) -> None:
        row = await w.mkdir()
        for n in range(8):
            await w.put(b"%d\n" % n * 300)
            await w.stream().seal()
        segments = [name for name in w.ls("clicks/.segments") if name.endswith(".seg")]
        handles = [await w.kind.open(w.ino(f"clicks/.segments/{name}"), os.O_RDONLY, ROOT) for name in segments]
        sizes = [w.kind.row(w.opens.get(fh).ino).size for fh in handles]

        async def read(fh: int, size: int) -> None:
            out = b""
            while part := await w.opens.get(fh).read(len(out), 1000):
                out += part
            assert len(out) == size
            await w.opens.get(fh).close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.kind.truncate_stream, row.ino, 4200)
            for fh, size in zip(handles, sizes, strict=True):
                nursery.start_soon(read, fh, size)
        assert [name for name in w.ls("clicks") if name[0].isdigit()] == [f"{4200:020d}.jsonl"]
        assert await w.read(f"clicks/{4200:020d}.jsonl") == b"7\n" * 300
        with w.volume.catalog.view() as view:
            assert not list(view.scan(row.ino >> 40, t.NAMELESS))  # what no reader has any more is gone

    run_streams(stream_settings(tmp_path), body)
