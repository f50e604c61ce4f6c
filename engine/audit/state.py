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
- Refs are kept in order between anchors: a root costs one pass and a merge, not a full sort, when little has changed.

Owner: one thread. Lives in memory only (in a scratch file for those who keep it: `ondisk.py`): replay rebuilds it.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from aof2.engine.audit import format as fmt
from aof2.engine.audit.reader import LogRecord

_HASH_STEP = 4096
_U64 = struct.Struct(">Q")


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


# Of the state, a table each: published refs, tombstones that stand by ref, seals by segment, visible refs.
_PUBLISHED, _TOMBSTONES, _SEALS, _VISIBLE = (bytes([n]) for n in range(4))


class VisibleState:
    """Applies records in order. Its tables are kept in memory; `ondisk.py` keeps them elsewhere."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.last_anchor: tuple[int, fmt.SnapshotAnchor] | None = None
        """(logseq, payload) of the newest anchor."""
        self._rows: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self._count = 0
        self._root: bytes | None = None

    @classmethod
    def of(cls, records: Iterable[LogRecord]) -> VisibleState:
        state = cls()
        for record in records:
            state.apply(record)
        return state

    def apply(self, record: LogRecord) -> None:
        self.apply_payload(record.logseq, record.payload)

    def apply_payload(self, logseq: int, payload: fmt.Payload) -> None:
        match payload:
            case fmt.ArtifactPublish(ref):
                self._put(_PUBLISHED, fmt.encode_ref(ref), b"")
                self._show(fmt.encode_ref(ref))
            case fmt.ArtifactUnpublish(ref):
                self._put(_PUBLISHED, fmt.encode_ref(ref), None)
                self._show(fmt.encode_ref(ref))
            case fmt.Tombstone(ref):
                self._stand(fmt.encode_ref(ref), [*self.tombstones(ref), logseq])
            case fmt.TombstoneLift(ref, lifted):
                standing = self.tombstones(ref)
                if lifted in standing:
                    self._stand(fmt.encode_ref(ref), [other for other in standing if other != lifted])
                else:
                    self.problems.append(BadLift(logseq, f"no tombstone of that artifact stands at logseq {lifted}"))
            case fmt.SegmentSeal(segment_id, digest):
                first = self.sealed_as(segment_id)
                if first is None:
                    self._put(_SEALS, _U64.pack(segment_id), digest)
                elif first != digest:
                    what = f"segment {segment_id} sealed as {digest.hex()}, before as {first.hex()}"
                    self.problems.append(ResealConflict(logseq, what))
            case fmt.SnapshotAnchor():
                self._anchor(logseq, payload)

    def _anchor(self, logseq: int, anchor: fmt.SnapshotAnchor) -> None:
        self.last_anchor = (logseq, anchor)
        root = self.root_hash()
        if root == anchor.root_hash:
            return
        what = (
            f"snapshot {anchor.snapshot_id} anchors {anchor.root_hash.hex()}, the records before it give {root.hex()}"
        )
        self.problems.append(AnchorMismatch(logseq, what))

    def _stand(self, key: bytes, standing: list[int]) -> None:
        self._put(_TOMBSTONES, key, b"".join(map(_U64.pack, standing)) or None)
        self._show(key)

    def _show(self, key: bytes) -> None:
        """Recomputes the visibility of one artifact."""
        visible = self._get(_PUBLISHED, key) is not None and self._get(_TOMBSTONES, key) is None
        if visible != (self._get(_VISIBLE, key) is not None):
            self._root = None
            self._count += 1 if visible else -1
            self._put(_VISIBLE, key, b"" if visible else None)

    def root_hash(self) -> bytes:
        if self._root is None:
            digest = hashlib.sha256(struct.pack("<Q", len(self)))
            keys = self._keys(_VISIBLE)
            while step := b"".join(islice(keys, _HASH_STEP)):
                digest.update(step)
            self._root = digest.digest()
        return self._root

    def anchor(self, snapshot_id: int) -> fmt.SnapshotAnchor:
        """The anchor to append for the state as it is."""
        return fmt.SnapshotAnchor(snapshot_id, self.root_hash())

    def is_visible(self, ref: fmt.ArtifactRef) -> bool:
        return self._get(_VISIBLE, fmt.encode_ref(ref)) is not None

    def is_published(self, ref: fmt.ArtifactRef) -> bool:
        return self._get(_PUBLISHED, fmt.encode_ref(ref)) is not None

    def sealed_as(self, segment_id: int) -> bytes | None:
        """The hash that it was sealed with first."""
        return self._get(_SEALS, _U64.pack(segment_id))

    def tombstones(self, ref: fmt.ArtifactRef) -> tuple[int, ...]:
        """The logseqs of the tombstones that stand on `ref`, oldest first."""
        return tuple(logseq for (logseq,) in _U64.iter_unpack(self._get(_TOMBSTONES, fmt.encode_ref(ref)) or b""))

    def __len__(self) -> int:
        """How many artifacts are visible."""
        return self._count

    def __iter__(self) -> Iterator[fmt.ArtifactRef]:
        """The visible artifacts, in root order."""
        return map(decode_key, self._keys(_VISIBLE))

    def published(self) -> Iterator[bytes]:
        """Every published ref, tombstones or not, encoded, in root order."""
        return self._keys(_PUBLISHED)

    # -- where it is kept: `ondisk.py` has other places --------------------------------------------------------

    def _get(self, table: bytes, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def _put(self, table: bytes, key: bytes, value: bytes | None) -> None:
        """None: the row goes."""
        if value is None:
            self._rows[table].pop(key, None)
        else:
            self._rows[table][key] = value

    def _keys(self, table: bytes) -> Iterator[bytes]:
        """In order; rows may change between two of them."""
        # What is in order stays so: the next sort merges what is new into it.
        self._rows[table] = dict(sorted(self._rows[table].items()))
        return iter(tuple(self._rows[table]))


def decode_key(key: bytes) -> fmt.ArtifactRef:
    """The ref of an encoded one."""
    return fmt.ArtifactRef(int.from_bytes(key[:4], "little"), key[8:])
