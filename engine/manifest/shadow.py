"""The shadow: the same state kept as plain JSON, so that the log can be compared with something simpler than itself.

A volume keeps one a stream where `[manifest] shadow` asks for it (`engine/shadows.py`); the gauge
`manifest_shadow_divergence` says on how many segments the two disagree, and 0 is what it should be. The fold here is
deliberately independent of ManifestIndex: dictionaries and names, no shared code.

Owner: the catalog thread, which shows it each record once it is committed. `save` replaces the file atomically; a crash
leaves the last saved state.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import LOG_SEGMENT_ID, TYPE_COUNT, LogPosition
from aof2.engine.manifest.index import ManifestEntry, Progress, Residency

NAME: Final = "shadow.json"


class ShadowState:
    """Segment id → the fields the JSON manifest has always had."""

    def __init__(self) -> None:
        self.segments: dict[str, dict[str, Any]] = {}
        self._pending: set[tuple[str, str]] = set()  # uploads that have not ended
        self.position: LogPosition | None = None  # in the log; kept by who saves it

    @classmethod
    def of(
        cls, entries: Iterable[tuple[int, ManifestEntry]], pending_uploads: Iterable[tuple[int, str]] = ()
    ) -> ShadowState:
        """A shadow that begins with what the log's state is, uploads that have not ended included."""
        state = cls()
        state.segments = {str(segment_id): as_json(entry) for segment_id, entry in entries}
        state._pending = {(str(segment_id), key) for segment_id, key in pending_uploads if segment_id != LOG_SEGMENT_ID}
        return state

    @property
    def segment_ids(self) -> list[int]:
        return [int(name) for name in self.segments]

    def observe(self, kind: int, segment_id: int, payload: bytes) -> None:
        """One record, as the writer committed it."""
        if kind >= TYPE_COUNT or segment_id == LOG_SEGMENT_ID:
            return
        record = p.decode(kind, payload)
        if isinstance(record, p.SnapshotMarker):
            return
        if isinstance(record, p.CustomEvent):
            self._event(str(segment_id), record)
            return
        name = str(segment_id)
        if isinstance(record, p.Tier2DeleteQueued | p.Tier2Deleted):
            self._pending.discard((name, record.key))
            if name not in self.segments:
                return
        match record:
            case p.UploadStarted(key) | p.UploadFailed(key):
                self._pending.add((name, key))
            case p.UploadDone(key):
                self._pending.discard((name, key))
        self._fold(self.segments.setdefault(str(segment_id), _blank()), record)

    def _event(self, name: str, event: p.CustomEvent) -> None:
        match event.schema_id:
            case 2:
                self.segments.setdefault(name, _blank()).update(warm=False, compressed_bytes=0)
            case 3 if all(pending != name for pending, _ in self._pending):
                self.segments.pop(name, None)

    @staticmethod
    def _fold(s: dict[str, Any], record: p.Payload) -> None:
        match record:
            case p.SegmentOpened(base_offset, epoch):
                if s["opened"] and epoch > s["epoch"]:
                    s.update(_blank(), key=s["key"])
                s.update(opened=True, base_offset=base_offset, epoch=epoch, local=True)
            case p.SealSegment(durable_bytes, crc, ext_id):
                s.update(sealed=True, durable_bytes=durable_bytes, crc64=crc)
                if ext_id is not None:
                    s.update(ext_id=ext_id)
            case p.CompressionDone(compressed_bytes):
                s.update(warm=True, compressed_bytes=compressed_bytes)
            case p.UploadStarted():
                s.update(upload="started")
            case p.UploadDone(key):
                s.update(upload="done", key=key, remote=True, needs_repair=False)
            case p.UploadFailed():
                s.update(upload="failed")
            case p.Tier2Deleted(key) if s["key"] == key:
                s.update(upload="none", key="", remote=False)
            case p.HydrationDone():
                s.update(local=True, needs_repair=False)
            case p.HydrationFailed(reason_code) if reason_code == 4:
                s.update(needs_repair=True)
            case p.LocalEvicted():
                s.update(local=False)
            case _:
                pass

    def save(self, env: Env, directory: Path) -> None:
        saved = _Saved(position=self.position, segments=self.segments, pending=sorted(self._pending))
        env.replace_file(directory / NAME, msgspec.json.encode(saved), point="manifest.shadow")

    @classmethod
    def load(cls, directory: Path) -> ShadowState:
        state = cls()
        path = directory / NAME
        if path.exists():
            try:
                saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
            except msgspec.DecodeError as e:
                raise CorruptError(f"shadow state is not JSON ({e})", path=str(path)) from None
            state.segments = saved.segments
            state._pending = set(saved.pending)
            state.position = None if saved.position is None else LogPosition(*saved.position)
        return state


class _Saved(msgspec.Struct, kw_only=True):
    """shadow.json."""

    position: tuple[int, int, int] | None = None
    segments: dict[str, dict[str, Any]]
    pending: list[tuple[str, str]] = []


def _blank() -> dict[str, Any]:
    return as_json(ManifestEntry())


def as_json(e: ManifestEntry) -> dict[str, Any]:
    return {
        "opened": e.opened,
        "base_offset": e.base_offset,
        "epoch": e.epoch,
        "sealed": e.sealed,
        "durable_bytes": e.durable_bytes,
        "crc64": e.segment_crc64,
        "ext_id": e.ext_id,
        "compressed_bytes": e.compressed_bytes,
        "upload": Progress(e.upload).name.lower(),
        "key": e.key,
        "local": bool(e.residency & Residency.TIER0),
        "warm": bool(e.residency & Residency.TIER1),
        "remote": bool(e.residency & Residency.TIER2),
        "needs_repair": e.needs_repair,
    }
