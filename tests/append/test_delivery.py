"""Delivery: a job's records come into a stream once, all of them or none, whatever happens in between."""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.aio import result_of
from aof2.engine.append import delivery, rows
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.kinds.kind import StagedFile, StagedJob
from aof2.engine.segment import format as fmt
from aof2.engine.settings import Settings
from aof2.engine.settings.model import RemoteSettings
from aof2.engine.verify.findings import Finding, Severity
from aof2.engine.verify.run import verify
from aof2.native import crc64
from aof2.native.segment_index import index_encode
from tests.append.helpers import World, run_streams, stream_settings
from tests.support.crash import Acks, PowerLoss, crash_cases, hits_of, run_until_crash


def staged(folder: Path, name: str, payloads: Sequence[bytes], *, ext_id: int = 0, time_ms: int = 5) -> StagedFile:
    """What a task of Spark writes, without Spark."""
    payload, count = b"".join(payloads), len(payloads)
    header = fmt.SegmentHeader(3, 0, 1, time_ms, 0, 0, 2**32 - 1, 0)
    encoded = index_encode(
        payload,
        memoryview(array("I", map(len, payloads))),
        memoryview(array("Q", [ext_id] * count)),
        memoryview(array("I", [0] * count)),
        timestamp_ms=time_ms,
        logical_first=0,
        crc64=crc64(fmt.encode_header(header)),
    )
    footer = fmt.SegmentFooter(
        3, count, 96 + 36 * count + len(payload), encoded.crc64, segment_id=1, last_record_ts_ms=time_ms
    )
    files = StagedFile(folder / f"{name}.payload", folder / f"{name}.idx")
    files.payload_path.write_bytes(payload)
    files.index_path.write_bytes(fmt.encode_header(header) + fmt.encode_footer(footer) + encoded.headers)
    return files


def troubles(settings: Settings) -> list[Finding]:
    """What verify finds wrong; a volume that did not end cleanly has notes."""
    return [f for f in verify(settings).findings if f.severity is not Severity.NOTE]


def lines(word: str, count: int, size: int = 0) -> list[bytes]:
    return [f"{word} {n}".encode() + b"." * size + b"\n" for n in range(count)]


def test_behind_what_is_there_once(tmp_path: Path) -> None:
    first, second = lines("a", 700), lines("b", 300)

    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"before\n")
        job = StagedJob(b"job-1", (staged(tmp_path, "a", first, ext_id=9), staged(tmp_path, "b", second)))
        done = await w.kind.deliver(row.ino, job)
        everything = b"before\n" + b"".join(first + second)
        assert (done.first_offset, done.next_offset, done.records) == (7, len(everything), 1000)
        assert await w.sealed() == everything  # in files of at most 16 KiB
        assert len([name for name in w.ls("clicks") if name[0].isdigit()]) > 2
        assert await w.raw_payloads(tmp_path) == [b"before\n", *first, *second]
        assert await w.kind.deliver(row.ino, job) == done
        assert await w.sealed() == everything
        await w.put(b"after\n")
        assert await w.everything() == everything + b"after\n"
        await w.stream().seal()
        assert await w.raw_payloads(tmp_path) == [b"before\n", *first, *second, b"after\n"]
        assert w.kind.list_xattrs(row.ino) == []

    settings = stream_settings(tmp_path / "volume")
    run_streams(settings, body)

    async def again(w: World) -> None:
        """The same question after a restart: an answer that got lost."""
        done = await w.kind.deliver(w.ino("clicks"), StagedJob(b"job-1", ()))
        assert done.records == 1000
        assert await w.sealed() == b"before\n" + b"".join(first + second) + b"after\n"

    run_streams(settings, again)
    assert troubles(settings) == []


def test_instead_of_what_is_there(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(*lines("old", 2000))
        await w.stream().seal()
        await w.put(b"not sealed\n")
        end = w.stream().end_position.next_logical
        done = await w.kind.deliver(row.ino, StagedJob(b"x", (staged(tmp_path, "n", lines("new", 5)),), overwrite=True))
        assert done.first_offset == end
        names = [name for name in w.ls("clicks") if name[0].isdigit()]
        assert names == [f"{end:020}.jsonl"]
        assert await w.read(f"clicks/{names[0]}") == b"".join(lines("new", 5))
        assert len(w.ls("clicks/.segments")) == 2
        nothing = await w.kind.deliver(row.ino, StagedJob(b"y", (), overwrite=True))
        assert (nothing.records, nothing.first_offset) == (0, nothing.next_offset)
        assert [name for name in w.ls("clicks") if name[0].isdigit()] == []

    run_streams(stream_settings(tmp_path / "volume"), body)


def test_times_do_not_go_back(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"now\n")
        await w.stream().seal()
        last_ms = w.stream().position.last_ts_ms
        await w.kind.deliver(row.ino, StagedJob(b"x", (staged(tmp_path, "s", lines("s", 3), time_ms=7),)))
        assert w.stream().position.last_ts_ms == last_ms
        later = last_ms + 10_000
        await w.kind.deliver(row.ino, StagedJob(b"y", (staged(tmp_path, "t", lines("t", 3), time_ms=later),)))
        assert w.stream().position.last_ts_ms == later

    run_streams(stream_settings(tmp_path / "volume"), body)


@pytest.mark.parametrize(
    ("payloads", "error"),
    [
        ([b"fine\n", b"no newline"], OSError),
        ([b"two\nlines\n"], OSError),
        ([b""], OSError),
        ([b"x" * 20_000 + b"\n"], OSError),
        (None, CorruptError),
    ],
    ids=["no newline", "two lines", "empty", "too long", "damaged"],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, payloads: list[bytes] | None, error: type[Exception]) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"before\n")
        good = staged(tmp_path, "good", lines("good", 2000))
        bad = staged(tmp_path, "bad", payloads or lines("bad", 50))
        if payloads is None:
            data = bytearray(bad.payload_path.read_bytes())
            data[100] ^= 1
            bad.payload_path.write_bytes(data)
        with pytest.raises(error):
            await w.kind.deliver(row.ino, StagedJob(b"x", (good, bad)))
        assert await w.everything() == b"before\n"
        done = await w.kind.deliver(row.ino, StagedJob(b"x", (good,)))
        assert (done.first_offset, done.records) == (7, 2000)
        assert len(list((w.volume.state_dir / "hot_cache").rglob("*.1"))) == 2 * len(
            [name for name in w.ls("clicks") if name[0].isdigit()]
        )

    settings = stream_settings(tmp_path / "volume")
    run_streams(settings, body)
    assert troubles(settings) == []


