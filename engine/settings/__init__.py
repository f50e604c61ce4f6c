"""mount.conf as frozen settings. Everything that can be wrong with the file is found here, before anything is touched.

`model` has the structs and their defaults, `keys` how each key is read, `loader` the file itself and what contradicts.
"""

from aof2.engine.settings.loader import SettingsError, find_conf, load_settings
from aof2.engine.settings.model import Settings

__all__ = ["Settings", "SettingsError", "find_conf", "load_settings"]
