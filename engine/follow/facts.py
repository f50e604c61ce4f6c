"""What `status` shows of a follower: what it says of itself, and what the writer knows of it."""

from __future__ import annotations

import msgspec

from aof2.engine.manifest.format import LogPosition


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one stream is. `behind_s`: since the log's end was last seen to be here."""

    stream_id: int
    tenant: str
    position: LogPosition | None
    seen_ms: int
    behind_s: float
    problem: str = ""


class FollowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A follower in `status`. `away_since_ms`: since then the remote does not answer; 0: it does."""

    id: str
    streams: list[StreamStatus]
    lag_s: float
    away_since_ms: int
    why_away: str
    heartbeat_s_ago: float | None
    problems: list[str]


class FollowerFact(msgspec.Struct, frozen=True, kw_only=True):
    """A follower as the writer's `status` shows it."""

    id: str
    host: str
    live: bool
    seen_s_ago: float
    lag_records: int
    positions: dict[int, int]
