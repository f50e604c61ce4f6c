"""Which local copy goes next: `policy` is the interface, `InUse` the one volumes have, `saved` its order as a file.

How a copy leaves is none of its business: `tiering/evict.py` (hot_cache) and `local/warm.py`. What counts as a use is
told by those who see it; when the order is saved is in `tiering/recent.py`.
"""

from aof2.engine.recency.policy import EvictionPolicy
from aof2.engine.recency.segmented import SegmentedLru

__all__ = ["EvictionPolicy", "InUse", "SegmentedLru"]

InUse = SegmentedLru
