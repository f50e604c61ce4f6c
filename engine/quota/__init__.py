"""StorageQuota: no byte lands on the local disk without room set aside for it first. `storage` says how."""

from aof2.engine.quota.accounts import (
    DiskSpace,
    Level,
    QuotaExceededError,
    ReservationExpiredError,
    Shortage,
    Usage,
    disk_space,
    limit_for_data,
)
from aof2.engine.quota.storage import EvictHint, Reservation, StorageQuota

__all__ = [
    "DiskSpace",
    "EvictHint",
    "Level",
    "QuotaExceededError",
    "Reservation",
    "ReservationExpiredError",
    "Shortage",
    "StorageQuota",
    "Usage",
    "disk_space",
    "limit_for_data",
]
