"""mount.conf as frozen settings. Everything that can be wrong with the file is found here, before anything is touched.

`model` has the structs and their defaults, `keys` how each key is read, `loader` the file itself and what contradicts.
"""

from aof2.engine.settings.loader import SettingsError, find_conf, load_settings
from aof2.engine.settings.model import (
    AppendTenant,
    CacheSettings,
    EngineSettings,
    FilesTenant,
    ManifestSettings,
    MetricsSettings,
    MountSettings,
    PagedTenant,
    RetentionSettings,
    Settings,
    TenantSettings,
    VolumeSettings,
)
from aof2.engine.settings.remote import RemoteSettings

__all__ = [
    "AppendTenant",
    "CacheSettings",
    "EngineSettings",
    "FilesTenant",
    "ManifestSettings",
    "MetricsSettings",
    "MountSettings",
    "PagedTenant",
    "RemoteSettings",
    "RetentionSettings",
    "Settings",
    "SettingsError",
    "TenantSettings",
    "VolumeSettings",
    "find_conf",
    "load_settings",
]
