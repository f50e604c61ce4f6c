"""What the audit log says exists: the artifacts published and not tombstoned, and the hash that anchors commit to.

Semantics, record by record
- ARTIFACT_PUBLISH: published, until unpublished. Publishing twice changes nothing.
- ARTIFACT_UNPUBLISH: no longer published. Unpublishing what is not published changes nothing; publishing again works.
- TOMBSTONE: one more tombstone on the artifact, known by this record's logseq, whether it is published or not: one
  published later under a tombstone stays hidden, and unpublishing does not remove tombstones.
- TOMBSTONE_LIFT: removes the tombstone it names by logseq. Several tombstones each need their own lift. A lift that
  names no standing tombstone of that very artifact is reported as BadLift and lifts nothing.
- Visible: published, and no tombstone stands.
- SNAPSHOT_ANCHOR: changes nothing; its root_hash must be root_hash() of everything before it, else AnchorMismatch.
- SEGMENT_SEAL: segment_id → hash. Sealing again with the same hash changes nothing; with another one it is
  ResealConflict, and the first hash stays.

root_hash() = SHA-256(u64 count, little-endian · the count visible ArtifactRefs as encoded in payloads, in ascending
order of those bytes). Each encoded ref holds its own length, so the preimage has one reading.

Invariants
- `problems` are facts about the log's content, found under an intact chain; they never change the state.
- Refs are kept sorted between anchors: a root costs one pass and a merge, not a full sort, when little has changed.

Owner: one thread. Lives in memory only (in a scratch file for those who keep it: `ondisk.py`): replay rebuilds it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    Payload,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
    encode_ref,
)
from aof2.engine.audit.reader import LogRecord

_HASH_STEP = 4096


class Problem(msgspec.Struct, frozen=True):
    """Something the record at `logseq` says that cannot be so."""

    logseq: int
    what: str


class BadLift(Problem, frozen=True):
    """A lift of a tombstone that does not stand on that artifact."""


class AnchorMismatch(Problem, frozen=True):
    """An anchor whose root is not that of the records before it."""


class ResealConflict(Problem, frozen=True):
    """A segment sealed twice with different hashes."""


class VisibleState:
    """Applies records in order."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.seals: dict[int, bytes] = {}
        self.last_anchor: tuple[int, SnapshotAnchor] | None = None
        """(logseq, payload) of the newest anchor."""
        self._published: set[bytes] = set()
        self._tombstones: dict[bytes, list[int]] = {}
        self._visible: set[bytes] = set()
        self._sorted: list[bytes] = []
        self._fresh: set[bytes] = set()
        self._root: bytes | None = None

    @classmethod
    def of(cls, records: Iterable[LogRecord]) -> VisibleState:
        state = cls()
        for record in records:
            state.apply(record)
        return state

    def apply(self, record: LogRecord) -> None:
        self.apply_payload(record.logseq, record.payload)

    def apply_payload(self, logseq: int, payload: Payload) -> None:
        match payload:
            case ArtifactPublish(ref):
                key = encode_ref(ref)
                self._publish(key, on=True)
                self._settle(key)
            case ArtifactUnpublish(ref):
                key = encode_ref(ref)
                self._publish(key, on=False)
                self._settle(key)
            case Tombstone(ref):
                key = encode_ref(ref)
                self._stand(key, [*self._standing(key), logseq])
                self._settle(key)
            case TombstoneLift(ref, lifted):
                self._lift(logseq, encode_ref(ref), lifted)
            case SegmentSeal(segment_id, digest):
                first = self._seal(segment_id, digest)
                if first != digest:
                    what = f"segment {segment_id} sealed as {digest.hex()}, before as {first.hex()}"
                    self.problems.append(ResealConflict(logseq, what))
            case SnapshotAnchor():
                self._anchor(logseq, payload)

    def _lift(self, logseq: int, key: bytes, lifted: int) -> None:
        standing = self._standing(key)
        if lifted not in standing:
            self.problems.append(BadLift(logseq, f"no tombstone of that artifact stands at logseq {lifted}"))
            return
        self._stand(key, [logseq for logseq in standing if logseq != lifted])
        self._settle(key)

    def _anchor(self, logseq: int, anchor: SnapshotAnchor) -> None:
        self.last_anchor = (logseq, anchor)
        root = self.root_hash()
        if root == anchor.root_hash:
            return
        what = (
            f"snapshot {anchor.snapshot_id} anchors {anchor.root_hash.hex()}, the records before it give {root.hex()}"
        )
        self.problems.append(AnchorMismatch(logseq, what))

    def _settle(self, key: bytes) -> None:
        """Recomputes the visibility of one artifact."""
        visible = self._is_published(key) and not self._standing(key)
        if visible != self._is_visible(key):
            self._root = None
            self._show(key, on=visible)

    def root_hash(self) -> bytes:
        if self._root is None:
            digest = hashlib.sha256(struct.pack("<Q", len(self)))
            keys = self._in_order()
            while step := b"".join(islice(keys, _HASH_STEP)):
                digest.update(step)
            self._root = digest.digest()
        return self._root

    def anchor(self, snapshot_id: int) -> SnapshotAnchor:
        """The anchor to append for the state as it is."""
        return SnapshotAnchor(snapshot_id, self.root_hash())

    def is_visible(self, ref: ArtifactRef) -> bool:
        return self._is_visible(encode_ref(ref))

    def is_published(self, ref: ArtifactRef) -> bool:
        return self._is_published(encode_ref(ref))

    def is_sealed(self, segment_id: int) -> bool:
        return segment_id in self.seals

    def tombstones(self, ref: ArtifactRef) -> tuple[int, ...]:
        """The logseqs of the tombstones that stand on `ref`, oldest first."""
        return tuple(self._standing(encode_ref(ref)))

    def __len__(self) -> int:
        """How many artifacts are visible."""
        return len(self._visible)

    def __iter__(self) -> Iterator[ArtifactRef]:
        """The visible artifacts, in root order."""
        for key in tuple(self._in_order()):
            yield decode_key(key)

    def published(self) -> Iterator[bytes]:
        """Every published ref, tombstones or not, encoded, in root order."""
        yield from sorted(self._published)

    # -- where it is kept: `ondisk.py` has other places --------------------------------------------------------

    def _publish(self, key: bytes, *, on: bool) -> None:
        (self._published.add if on else self._published.discard)(key)

    def _is_published(self, key: bytes) -> bool:
        return key in self._published

    def _stand(self, key: bytes, standing: list[int]) -> None:
        if standing:
            self._tombstones[key] = standing
        else:
            self._tombstones.pop(key, None)

    def _standing(self, key: bytes) -> list[int]:
        return self._tombstones.get(key, [])

    def _seal(self, segment_id: int, digest: bytes) -> bytes:
        """The hash that it was sealed with first."""
        return self.seals.setdefault(segment_id, digest)

    def _show(self, key: bytes, *, on: bool) -> None:
        if on:
            self._visible.add(key)
            self._fresh.add(key)
        else:
            self._visible.discard(key)
            self._fresh.discard(key)

    def _is_visible(self, key: bytes) -> bool:
        return key in self._visible

    def _in_order(self) -> Iterator[bytes]:
        # What was sorted at the last root stays sorted; timsort merges the new run into it.
        self._sorted = [k for k in self._sorted if k in self._visible and k not in self._fresh]
        self._sorted.extend(sorted(self._fresh))
        self._sorted.sort()
        self._fresh.clear()
        return iter(self._sorted)


def decode_key(key: bytes) -> ArtifactRef:
    """The ref of an encoded one."""
    return ArtifactRef(int.from_bytes(key[:4], "little"), key[8:])