def test_beside_writers(tmp_path: Path) -> None:
    """Writers wait, and go on behind it; their lines stay whole and in order."""

    async def body(w: World) -> None:
        row = await w.mkdir()

        async def write(word: str) -> None:
            fh = await w.open_append()
            for some in lines(word, 200):
                await w.write(fh, some)
                await trio.lowlevel.checkpoint()
            await w.close(fh)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, "x")
            nursery.start_soon(write, "y")
            for n in range(4):
                job = StagedJob(f"j{n}".encode(), (staged(tmp_path, f"j{n}", lines(f"j{n}", 50)),))
                nursery.start_soon(w.kind.deliver, row.ino, job)
        await w.stream().seal()
        found = (await w.sealed()).splitlines(keepends=True)
        assert len(found) == 600
        for word in ("x", "y"):
            assert [line for line in found if line.startswith(word.encode() + b" ")] == lines(word, 200)
        for n in range(4):
            at = found.index(f"j{n} 0\n".encode())
            assert found[at : at + 50] == lines(f"j{n}", 50)

    run_streams(stream_settings(tmp_path / "volume"), body)


def test_files_of_a_segment_that_is_being_made_are_no_orphans(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        tenant_id = row.ino >> 40
        ids = await result_of(
            w.volume.writer.submit(tenant_id, partial(rows.open_segment, stream_ino=row.ino, base_offset=0))
        )
        paths = [w.volume.hot.path("events", ino, rows.GENERATION) for ino in (ids.payload_ino, ids.index_ino)]
        for path in paths:
            w.volume.env.files.close(w.volume.hot.create(path))
        await w.volume.janitor.sweep_orphans()
        assert all(path.exists() for path in paths)
        await result_of(w.volume.writer.submit(tenant_id, partial(rows.drop_segment, ids=ids)))
        await w.volume.janitor.sweep_orphans()
        assert not any(path.exists() for path in paths)

    run_streams(stream_settings(tmp_path / "volume"), body)


# -- crashes


def settings_in(root: Path, remote: Path) -> Settings:
    remote.mkdir(exist_ok=True)
    settings = stream_settings(root, segment_bytes=4096)
    return msgspec.structs.replace(settings, remote=RemoteSettings(url=f"file://{remote}"))


JOBS = 4


def job_of(folder: Path, n: int) -> StagedJob:
    folder.mkdir(exist_ok=True)
    return StagedJob(f"job-{n}".encode(), (staged(folder, f"{n}", lines(f"job{n}", 200)),))


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(w: World) -> None:
        row = await w.mkdir()
        for n in range(JOBS):
            await w.kind.deliver(row.ino, job_of(acks.path.with_name("staging"), n))
            acks.tell({"delivered": n})

    run_streams(settings_in(root, acks.path.with_name("remote")), body, env=env)


@pytest.mark.expects_warnings
def test_every_point(tmp_path: Path) -> None:
    """After a kill and after power loss: jobs that were answered are there, and those asked for again come once."""
    hits = hits_of(workload, tmp_path / "hits")
    killed_at: set[str] = set()
    rng = random.Random(15)
    for n, (point, nth) in enumerate(crash_cases(hits, delivery.CRASH_POINTS, per_point_max=2)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        assert crash.killed
        killed_at.add(point)
        answered = sum(isinstance(a, dict) and "delivered" in a for a in crash.acks)
        shutil.copytree(base / "remote", base / "remote2", dirs_exist_ok=True)
        disk = PowerLoss(crash).disk(base / "disk", rng)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        for root, remote in ((disk, base / "remote2"), (crash.root, base / "remote")):
            check(root, remote, answered, tmp_path / f"staging{n}")
    assert killed_at == set(delivery.CRASH_POINTS)


def check(root: Path, remote: Path, answered: int, folder: Path) -> None:
    settings = settings_in(root, remote)

    async def body(w: World) -> None:
        if "clicks" not in w.ls():  # it went with the power
            assert not answered
            await w.mkdir()
        there = (await w.sealed()).splitlines(keepends=True)
        assert len(there) in (200 * answered, 200 * (answered + 1))
        for n in range(JOBS):
            await w.kind.deliver(w.ino("clicks"), job_of(folder, n))
        expected = [line for n in range(JOBS) for line in lines(f"job{n}", 200)]
        assert (await w.sealed()).splitlines(keepends=True) == expected

    run_streams(settings, body)
    assert troubles(settings) == []
