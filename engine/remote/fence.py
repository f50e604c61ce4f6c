"""One writer a volume: `volume.json` says who. A second one takes over by raising the epoch; the first one then stops.

    {"format_version": 1, "volume_uuid": "…", "writer_epoch": 7, "writer_id": "…", "claimed_at_ms": …, "host": "…",
     "closed_at_ms": …, "closed_at": {"0": 12, "1": 345}}

The last two are there after a clean unmount: when, and the record ordinal at which each stream's log ends. The next
claim writes a record without them.

The object is created with If-None-Match:* and replaced with If-Match only, so of two claims of one epoch one fails.
`writer_id` is random in each claim: two writers never send equal bytes, and one whose answer got lost knows its own.

Invariants
- A fence that saw another's claim, or another's bytes under a manifest key, is latched: every later write is refused
  without asking the remote. Only a new claim, by a new mount, ends that.
- Manifest objects are never replaced, whatever the epoch (put_if_absent). So a stale writer that has not noticed yet
  can add an object at most, never change one; what it adds makes the put of the next owner fail, not pass unseen.
- Nothing is deleted or composed before the epoch was read again.

Owner: any thread; the latch only ever goes one way. A crash leaves the epoch claimed; the next mount takes
a higher one.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, TransientError, UnsupportedError
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.keys import VOLUME_KEY
from aof2.engine.remote.store import RemoteStore

log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
EPOCH_META: Final = "writer_epoch"
AHEAD_S_MAX: Final = 0.05


class VolumeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of volume.json. Fields a newer minor writer added are kept out of our way by format_version."""

    format_version: int
    volume_uuid: str
    writer_epoch: int
    writer_id: str
    claimed_at_ms: int = 0
    host: str = ""
    closed_at_ms: int = 0
    closed_at: dict[int, int] = {}


def new_writer_id() -> str:
    """A name for a claim that no other claim has."""
    return secrets.token_hex(16)


def read_volume(store: RemoteStore, *, timeout_s: float | None = None) -> tuple[VolumeRecord, str] | None:
    """The record and its etag, or None when the remote holds no volume."""
    try:
        info, data = store.get_blob(VOLUME_KEY, timeout_s=timeout_s)
    except RemoteMissingError:
        return None
    try:
        version = msgspec.json.decode(data, type=_VersionOnly).format_version
        if version > FORMAT_VERSION:
            raise UnsupportedError(f"volume format {version}, this program knows {FORMAT_VERSION}", path=VOLUME_KEY)
        record = msgspec.json.decode(data, type=VolumeRecord)
    except msgspec.MsgspecError as e:
        raise CorruptError(f"not a volume record ({e})", path=VOLUME_KEY) from None
    if version < 1 or record.writer_epoch < 1:
        raise CorruptError(f"volume format {version}, epoch {record.writer_epoch}", path=VOLUME_KEY)
    return record, info.etag


class _VersionOnly(msgspec.Struct):
    format_version: int


def claim(env: Env, store: RemoteStore, *, over: tuple[VolumeRecord, str] | None = None, writer_id: str = "") -> Fence:
    """Makes this process the volume's writer; a volume that is not there yet is created.

    `over`: the record that it replaces, and its etag; without one, whatever is there. `writer_id` is the name of the
    claim, if the caller wrote it down before. FencedError: another writer claimed meanwhile.
    """
    old, etag = over or read_volume(store) or (None, None)
    record = VolumeRecord(
        format_version=FORMAT_VERSION,
        volume_uuid=old.volume_uuid if old is not None else str(uuid.uuid4()),
        writer_epoch=old.writer_epoch + 1 if old is not None else 1,
        writer_id=writer_id or new_writer_id(),
        claimed_at_ms=env.now_ms(),
        host=socket.gethostname(),
    )
    store.replace_if_match(VOLUME_KEY, msgspec.json.encode(record), etag)
    return Fence(store, record)


class Fence:
    """The right to write, as long as no other writer claimed it."""

    def __init__(self, store: RemoteStore, record: VolumeRecord) -> None:
        self.record = record
        self._store = store
        self._claimed = msgspec.json.encode(record)
        self._latched: str | None = None
        self._ahead_s = float("-inf")

    @property
    def epoch(self) -> int:
        return self.record.writer_epoch

    def require(self) -> None:
        """FencedError when latched; does not ask the remote."""
        if self._latched is not None:
            raise FencedError(self._latched)

    def check(self) -> None:
        """Reads volume.json again: FencedError, and the latch, when it is no longer ours."""
        self.require()
        if not self._is_as_claimed():
            self._check_thoroughly()

    def check_ahead(self) -> None:
        """`check` for the manifest object that is put next, while it is still being made; good for a moment."""
        asked_s = time.monotonic()
        if asked_s - self._ahead_s < AHEAD_S_MAX / 2:
            return
        self.check()
        self._ahead_s = asked_s

    def _check_unless_ahead(self) -> None:
        ahead_s, self._ahead_s = self._ahead_s, float("-inf")
        if time.monotonic() - ahead_s > AHEAD_S_MAX:
            self.check()
        self.require()

    def _is_as_claimed(self) -> bool:
        """Whether the bytes of our claim, which no other writer sends, are there: one range, the quickest request."""
        try:
            return self._store.get_range(VOLUME_KEY, 0, len(self._claimed)) == self._claimed
        except TransientError:
            raise
        except Aof2Error:
            return False

    def _check_thoroughly(self) -> None:
        try:
            found = read_volume(self._store)
        except (UnsupportedError, CorruptError) as e:
            # What we wrote was neither: a newer program took over, or something broke it. Not ours any more.
            self._latch(str(e))
            raise FencedError(str(self._latched)) from e
        if found is None:
            self._latch(f"{VOLUME_KEY} is gone from the remote")
        else:
            now = found[0]
            if (now.volume_uuid, now.writer_id) != (self.record.volume_uuid, self.record.writer_id):
                self._latch(f"another writer took the volume over (epoch {now.writer_epoch}, ours {self.epoch})")
        self.require()

    def leave(self, now_ms: int, positions: Mapping[int, int]) -> None:
        """The writer unmounts, and its logs end there: the record says so until the next claim."""
        self.require()
        found = read_volume(self._store)
        if found is None or found[0].writer_id != self.record.writer_id:
            self.check()  # which says what became of it
            return
        closed = msgspec.structs.replace(self.record, closed_at_ms=now_ms, closed_at=dict(positions))
        self._store.replace_if_match(VOLUME_KEY, msgspec.json.encode(closed), found[1])

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        """Stores a manifest object under a key that no other writer used; its etag."""
        self._check_unless_ahead()
        try:
            return self._store.put_if_absent(key, data, {**(metadata or {}), EPOCH_META: str(self.epoch)})
        except FencedError:
            self._latch(f"{key} holds another writer's bytes")
            raise

    def compose(self, key: str, sources: Sequence[str]) -> str:
        """Stores a bundle of manifest objects; its etag."""
        self.check()
        try:
            return self._store.compose(key, sources)
        except FencedError:
            self._latch(f"{key} holds another writer's bytes")
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, after making sure that they are still ours to delete."""
        self.check()
        self._store.delete(keys)

    def _latch(self, why: str) -> None:
        if self._latched is None:
            self._latched = f"this writer is fenced and read-only: {why}; unmount, then mount again"
            log.error("remote: %s", self._latched)
