"""What the daemon tells of its mount, for `aof2 status` and `top`: they load this and no engine."""

from __future__ import annotations

import msgspec

from aof2.engine.follow.facts import FollowerFact, FollowStatus


class MountStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What only the daemon knows. `follow`: how far this mount is, which follows; `followers`: those of a writer.
    Counters are since it started; `unsealed_bytes` are part of the dirty bytes,
    `handed_over` answers that were too long for the FUSE socket, `transport` is how requests come."""

    mountpoint: str
    pid: int
    started_ms: int
    read_only: bool
    read_only_why: str
    fenced: bool
    passthrough: bool
    passthrough_why: str
    brake: bool = False
    brake_why: str = ""
    transport: str = ""
    open_files: int
    handed_over: int
    unsealed_files: int
    unsealed_bytes: int
    pinned_files: int
    pinned_bytes: int
    page_cache_bytes: int
    page_cache_limit_bytes: int
    page_cache_hits: int
    page_cache_misses: int
    hydrated_bytes: int
    evictions: int
    evicted_bytes: int
    thrash: int
    remote_state: str
    remote_sent_bytes: int
    remote_received_bytes: int
    remote_errors: int
    remote_refused: int = 0
    refused_since_ms: int | None = None
    refused_why: str = ""
    mended_log_files: int = 0
    unknown_events: int = 0
    follow: FollowStatus | None = None
    followers: list[FollowerFact] = []
