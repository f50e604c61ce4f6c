"""The crash matrix of the log: killed at every named point, with any subset of the unsynced pages dropped.

The workload writes records numbered from 0, one segment each, and tells what it was promised. Afterwards: everything
synced is there; what is there ends at a commit; and after a kill alone (page cache intact), everything committed is.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.manifest import chunk, payloads, retention, snapshot, upload, writer
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition, ManifestIntegrityError
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from tests.manifest import replay
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

from .helpers import small

POINTS = (
    chunk.CRASH_POINTS
    + writer.CRASH_POINTS
    + snapshot.CRASH_POINTS
    + replay.CRASH_POINTS
    + retention.CRASH_POINTS
    + upload.CRASH_POINTS
)


class FolderRemote:
    """A remote outside the machine that loses power: its files are not the shadow's business."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        path = self.root / key.replace("/", "%")
        self.root.mkdir(exist_ok=True)
        assert not path.exists() or path.read_bytes() == data, f"{key} was put with other bytes"
        path.write_bytes(data)
        return "etag"

    def compose(self, key: str, sources: Sequence[str]) -> str:
        return self.put(key, b"".join((self.root / s.replace("/", "%")).read_bytes() for s in sources), {})

    def delete(self, keys: Iterable[str]) -> None:
        (key,) = keys
        (self.root / key.replace("/", "%")).unlink(missing_ok=True)


class Workload:
    """Appends, commits with and without sync, rotates, uploads, snapshots, retains, compacts, reopens."""

    def __init__(self, settings: LogSettings, rounds: int = 26) -> None:
        self.settings = settings
        self.rounds = rounds

    def __call__(self, env: Env, acks: Acks) -> None:
        root: Path = env.files.root  # type: ignore[attr-defined]
        directory = root / "1"
        remote = FolderRemote(acks.path.with_name("remote"))
        w = ManifestLogWriter.open(env, directory, self.settings)
        number = 0
        for i in range(self.rounds):
            number = self.append(w, number, i)
            acks.tell({"tried": number})
            w.commit(sync=i % 3 != 1)
            acks.tell({"synced" if i % 3 != 1 else "committed": number})
            if i % 5 == 4:
                # A large commit that nobody synced, sealed at once: header and bytes must not land in any order.
                number = self.append_many(w, number, 40)
                acks.tell({"tried": number})
                w.commit(sync=False)
                acks.tell({"committed": number})
            if i % 5 in (2, 4) and (sealed := w.rotate()):
                acks.tell({"synced": number})
                uploader = upload.ChunkUploader(env, 1, remote, appender(w), sleep_s=lambda _: None)
                uploader.upload(sealed)
            if i == 18:
                uploader.compact(1, 3, payloads.SnapshotMarker(5, 64, 1))
            if i in (8, 12, 16, 20):
                taken = replay.take_snapshot(w, replay.replay(directory))
                retention.apply(env, directory, taken.position)
            if i in (10, 19):
                w.close()
                self.leave_an_empty_chunk(env, directory)
                w = ManifestLogWriter.open(env, directory, self.settings)
        self.append(w, number, 1)  # never committed

    @classmethod
    def append(cls, w: ManifestLogWriter, number: int, i: int) -> int:
        return cls.append_many(w, number, 1 + i % 4)

    @staticmethod
    def append_many(w: ManifestLogWriter, number: int, count: int) -> int:
        batch = RecordBatch()
        for n in range(number, number + count):
            # Some records are larger than a page, so that a commit spans several.
            batch.add(payloads.UploadStarted("k" * (1000 if n % 5 == 0 else 10)), segment_id=n)
            batch.add(payloads.HydrationDone(n), segment_id=n)
        w.append_batch(batch)
        return number + count

    @staticmethod
    def leave_an_empty_chunk(env: Env, directory: Path) -> None:
        """What a power loss can leave after a commit without sync: a name with nothing behind it."""
        last = max(int(p.stem) for p in directory.glob("*.mlog"))
        fd = env.files.create(directory / f"{last + 1}.mlog")
        env.files.preallocate(fd, 0, 4096)
        env.files.close(fd)


def appender(w: ManifestLogWriter) -> upload.LogAppender:
    def append(batch: RecordBatch) -> LogPosition:
        w.append_batch(batch)
        return w.commit()

    return append


