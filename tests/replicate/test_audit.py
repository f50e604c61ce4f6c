"""The audit log says what the manifest log says, once, in order, whatever was killed in between."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import trio

from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
    artifact_ref,
)
from aof2.engine.audit.ranges import replay_ranges
from aof2.engine.audit.reader import LogRecord, Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.replicate.audit import AUDIT_CHUNK, AUDIT_LOGSEQ, Derivation

from .helpers import TENANT, Rig, content_of, in_state, keys_of, make_file, open_directory, purged, run_rig, sealed, sha

PUBLISHED, TOMBSTONED = ObjectState.PUBLISHED, ObjectState.TOMBSTONED


def ref(number: int) -> ArtifactRef:
    return artifact_ref("default", number, 1, sha(number))


def records(root: Path) -> list[LogRecord]:
    return list(Replay(root / "state" / "audit" / f"{TENANT}.asl"))


def payloads(root: Path) -> list[object]:
    return [r.payload for r in records(root)]


def test_every_transition_in_order(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED), sealed(2), in_state(1, TOMBSTONED), in_state(1, PUBLISHED))
        await r.write(in_state(2, PUBLISHED), in_state(1, TOMBSTONED), purged(1))
        await r.snapshot()
        await r.write(make_file(9))
        await r.snapshot()  # nothing new to anchor

    run_rig(tmp_path, body)
    found = payloads(tmp_path)
    assert found[:-1] == [
        SegmentSeal(1, sha(1)),
        ArtifactPublish(ref(1)),
        SegmentSeal(2, sha(2)),
        Tombstone(ref(1)),
        TombstoneLift(ref(1), 4),
        ArtifactPublish(ref(2)),
        Tombstone(ref(1)),
        ArtifactUnpublish(ref(1)),
    ]
    assert isinstance(found[-1], SnapshotAnchor)
    state = VisibleState.of(records(tmp_path))
    assert state.problems == []
    assert list(state) == [ref(2)]
    assert state.problems == []


def test_ranges_are_cut_at_anchors_and_join_again(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        for i in range(1, 4):
            await r.write(sealed(i), in_state(i, PUBLISHED))
            await r.snapshot()
        await r.write(sealed(9))
        found = keys_of(r.store, f"audit/{TENANT}/")
        assert found == [f"audit/{TENANT}/{first}.asl" for first in (1, 4, 7)]
        parts = [(first, content_of(r.store, f"audit/{TENANT}/{first}.asl")) for first in (1, 4, 7)]
        joined = b"".join(data for _, data in parts)
        assert (tmp_path / "state" / "audit" / f"{TENANT}.asl").read_bytes().startswith(joined)
        assert [rec.logseq for rec in replay_ranges(parts)] == list(range(1, 10))
        head = r.store.head_blob(f"audit/{TENANT}/4.asl")
        assert head.metadata["last_logseq"] == "6"

    run_rig(tmp_path, body)


def test_reopening_adds_nothing_and_goes_on(tmp_path: Path) -> None:
    async def write(r: Rig, first: int) -> None:
        await r.write(sealed(first), in_state(first, PUBLISHED))

    for start in (1, 2, 3):

        async def body(r: Rig, start: int = start) -> None:
            before = payloads(tmp_path) if start > 1 else []
            await r.settle()
            if start > 1:
                assert payloads(tmp_path) == before
            await write(r, start)
            if start == 2:
                await r.snapshot()

        run_rig(tmp_path, body)
    seals = [p for p in payloads(tmp_path) if isinstance(p, SegmentSeal)]
    assert [s.segment_id for s in seals] == [1, 2, 3]
    assert VisibleState.of(records(tmp_path)).problems == []


@pytest.mark.parametrize("cut", range(1, 6))
def test_what_a_kill_withheld_is_appended_once(tmp_path: Path, cut: int) -> None:
    """The audit log is cut back to a prefix, as a kill between its appends leaves it."""

    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED), in_state(1, TOMBSTONED), in_state(1, PUBLISHED))
        await r.write(in_state(1, TOMBSTONED), purged(1))

    run_rig(tmp_path, body)
    path = tmp_path / "state" / "audit" / f"{TENANT}.asl"
    whole, found = path.read_bytes(), records(tmp_path)
    assert len(found) == 6
    path.write_bytes(whole[: found[-cut].offset])

    async def again(r: Rig) -> None:
        await r.settle()

    run_rig(tmp_path, again)
    assert path.read_bytes() == whole


def test_removing_what_was_never_published_looks_at_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand short-lived files do not mean that all objects are walked a thousand times."""
    swept: list[int] = []
    sweep = Derivation.sweep

    def counted(derived: Derivation, live: Iterable[ArtifactRef]) -> None:
        swept.append(1)
        sweep(derived, live)

    monkeypatch.setattr(Derivation, "sweep", counted)

    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED))
        await r.snapshot()
        swept.clear()
        for number in range(2, 8):
            await r.write(sealed(number), purged(number))
        await r.write(in_state(1, TOMBSTONED), purged(1))
        assert not swept

    run_rig(tmp_path, body)
    assert ArtifactUnpublish(ref(1)) in payloads(tmp_path)


