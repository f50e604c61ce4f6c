"""What records add up to, against a plain model; roots, anchors and the problems a log can hold."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    Payload,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
)
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import AnchorMismatch, BadLift, ResealConflict, VisibleState
from tests.audit.build import log_bytes, ref, ref_bytes


def replayed(payloads: list[Payload]) -> VisibleState:
    return VisibleState.of(Replay(log_bytes(payloads)))


def root_of(refs: list[ArtifactRef]) -> bytes:
    return hashlib.sha256(struct.pack("<Q", len(refs)) + b"".join(sorted(map(ref_bytes, refs)))).digest()


def test_publish_hide_show_purge() -> None:
    a, b = ref(1), ref(2)
    story: list[tuple[Payload, list[ArtifactRef]]] = [
        (ArtifactPublish(a), [a]),
        (ArtifactPublish(b), [a, b]),
        (ArtifactPublish(b), [a, b]),
        (Tombstone(a), [b]),
        (Tombstone(a), [b]),
        (TombstoneLift(a, 4), [b]),
        (TombstoneLift(a, 5), [a, b]),
        (ArtifactUnpublish(a), [b]),
        (ArtifactUnpublish(a), [b]),
        (Tombstone(a), [b]),
        (ArtifactPublish(a), [b]),
        (TombstoneLift(a, 10), [a, b]),
        (ArtifactUnpublish(b), [a]),
        (ArtifactPublish(b), [a, b]),
    ]
    state = VisibleState()
    for logseq, (payload, visible) in enumerate(story, 1):
        state.apply_payload(logseq, payload)
        assert sorted(state, key=ref_bytes) == list(state) == sorted(visible, key=ref_bytes), logseq
        assert state.root_hash() == root_of(visible)
        assert len(state) == len(visible)
    assert state.problems == []
    assert state.is_visible(a)
    assert state.is_published(a)
    assert state.tombstones(a) == ()


def test_lifts_that_lift_nothing() -> None:
    a, b = ref(1), ref(2)
    state = replayed(
        [
            ArtifactPublish(a),
            ArtifactPublish(b),
            Tombstone(a),  # 3
            TombstoneLift(a, 2),
            TombstoneLift(b, 3),
            TombstoneLift(a, 999),
            TombstoneLift(a, 3),  # the only good one
            TombstoneLift(a, 3),
        ]
    )
    assert [(type(p), p.logseq) for p in state.problems] == [(BadLift, 4), (BadLift, 5), (BadLift, 6), (BadLift, 8)]
    assert state.is_visible(a)
    assert state.is_visible(b)


def test_several_tombstones_each_need_lifting() -> None:
    a = ref(1)
    state = replayed([ArtifactPublish(a), Tombstone(a), Tombstone(a), TombstoneLift(a, 3)])
    assert not state.is_visible(a)
    assert state.tombstones(a) == (2,)


def test_seals() -> None:
    one, two = b"\x01" * 32, b"\x02" * 32
    state = replayed([SegmentSeal(1, one), SegmentSeal(2, two), SegmentSeal(1, one), SegmentSeal(2, one)])
    assert [state.sealed_as(n) for n in range(4)] == [None, one, two, None]
    assert [(type(p), p.logseq) for p in state.problems] == [(ResealConflict, 4)]


def test_anchors_are_recomputed() -> None:
    a = ref(1)
    good: list[Payload] = [
        SnapshotAnchor(1, root_of([])),
        ArtifactPublish(a),
        SnapshotAnchor(2, root_of([a])),
        Tombstone(a),
        SnapshotAnchor(3, root_of([])),
    ]
    state = replayed(good)
    assert state.problems == []
    assert state.last_anchor == (5, good[-1])
    bad = [*good, SnapshotAnchor(4, root_of([a]))]
    state = replayed(bad)
    assert [(type(p), p.logseq) for p in state.problems] == [(AnchorMismatch, 6)]


REF = st.integers(0, 4).map(ref)
OPS = st.one_of(
    st.builds(ArtifactPublish, REF),
    st.builds(ArtifactUnpublish, REF),
    st.builds(Tombstone, REF),
    st.builds(TombstoneLift, REF, st.integers(1, 25)),
    st.builds(SnapshotAnchor, st.integers(0, 3), st.just(root_of([]))),
)


@settings(max_examples=200)
@given(st.lists(OPS, max_size=25))
def test_against_a_plain_model(ops: list[Payload]) -> None:
    published: set[bytes] = set()
    standing: list[tuple[int, bytes]] = []
    bad: list[int] = []

    def visible() -> list[ArtifactRef]:
        return [r for r in map(ref, range(5)) if r.digest in published and r.digest not in {d for _, d in standing}]

    for logseq, op in enumerate(ops, 1):
        if isinstance(op, ArtifactPublish):
            published.add(op.artifact.digest)
        elif isinstance(op, ArtifactUnpublish):
            published.discard(op.artifact.digest)
        elif isinstance(op, Tombstone):
            standing.append((logseq, op.artifact.digest))
        elif isinstance(op, TombstoneLift):
            named = (op.tombstone_logseq, op.artifact.digest)
            if named in standing:
                standing.remove(named)
            else:
                bad.append(logseq)
        elif isinstance(op, SnapshotAnchor) and root_of(visible()) != op.root_hash:
            bad.append(logseq)
    state = replayed(ops)
    assert list(state) == sorted(visible(), key=ref_bytes)
    assert state.root_hash() == root_of(visible())
    assert [p.logseq for p in state.problems] == bad
    state.apply_payload(len(ops) + 1, state.anchor(9))
    assert [p.logseq for p in state.problems] == bad


def test_refs_of_other_hashes_sort_by_their_bytes() -> None:
    refs = [ArtifactRef(2, b"b"), ArtifactRef(2, b"a" * 300), ArtifactRef(300, b"x"), ref(1)]
    state = replayed([ArtifactPublish(r) for r in refs])
    assert state.root_hash() == root_of(refs)
    assert list(state) == sorted(refs, key=ref_bytes)