def recovered(directory: Path) -> int:
    """How many of the numbered records the log holds; they must be the first so many, whole."""
    if not directory.exists():
        return 0
    index = replay.replay(directory)
    numbers = sorted(index.entries)
    assert numbers == list(range(len(numbers)))
    assert all(index.entries[n].resident_bytes == n for n in numbers)
    return len(numbers)


def check(root: Path, crash: Crash, *, power_lost: bool) -> None:
    told = [a for a in crash.acks if isinstance(a, dict)]
    synced = max((a["synced"] for a in told if "synced" in a), default=0)
    committed = max((a.get("committed", a.get("synced", 0)) for a in told), default=0)
    tried = {0} | {a["tried"] for a in told if "tried" in a}
    directory = root / "1"
    count = recovered(directory)
    assert count in tried, "part of a commit"
    assert count >= (synced if power_lost else committed), "a promise was broken"
    with ManifestLogWriter.open(Env(), directory, small()) as w:
        assert recovered(directory) == count
        w.append(payloads.HydrationDone(count), segment_id=count)
    assert recovered(directory) == count + 1
    with ManifestLogWriter.open(Env(), directory, small()) as w:
        w.rotate()
    assert recovered(directory) == count + 1


def test_every_point(tmp_path: Path) -> None:
    workload = Workload(small())
    cases = list(crash_cases(hits_of(workload, tmp_path / "hits"), POINTS, per_point_max=4))
    rng = random.Random(20)
    for n, (point, nth) in enumerate(cases):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        assert crash.killed
        for unit in (4096, 512):
            loss = PowerLoss(crash, unit)
            for _ in range(3):
                check(loss.disk(base / "disk", rng), crash, power_lost=True)
        check(crash.root, crash, power_lost=False)
        shutil.rmtree(base)


def test_power_lost_at_the_end(tmp_path: Path) -> None:
    crash = run_until_crash(Workload(small()), tmp_path, None)
    loss = PowerLoss(crash)
    rng = random.Random(5)
    for _ in range(20):
        check(loss.disk(tmp_path / "disk", rng), crash, power_lost=True)


def test_without_durability_a_kill_still_loses_nothing_committed(tmp_path: Path) -> None:
    workload = Workload(small(durable=False))
    for n, point in enumerate(("manifest.append.copied", "manifest.commit.marker", "manifest.seal.cut")):
        crash = run_until_crash(workload, tmp_path / str(n), point, 4)
        check(crash.root, crash, power_lost=False)


@pytest.mark.parametrize("point", ["manifest.resume.cut", "manifest.resume.header", "manifest.open.emptied"])
def test_a_crash_while_recovering_from_a_crash(tmp_path: Path, point: str) -> None:
    crash = run_until_crash(Workload(small()), tmp_path / "first", "manifest.commit.header", 14)
    rng = random.Random(6)
    for n in range(6):
        disk = PowerLoss(crash).disk(tmp_path / f"disk{n}", rng)
        expected = recovered(disk / "1")

        def reopen(env: Env, acks: Acks, disk: Path = disk) -> None:
            root: Path = env.files.root  # type: ignore[attr-defined]
            (root / "1").mkdir()
            for path in sorted((disk / "1").iterdir()):
                fd = env.files.create(root / "1" / path.name)
                env.files.pwrite(fd, path.read_bytes(), 0)
                env.files.fsync(fd)
                env.files.close(fd)
            env.files.fsync_dir(root / "1")
            ManifestLogWriter.open(env, root / "1", small())

        second = run_until_crash(reopen, tmp_path / f"second{n}", point)
        for _ in range(3):
            again = PowerLoss(second, 512).disk(tmp_path / f"again{n}", rng)
            assert recovered(again / "1") == expected


def test_synced_bytes_that_go_bad_are_damage_not_a_torn_tail(tmp_path: Path) -> None:
    crash = run_until_crash(Workload(small(), rounds=2), tmp_path, None)
    path = crash.root / "1" / "0.mlog"
    data = bytearray(path.read_bytes())
    data[64 + 8] ^= 1  # in the first, synced commit; the second one's marker knows that it was
    path.write_bytes(data)
    with pytest.raises(ManifestIntegrityError, match="had been synced"):
        replay.replay(crash.root / "1")