def test_without_its_file_it_is_made_again(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED), in_state(1, TOMBSTONED))

    run_rig(tmp_path, body)
    path = tmp_path / "state" / "audit" / f"{TENANT}.asl"
    whole = path.read_bytes()
    path.unlink()
    run_rig(tmp_path, lambda r: r.settle())
    assert path.read_bytes() == whole


@pytest.mark.expects_warnings
def test_a_shorter_file_than_remembered_stops_the_audit_not_the_log(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED))
        await r.snapshot()
        with r.catalog.view() as view:
            assert view.get(TENANT, t.COUNTERS, AUDIT_LOGSEQ) == 3
            assert view.get(TENANT, t.COUNTERS, AUDIT_CHUNK) == 2

    run_rig(tmp_path, body)
    path = tmp_path / "state" / "audit" / f"{TENANT}.asl"
    kept = path.read_bytes()
    path.unlink()
    store = open_directory(tmp_path)
    store.delete(keys_of(store, f"audit/{TENANT}/"))

    async def again(r: Rig) -> None:
        before = len(keys_of(r.store, f"manifest/{TENANT}/"))
        await r.write(make_file(5))
        assert len(keys_of(r.store, f"manifest/{TENANT}/")) > before
        assert "3 was acknowledged" in r.replicator.audit_problems[TENANT]
        path.write_bytes(kept)
        r.replicator.kick()
        await r.write(sealed(6))
        assert r.replicator.audit_problems == {}
        assert payloads(tmp_path)[-1] == SegmentSeal(6, sha(6))

    run_rig(tmp_path, again)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_damaged_file_is_made_again_from_its_ranges(tmp_path: Path, harm: str) -> None:
    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED))
        await r.snapshot()

    run_rig(tmp_path, body)
    path = tmp_path / "state" / "audit" / f"{TENANT}.asl"
    kept = path.read_bytes()
    path.unlink()
    if harm == "damaged":
        path.write_bytes(kept[:60] + bytes([kept[60] ^ 1]) + kept[61:])

    async def again(r: Rig) -> None:
        await r.write(sealed(6))
        assert r.replicator.audit_problems == {}
        assert path.read_bytes().startswith(kept)
        assert payloads(tmp_path)[-1] == SegmentSeal(6, sha(6))

    run_rig(tmp_path, again)


def test_chunks_that_are_gone_are_made_up_for_by_the_rows(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(sealed(1), in_state(1, PUBLISHED), sealed(2), in_state(2, TOMBSTONED))
        await r.write(*(make_file(i) for i in range(10, 14)))
        await r.snapshot()
        await r.write(make_file(20))
        await r.snapshot()

        def forget(b: object) -> None:
            for counter in (AUDIT_LOGSEQ, AUDIT_CHUNK):
                b.delete(t.COUNTERS, counter)  # type: ignore[attr-defined]

        await trio.to_thread.run_sync(lambda: r.writer.call(TENANT, forget, sync=True))

    run_rig(tmp_path, body)
    path = tmp_path / "state" / "audit" / f"{TENANT}.asl"
    path.unlink()
    for data in (tmp_path / "remote" / "audit").rglob("*.asl"):
        data.unlink()
    run_rig(tmp_path, lambda r: r.settle())
    assert payloads(tmp_path) == [
        SegmentSeal(1, sha(1)),
        SegmentSeal(2, sha(2)),
        ArtifactPublish(ref(1)),
        ArtifactPublish(ref(2)),
        Tombstone(ref(2)),
    ]
