"""What a volume is set to: one frozen struct a section of mount.conf.

The defaults here are the file's defaults. Field names carry units where the file's keys do not (`timeout` in the file
is `timeout_s` here). Code that builds settings itself (tests) is trusted to keep them consistent; files are checked by
`loader`.

Owner: plain data, shared freely. Crash: nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.units import MinFree, format_size

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file."""


class VolumeSettings(Section, frozen=True, kw_only=True):
    """Where the mount appears and where its local state lives. The only section without defaults."""

    mountpoint: Path
    state_dir: Path


class MountSettings(Section, frozen=True, kw_only=True):
    """How the kernel reaches us. `uring`: over io_uring where it can, or never."""

    uring: str = "auto"


class CacheSettings(Section, frozen=True, kw_only=True):
    """The bounded tiers on this machine, and how hard background readers may pull."""

    hot_bytes: int = 20 * _GIB
    warm_bytes: int = 5 * _GIB
    page_cache_bytes: int = 512 * _MIB
    low_water: float = 0.9
    min_free: MinFree = MinFree(fraction=0.05)
    cold_scan_bytes_per_s: int = 200 * _MIB
    cold_scan_parallel: int = 4
    scrub_every_s: float | None = 7 * 86_400.0


class RetentionSettings(Section, frozen=True, kw_only=True):
    """How long what is gone can be brought back, and when packs of small files are written without what is gone."""

    undelete_window_s: float = 7 * 86_400.0
    checkpoints: int = 10
    purge_after_s: float = 3_600.0
    cursor_idle_s: float = 86_400.0
    pack_live_share: float = 0.5
    rewrite_bytes_per_s: int = 16 * _MIB


class ManifestSettings(Section, frozen=True, kw_only=True):
    """The manifest log. `enabled = false` mounts the volume read-only."""

    chunk_capacity_bytes: int = 256 * _KIB
    rotation_period_ms: int = 250
    commit_period_ms: int = 100
    durable: bool = True
    enabled: bool = True
    shadow: bool = False


class FollowSettings(Section, frozen=True, kw_only=True):
    """What comes from, and goes to, other machines by way of the remote. `inbox_period_s` None: nothing is taken in."""

    follow_period_s: float = 1.0
    inbox_period_s: float | None = 2.0
    inbox_keep_s: float = 86_400.0


class MetricsSettings(Section, frozen=True, kw_only=True):
    """Where `/metrics` is served; "" serves it nowhere."""

    listen: str = "127.0.0.1:9464"


class TenantSettings(Section, frozen=True, kw_only=True):
    """What tenants of every kind have. `quota_bytes` None: bounded by the volume alone."""

    quota_bytes: int | None = None
    compression: str = "zstd"

    def beyond_limits(self, chunk_bytes: int) -> list[tuple[str, str, str]]:
        """(key, value, what is allowed) of what does not go with the volume's sizes."""
        return []


class FilesTenant(TenantSettings, frozen=True, kw_only=True):
    """Ordinary files. `write_mode`: who answers WRITE (auto: the kernel while there is room)."""

    write_mode: str = "auto"


class AppendTenant(TenantSettings, frozen=True, kw_only=True):
    """Record streams. `framing`: a record is a line, or what one write() brought."""

    ext: str = "jsonl"
    framing: str = "line"
    segment_bytes: int = 64 * _MIB
    seal_after_s: float = 10.0

    def beyond_limits(self, chunk_bytes: int) -> list[tuple[str, str, str]]:
        if self.segment_bytes <= chunk_bytes:
            return []
        allowed = f"at most {format_size(chunk_bytes)}: a sealed segment is one chunk"
        return [("segment_bytes", format_size(self.segment_bytes), allowed)]


class PagedTenant(TenantSettings, frozen=True, kw_only=True):
    """libsql-style files. Above `delta_threshold` of changed pages a chunk is rewritten instead of patched."""

    page_bytes: int = 4096
    delta_threshold: float = 0.25
    checkpoint_every_s: float = 60.0


class EngineSettings(Section, frozen=True, kw_only=True):
    """Not in the file: sizes that are part of the format. Tests make them small with `msgspec.structs.replace`."""

    chunk_bytes: int = 64 * _MIB
    block_bytes: int = 1 * _MIB


TENANTS_DEFAULT: Final[dict[str, TenantSettings]] = {
    "default": FilesTenant(),
    "events": AppendTenant(),
    "db": PagedTenant(),
}


class Settings(Section, frozen=True, kw_only=True):
    """One volume's settings."""

    volume: VolumeSettings
    mount: MountSettings = MountSettings()
    remote: RemoteSettings = RemoteSettings()
    cache: CacheSettings = CacheSettings()
    retention: RetentionSettings = RetentionSettings()
    manifest: ManifestSettings = ManifestSettings()
    follow: FollowSettings = FollowSettings()
    metrics: MetricsSettings = MetricsSettings()
    tenants: dict[str, TenantSettings] = msgspec.field(default_factory=lambda: dict(TENANTS_DEFAULT))
    engine: EngineSettings = EngineSettings()
