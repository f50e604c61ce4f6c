"""The crash matrix of streams: killed at every named point of appending, committing and sealing.

After a kill every record that was acknowledged is there; after power loss every one that was committed is. Either way
each is there once, in order and without a gap, nothing torn is shown, and the volume is clean and goes on.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from aof2.engine.append import sealing
from aof2.engine.env import Env
from aof2.engine.segment import pointer, writer
from aof2.engine.settings import Settings
from aof2.engine.settings.model import RemoteSettings
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from tests.append.helpers import World, run_streams, stream_settings
from tests.engine.weather import until
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

POINTS = (*sealing.CRASH_POINTS, *writer.CRASH_POINTS, *pointer.CRASH_POINTS)
STREAMS = ("a", "b")
ROUNDS = 12
PARTS = 4  # of the matrix: each a test, which has its time


def line(stream: str, n: int) -> bytes:
    return f"{stream} {n} ".encode() + b"x" * (n * 37 % 300) + b"\n"


def settings_in(root: Path, remote: Path) -> Settings:
    remote.mkdir(exist_ok=True)
    settings = stream_settings(root, segment_bytes=4096)
    return msgspec.structs.replace(settings, remote=RemoteSettings(url=f"file://{remote}"))


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(w: World) -> None:
        for name in STREAMS:
            await w.mkdir(name.encode())
        handles = {name: await w.open_append(name) for name in STREAMS}
        for n in range(ROUNDS):
            for name, fh in handles.items():
                for i in range(5):
                    await w.write(fh, line(name, 5 * n + i))
                    acks.tell({"answered": name, "n": 5 * n + i})
                if n % 3 == 1:
                    await w.opens.get(fh).sync()
                    acks.tell({"synced": name, "n": 5 * n + 4})
            if n % 5 == 4:
                await w.stream("a").seal()
        await w.stream("b").drop_tail()

    run_streams(settings_in(root, acks.path.with_name("remote")), body, env=env)


def told(crash: Crash, what: str, name: str) -> int:
    """How many lines of a stream."""
    found = [a["n"] for a in crash.acks if isinstance(a, dict) and a.get(what) == name]
    return max(found, default=-1) + 1


def check(root: Path, remote: Path, there: dict[str, int], *, dropped: bool) -> None:
    settings = settings_in(root, remote)

    async def body(w: World) -> None:
        for name, count in there.items():
            if name not in w.ls():
                assert count == 0
                continue
            await w.stream(name).seal()  # or a seal that recovery began moves records while they are read
            lines = (await w.everything(name)).splitlines(keepends=True)
            assert lines == [line(name, n) for n in range(len(lines))]
            assert len(lines) >= count or (dropped and name == "b")
            await w.put(line(name, len(lines)), path=name)
            await w.stream(name).seal()
            assert await w.sealed(name) == b"".join(line(name, n) for n in range(len(lines) + 1))
            scratch = root / f"scratch-{name}"
            scratch.mkdir()
            assert len(await w.raw_payloads(scratch, name)) == len(lines) + 1
        await until(lambda: not list((w.volume.state_dir / "segments").rglob("*.seg")))  # gone a moment after the seal
        assert w.kind.streams.ledger.files == w.kind.streams.ledger.bytes == 0
        await w.volume.checkpoint("events")

    run_streams(settings, body)
    # Of a log that lost its end with the power, verify says what was evicted from it: nothing is wrong with that.
    assert [f for f in verify(settings).findings if f.kind is not Kind.EVICTION] == []


@pytest.mark.expects_warnings
@pytest.mark.parametrize("part", range(PARTS))
def test_every_point(tmp_path: Path, part: int) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    rng = random.Random(15 + part)
    cases = list(crash_cases(hits, POINTS, per_point_max=1))[part::PARTS]
    killed_at: set[str] = set()
    for n, (point, nth) in enumerate(cases):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        if not crash.killed:
            continue  # seals run beside appends: this run passed the point less often
        killed_at.add(point)
        dropped = told(crash, "answered", "b") == 5 * ROUNDS  # the last thing that is done
        shutil.copytree(base / "remote", base / "remote2", dirs_exist_ok=True)
        disk = PowerLoss(crash).disk(base / "disk", rng)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        check(disk, base / "remote2", {name: told(crash, "synced", name) for name in STREAMS}, dropped=dropped)
        check(crash.root, base / "remote", {name: told(crash, "answered", name) for name in STREAMS}, dropped=dropped)
        shutil.rmtree(base)
    assert killed_at == {point for point, _ in cases}
