"""Power lost at every named point: what was acknowledged is there, batches are whole or absent, and writing goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aof2.engine.audit.commit import commit_slice
from aof2.engine.audit.damage import Tail
from aof2.engine.audit.format import ArtifactPublish, ArtifactRef, Payload
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.writer import CRASH_POINTS, AuditWriter
from aof2.engine.env import Env
from tests.audit.build import log_bytes, records, ref, sample
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

DISKS = 40


def wide(n: int) -> Payload:
    """A record of several sectors, no two alike."""
    return ArtifactPublish(ArtifactRef(9, random.Random(n).randbytes(400 + 97 * n)))


BATCHES: list[list[Payload]] = [
    sample(1),
    sample(6),
    [wide(i) for i in range(1, 9)],
    [ArtifactPublish(ref(2))],
    [wide(i) for i in range(9, 14)],
    [],  # _padded fills it, so that the next batch starts with a logseq across two sectors
    [wide(i) for i in range(14, 18)],
    sample(30),
]


def _padded() -> list[list[Payload]]:
    before = [p for b in BATCHES[:5] for p in b]
    end = len(log_bytes(before))
    digest = (508 - (end + 56)) % 512 + 512
    out = [*BATCHES]
    out[5] = [ArtifactPublish(ArtifactRef(9, random.Random(5).randbytes(digest)))]
    start = len(log_bytes([*before, *out[5]]))
    assert start % 512 == 508
    assert commit_slice(start, len(before) + 2) == slice(0, 4)
    return out


PADDED = _padded()
ENDS = [sum(len(b) for b in PADDED[: i + 1]) for i in range(len(PADDED))]
ALL = [p for b in PADDED for p in b]


def workload(env: Env, acks: Acks) -> None:
    path = root_of(env) / "1.asl"
    with AuditWriter(env, path) as writer:
        for batch in PADDED[:4]:
            acks.tell(writer.append(batch)[-1])
    # A torn append of an earlier life, durable as it is.
    fd = env.files.open_rw(path)
    torn = records(ALL)[ENDS[3]][:-5]
    env.files.pwrite(fd, torn, path.stat().st_size)
    env.files.fsync(fd)
    env.files.close(fd)
    with AuditWriter(env, path, acknowledged=ENDS[3]) as writer:
        for batch in PADDED[4:6]:
            acks.tell(writer.append(batch)[-1])
    # And a batch that lacks its commit bytes only.
    start = path.stat().st_size
    whole = bytearray(log_bytes(ALL[: ENDS[6]])[start:])
    last = commit_slice(start, ENDS[5] + 1)
    whole[last] = bytes(last.stop - last.start)
    fd = env.files.open_rw(path)
    env.files.pwrite(fd, whole, start)
    env.files.fsync(fd)
    env.files.close(fd)
    with AuditWriter(env, path) as writer:
        assert writer.recovered.tail is Tail.UNCOMMITTED
        acks.tell(writer.next_logseq - 1)
        acks.tell(writer.append(PADDED[7])[-1])


def root_of(env: Env) -> Path:
    return env.files.root  # type: ignore[attr-defined, no-any-return]


def check(disk: Path, crash: Crash) -> None:
    acked = max([int(str(a)) for a in crash.acks], default=0)
    path = disk / "1.asl"
    if not path.exists():
        assert acked == 0
    with AuditWriter(Env(), path, acknowledged=acked) as writer:
        found = writer.next_logseq - 1
        assert found >= acked
        assert found == 0 or found in ENDS, f"{found} is inside a batch"
        rest = ALL[found:]
        if rest:
            assert writer.append(rest) == list(range(found + 1, len(ALL) + 1))
    assert path.read_bytes() == log_bytes(ALL)
    replay = Replay(path)
    assert [r.payload for r in replay] == ALL
    assert replay.outcome.tail is Tail.CLEAN


@pytest.mark.parametrize("unit", [4096, 512])
def test_power_loss_at_every_point(tmp_path: Path, unit: int) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    found_whole = found_absent = 0
    for case, (point, nth) in enumerate(crash_cases(hits, CRASH_POINTS)):
        crash = run_until_crash(workload, tmp_path / f"{case}", point, nth)
        assert crash.killed
        loss = PowerLoss(crash, unit)
        for seed in range(DISKS):
            disk = loss.disk(tmp_path / "disk", random.Random(seed * 1000 + case))
            before = (disk / "1.asl").exists()
            found_whole += before
            found_absent += not before
            check(disk, crash)
    assert found_whole
    assert found_absent, "creation itself was never lost: the matrix is too kind"


def test_a_killed_process_loses_nothing_it_was_promised(tmp_path: Path) -> None:
    """No power loss: the page cache survives, and the next open goes on from it."""
    hits = hits_of(workload, tmp_path / "hits")
    for case, (point, nth) in enumerate(crash_cases(hits, CRASH_POINTS)):
        crash = run_until_crash(workload, tmp_path / f"{case}", point, nth)
        check(crash.root, crash)
