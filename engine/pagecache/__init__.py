"""PageCache: tier 0 in memory. `cache` is what callers use, `policy` decides which page goes."""

from aof2.engine.pagecache.cache import PageCache, PageCacheFullError
from aof2.engine.pagecache.policy import PageKey

__all__ = ["PageCache", "PageCacheFullError", "PageKey"]
