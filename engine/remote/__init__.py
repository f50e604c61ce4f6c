"""The remote tier: one interface, S3 or a directory behind it.

store.py the interface · s3.py, directory.py the backends · resilience.py deadlines, retries, breaker · keys.py names ·
fence.py one writer a volume · limiter.py cold scans · source.py bytes in and out.
"""

from aof2.engine.remote.errors import (
    FencedError,
    RemoteAuthError,
    RemoteCorruptError,
    RemoteMissingError,
    RemoteRefusedError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from aof2.engine.remote.fence import Fence, VolumeRecord, claim, read_volume
from aof2.engine.remote.limiter import ReadLimiters, RemoteReadLimiter
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.resilience import BreakerState, RemoteStats
from aof2.engine.remote.source import ChunksSource, FileSource
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.settings.remote import RemoteSettings, parse_url

__all__ = [
    "BlobInfo",
    "BreakerState",
    "ChunksSource",
    "Fence",
    "FencedError",
    "FileSource",
    "ReadLimiters",
    "RemoteAuthError",
    "RemoteCorruptError",
    "RemoteMissingError",
    "RemoteReadLimiter",
    "RemoteRefusedError",
    "RemoteSettings",
    "RemoteStats",
    "RemoteStore",
    "RemoteThrottledError",
    "RemoteUnavailableError",
    "VolumeRecord",
    "claim",
    "open_remote",
    "parse_url",
    "read_volume",
]
