"""The remote tier: one interface, S3 or a directory behind it.

store.py the interface · s3.py, directory.py the backends · resilience.py deadlines, retries, breaker · keys.py names ·
fence.py one writer a volume · limiter.py cold scans · manifest.py what the log asks for · source.py bytes in and out.
"""

from aof2.engine.remote.errors import (
    FencedError,
    RemoteAuthError,
    RemoteCorruptError,
    RemoteMissingError,
    RemoteRefusedError,
    RemoteThrottledError,
    RemoteUnavailableError,
    reason_of,
)
from aof2.engine.remote.fence import Fence, VolumeRecord, claim, read_volume
from aof2.engine.remote.limiter import ReadLimiters, RemoteReadLimiter
from aof2.engine.remote.manifest import FencedManifestRemote
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.resilience import BreakerState, RemoteStats
from aof2.engine.remote.source import BytesWriter, ChunksSource, FileSource, fd_writer
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.settings.remote import RemoteSettings, parse_url

__all__ = [
    "BlobInfo",
    "BreakerState",
    "BytesWriter",
    "ChunksSource",
    "Fence",
    "FencedError",
    "FencedManifestRemote",
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
    "fd_writer",
    "open_remote",
    "parse_url",
    "read_volume",
    "reason_of",
]
