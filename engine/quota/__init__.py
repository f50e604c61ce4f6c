"""StorageQuota: no byte lands on the local disk without room set aside for it first. `storage` says how."""

from aof2.engine.quota.accounts import QuotaExceededError
from aof2.engine.quota.storage import Reservation, StorageQuota

__all__ = ["QuotaExceededError", "Reservation", "StorageQuota"]
