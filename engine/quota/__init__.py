"""StorageQuota: no byte lands on the local disk without room set aside for it first. `storage` says how."""

from aof2.engine.quota.accounts import (
    DiskSpace,
    Level,
    QuotaExceededError,
    ReservationExpiredError,
    Usage,
    disk_space,
    limit_for_data,
)
from aof2.engine.quota.storage import Reservation, StorageQuota

__all__ = [
    "DiskSpace",
    "Level",
    "QuotaExceededError",
    "Reservation",
    "ReservationExpiredError",
    "StorageQuota",
    "Usage",
    "disk_space",
    "limit_for_data",
]
