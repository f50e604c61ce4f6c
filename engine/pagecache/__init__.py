"""PageCache: tier 0 in memory. `cache` is what callers use, `policy` decides which page goes."""

from aof2.engine.pagecache.cache import CacheStats, PageCache, PageCacheFullError
from aof2.engine.pagecache.policy import PageKey

__all__ = ["CacheStats", "PageCache", "PageCacheFullError", "PageKey"]
