"""The state of an audit log in a scratch file: the same answers as in memory, without the memory."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from pathlib import Path

import pytest

from aof2.engine.audit import ondisk
from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    Payload,
    SegmentSeal,
    Tombstone,
    TombstoneLift,
)
from aof2.engine.audit.ondisk import DiskState
from aof2.engine.audit.state import VisibleState


def ref(n: int) -> ArtifactRef:
    return ArtifactRef(1, hashlib.sha256(b"%d" % n).digest())


def random_payload(rng: random.Random, logseq: int) -> Payload:
    one = ref(rng.randrange(40))
    make = rng.choice(
        [
            lambda: ArtifactPublish(one),
            lambda: ArtifactPublish(one),
            lambda: ArtifactUnpublish(one),
            lambda: Tombstone(one),
            lambda: TombstoneLift(one, rng.randrange(max(1, logseq - 30), logseq + 1)),
            lambda: SegmentSeal(rng.randrange(20), bytes([rng.randrange(2)]) * 32),
        ]
    )
    return make()


@pytest.mark.parametrize("seed", range(4))
def test_the_same_answers_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(ondisk, "COMMIT_OPS", 7)
    monkeypatch.setattr(ondisk, "SCAN_ROWS", 5)
    rng = random.Random(seed)
    memory, disk = VisibleState(), DiskState(tmp_path / "scratch")
    for logseq in range(1, 1500):
        payload = random_payload(rng, logseq)
        memory.apply_payload(logseq, payload)
        disk.apply_payload(logseq, payload)
        if logseq % 50 == 0:
            anchor = memory.anchor(logseq)
            for state in (memory, disk):
                state.apply_payload(logseq, anchor)
            assert (list(disk), len(disk), disk.root_hash()) == (list(memory), len(memory), memory.root_hash())
            assert list(disk.published()) == list(memory.published())
            for n in range(40):
                assert disk.tombstones(ref(n)) == memory.tombstones(ref(n))
                assert disk.is_published(ref(n)) == memory.is_published(ref(n))
                assert disk.is_visible(ref(n)) == memory.is_visible(ref(n))
                assert disk.sealed_as(n) == memory.sealed_as(n)
            live = [ref(n) for n in range(0, 40, 3)]
            known = {r.digest for r in live}
            assert [r.digest for r in disk.without(live)] == [k[8:] for k in memory.published() if k[8:] not in known]
    assert disk.problems == memory.problems and disk.problems
    disk.close()
    disk.close()
    assert not (tmp_path / "scratch").exists()


def test_which_artifact_an_object_is(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "data.mdb").write_bytes(b"what a crash left")
    state = DiskState(tmp_path / "scratch")
    state.remember((1 << 63, 2), ref(1))
    state.remember((1 << 63, 2), ref(2))
    assert state.take((1 << 63, 1)) is None
    assert (state.take((1 << 63, 2)), state.take((1 << 63, 2))) == (ref(2), None)
    state.close()


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    state = DiskState(tmp_path / "scratch")
    tracemalloc.start()
    try:
        for n in range(20_000):
            state.apply_payload(2 * n + 1, SegmentSeal(n, ref(n).digest))
            state.apply_payload(2 * n + 2, ArtifactPublish(ref(n)))
            state.remember((n, 1), ref(n))
        state.root_hash()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20
    state.close()
