"""What the quota counts with: levels, accounts, the disk's free space, and its errors.

Owner: plain data of `storage.StorageQuota`. Crash: nothing here touches a disk but statvfs, which reads.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.errors import Aof2Error
from aof2.engine.units import format_size

MAPS_SHARE: Final = 512
MAPS_FROM_BYTES: Final = 64 << 20


class Level(StrEnum):
    """Whose budget."""

    VOLUME = "volume"
    TENANT = "tenant"
    JOB = "job"
    DISK = "disk"


class QuotaExceededError(Aof2Error):
    """No room. `never`: the request is larger than a limit, make it smaller; else free something and ask again."""

    def __init__(self, level: Level, needed_bytes: int, limit_bytes: int, *, name: str = "", never: bool) -> None:
        self.level = level
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.never = never
        whose = f"{level} {name}" if name else f"the {level}"
        need, limit = format_size(needed_bytes), format_size(limit_bytes)
        advice = "it can never fit; raise the limit" if never else "none is free; evict, or raise the limit"
        super().__init__(f"no room for {need} within the {limit} of {whose}: {advice}")


class ReservationExpiredError(Aof2Error):
    """The lease ran out; its room may be another request's by now. Stop writing, remove what was staged, plan again."""


class DiskSpace(NamedTuple):
    total_bytes: int
    free_bytes: int


class Usage(NamedTuple):
    """An account as it stands. `limit_bytes` None: no limit of its own."""

    used_bytes: int
    reserved_bytes: int
    limit_bytes: int | None


class Shortage(NamedTuple):
    """What must go before a request fits: of any tenant's, of the tenant's own. `never`: whose limit is below it."""

    everyones_bytes: int
    tenants_bytes: int
    never: Level | None


def disk_space(path: Path) -> DiskSpace:
    """What the filesystem under `path` has for us (statvfs, without the blocks kept for root)."""
    fs = os.statvfs(path)
    return DiskSpace(fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize)


def limit_for_data(limit_bytes: int) -> int:
    """What files' bytes may take of a limit that holds for all they take: where they are in many pieces, the filesystem
    keeps blocks for their maps. Small limits, of tests, are met to the byte."""
    return limit_bytes - limit_bytes // MAPS_SHARE if limit_bytes >= MAPS_FROM_BYTES else limit_bytes


class Account:
    """One budget and what is taken of it. `holders` counts live reservations."""

    __slots__ = ("holders", "level", "limit_bytes", "name", "reserved_bytes", "used_bytes")

    def __init__(self, level: Level, name: str = "", limit_bytes: int | None = None) -> None:
        self.level = level
        self.name = name
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.holders = 0

    def short_bytes(self, wanted_bytes: int) -> int:
        """How much is missing for that much more; 0 when it fits."""
        if self.limit_bytes is None:
            return 0
        return max(0, self.used_bytes + self.reserved_bytes + wanted_bytes - self.limit_bytes)

    def usage(self) -> Usage:
        return Usage(self.used_bytes, self.reserved_bytes, self.limit_bytes)
