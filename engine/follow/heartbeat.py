"""Heartbeats: `followers/<id>.json` in the remote says who follows the volume, and what it may still read.

    {"format_version": 1, "id": "…", "host": "…", "volume_uuid": "…", "at_ms": …, "period_s": 30,
     "streams": {"1": {"position": [chunk_index, chunk_offset, ordinal], "seen_ms": …, "oldest_ms": …}}}

`seen_ms` is the time of the newest record that the follower replayed, `oldest_ms` that of the oldest state that a file
is open at there; both are the writer's clock, out of its log. A blob that nothing has referenced since then is of no
use to that follower any more; what lost its last reference later stays (`kept_since_ms`).

A heartbeat counts for LIVE_S from when the writer first saw it as it is: no two clocks are compared.

Invariants
- A follower that cannot put its heartbeat reads the log's end before it serves what is not here (`following.py`).

Owner: of the file, the follower's task; of `Followers`, the writer's: looked at by worker threads one at a time, read
from any. A crash leaves a heartbeat that stops counting after LIVE_S, and is deleted after FORGET_S.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec
import trio

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.follow.facts import FollowerFact
from aof2.engine.locks import thread_lock
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import FOLLOWERS_PREFIX, follower_key
from aof2.engine.remote.store import RemoteStore

log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
BEAT_EVERY_S: Final = 30.0
LIVE_S: Final = 600.0
FORGET_S: Final = 86_400.0
LOOK_EVERY_S: Final = 60.0


class StreamBeat(msgspec.Struct, frozen=True, kw_only=True):
    """How far a follower has one stream."""

    position: tuple[int, int, int]
    seen_ms: int
    oldest_ms: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of followers/<id>.json."""

    format_version: int
    id: str
    host: str
    volume_uuid: str
    at_ms: int
    period_s: float = BEAT_EVERY_S
    streams: dict[int, StreamBeat] = {}


def put_heartbeat(store: RemoteStore, beat: Heartbeat) -> None:
    data = msgspec.json.encode(beat)
    store.put_blob(follower_key(beat.id), data, len(data))


def delete_heartbeat(store: RemoteStore, follower_id: str) -> None:
    store.delete([follower_key(follower_id)])


def parse_heartbeat(data: bytes) -> Heartbeat | None:
    """None: a newer AOF2's, or none of ours. It counts all the same, as one that may read anything."""
    try:
        beat = msgspec.json.decode(data, type=Heartbeat)
    except msgspec.MsgspecError:
        return None
    return beat if beat.format_version == FORMAT_VERSION else None


class _Seen(msgspec.Struct):
    etag: str
    beat: Heartbeat | None
    since_s: float  # when it was first seen as it is, by our clock


class Followers:
    """The followers of a volume, as its writer knows them."""

    def __init__(self, env: Env, store: RemoteStore) -> None:
        self._env = env
        self._store = store
        self._lock = thread_lock()
        self._seen: dict[str, _Seen] = {}

    def look(self) -> None:
        """Reads what is there now. TransientError: the remote is away, and what was known counts. Blocks."""
        now_s = self._env.monotonic_s()
        found: dict[str, _Seen] = {}
        forgotten: list[str] = []
        with self._lock:
            known = dict(self._seen)
        for info in self._store.list(FOLLOWERS_PREFIX):
            old = known.get(info.key)
            if old is None or not info.etag or old.etag != info.etag:
                try:
                    beat = parse_heartbeat(self._store.get_blob(info.key)[1])
                except RemoteMissingError:
                    continue  # unmounted meanwhile
                if old is None or old.beat != beat or beat is None:
                    old = _Seen(info.etag, beat, now_s)
            if now_s - old.since_s > FORGET_S:
                forgotten.append(info.key)
                continue
            found[info.key] = old
        if forgotten:
            self._store.delete(forgotten)
        with self._lock:
            self._seen = found

    def kept_since_ms(self, stream_id: int) -> int | None:
        """What lost its last reference after this may still be read by a follower; None: nothing may."""
        now_s = self._env.monotonic_s()
        with self._lock:
            live = [seen for seen in self._seen.values() if now_s - seen.since_s <= LIVE_S]
        return min((_oldest_ms(seen.beat, stream_id) for seen in live), default=None)

    @property
    def live_count(self) -> int:
        now_s = self._env.monotonic_s()
        with self._lock:
            return sum(now_s - seen.since_s <= LIVE_S for seen in self._seen.values())

    def facts(self, ends: Mapping[int, int]) -> list[FollowerFact]:
        """For `status`; `ends`: where the logs end."""
        now_s = self._env.monotonic_s()
        with self._lock:
            seen = list(self._seen.values())
        return [
            FollowerFact(
                id=one.beat.id,
                host=one.beat.host,
                live=now_s - one.since_s <= LIVE_S,
                seen_s_ago=round(now_s - one.since_s, 1),
                lag_records=sum(
                    max(0, end - (one.beat.streams[s].position[2] if s in one.beat.streams else 0))
                    for s, end in ends.items()
                ),
                positions={s: stream.position[2] for s, stream in sorted(one.beat.streams.items())},
            )
            for one in seen
            if one.beat is not None
        ]


def _oldest_ms(beat: Heartbeat | None, stream_id: int) -> int:
    stream = beat.streams.get(stream_id) if beat is not None else None
    return min(stream.oldest_ms, stream.seen_ms) if stream is not None else 0


async def watch_forever(followers: Followers) -> None:
    """The writer's task: so that one that ends is known to have been there, and for how long it is not heard of."""
    while True:
        try:
            await trio.to_thread.run_sync(followers.look)
        except (Aof2Error, OSError) as e:
            log.debug("followers are not known", extra={"error": str(e)})
        await trio.sleep(LOOK_EVERY_S)
