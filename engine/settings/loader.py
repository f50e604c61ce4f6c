"""mount.conf → Settings, or one line saying what is wrong with it.

Invariants
- A `Settings` that came out of `load_settings` is consistent: no key unknown, every limit in its range, no limit
  against another, and state, remote and mountpoint apart from each other.
- Relative paths are relative to the conf's folder. Names are compared and symlinks followed; nothing is created.
- `[tenants]`: what the file lists is what there is; a file that lists none gets the three of the shipped mount.conf.

Owner: the caller. Crash: nothing is written.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from aof2.engine.errors import Aof2Error
from aof2.engine.kinds import registry
from aof2.engine.settings.keys import SECTION_KEYS, SECTIONS, TENANT_NAME, Key
from aof2.engine.settings.model import (
    TENANTS_DEFAULT,
    EngineSettings,
    Section,
    Settings,
    TenantSettings,
    VolumeSettings,
)
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.units import format_size

CONF_NAME: Final = "mount.conf"
CONF_SYSTEM: Final = Path("/etc/aof2/mount.conf")
CONF_VARIABLE: Final = "AOF2_CONF"
CONF_BYTES_MAX: Final = 1 << 20


class SettingsError(Aof2Error):
    """mount.conf cannot be used as it is. The user edits it; nothing has been touched. `problems` has every finding."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)


def find_conf(explicit: str | None = None) -> Path:
    """The conf to use: the one named, else $AOF2_CONF, else ./mount.conf, else /etc/aof2/mount.conf."""
    for named, by in ((explicit, "--conf"), (os.environ.get(CONF_VARIABLE), f"${CONF_VARIABLE}")):
        if named:
            if not Path(named).exists():
                raise SettingsError([f"{named}: no such file (named by {by}); check the path"])
            return Path(named)
    for candidate in (Path(CONF_NAME), CONF_SYSTEM):
        if candidate.exists():
            return candidate
    raise SettingsError([f"no {CONF_NAME} here and no {CONF_SYSTEM}; write one, or name it with --conf FILE"])


class _Place(NamedTuple):
    key: str
    path: Path
    real: Path


def load_settings(path: Path, *, engine: EngineSettings | None = None, mountpoint: Path | None = None) -> Settings:
    """Reads and checks a mount.conf, with the mountpoint given instead of its own, if one is. SettingsError, on one
    line, for anything wrong with it."""
    raw = _read(path)
    if mountpoint is not None and isinstance(volume := raw.get("volume"), dict):
        volume["mountpoint"] = str(mountpoint)
    return _Loader(path, engine or EngineSettings()).load(raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(CONF_BYTES_MAX + 1)
    except OSError as e:
        raise SettingsError([f"{path}: {(e.strerror or str(e)).lower()}; name a conf with --conf FILE"]) from None
    if len(data) > CONF_BYTES_MAX:
        raise SettingsError([f"{path}: over {format_size(CONF_BYTES_MAX)}, which is no {CONF_NAME}"])
    try:
        return msgspec.toml.decode(data.decode("utf-8-sig"), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise SettingsError([f"{path}: not TOML: {str(e) or type(e).__name__}"]) from None


class _Loader:
    """One pass over one file; `problems` gathers everything found, in the order of the file."""

    def __init__(self, path: Path, engine: EngineSettings) -> None:
        self.path = path
        self.engine = engine
        self.problems: list[str] = []

    def load(self, raw: dict[str, Any]) -> Settings:
        known = [*SECTIONS, "tenants"]
        for name in [n for n in raw if n not in known]:
            self._unknown(f"[{name}]" if isinstance(raw[name], dict) else name, name, known)
        parts: dict[str, Any] = {name: self._section(name, raw.get(name, {})) for name in SECTIONS}
        tenants = self._tenants(raw["tenants"]) if "tenants" in raw else dict(TENANTS_DEFAULT)
        self._stop_if_problems()
        settings = self._with_absolute_paths(Settings(**parts, tenants=tenants, engine=self.engine))
        self._check_limits(settings)
        self._check_places(settings)
        self._stop_if_problems()
        return settings

    def _stop_if_problems(self) -> None:
        if self.problems:
            raise SettingsError(self.problems)

    def _bad(self, key: str, value: object, allowed: str) -> None:
        self.problems.append(f"{self.path}: {key} = {_as_toml(value)}: it must be {allowed}")

    def _clash(self, key: str, value: object, why: str) -> None:
        self.problems.append(f"{self.path}: {key} = {_as_toml(value)}: {why}")

    def _unknown(self, shown: str, name: str, known: list[str]) -> None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        self.problems.append(f"{self.path}: {_one_line(shown)}: no such key; {hint}")

    def _section(self, name: str, raw: Any) -> Section | RemoteSettings | None:
        if not isinstance(raw, dict):
            self._bad(name, raw, f"a table: [{name}]")
            return None
        fields = self._fields(name, raw, SECTION_KEYS[name])
        if name == "volume":
            missing = [key for key in SECTION_KEYS[name] if key not in raw]
            self.problems += [f"{self.path}: {name}.{key} is missing; it must be a path" for key in missing]
            if len(fields) < len(SECTION_KEYS[name]):
                return None
        if str(fields.get("url", "")).startswith("file://"):
            fields["url"] = self._absolute(_file_path(fields["url"])).as_uri()
        try:
            return SECTIONS[name](**fields)
        except ValueError as e:
            self.problems.append(f"{self.path}: {e}")
            return None

    def _fields(self, where: str, raw: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
        fields = {}
        for name, value in raw.items():
            if name not in keys:
                self._unknown(f"{where}.{name}", name, list(keys))
                continue
            try:
                fields[keys[name].field] = keys[name].parse(value)
            except ValueError as e:
                self._bad(f"{where}.{name}", value, str(e))
        return fields

    def _tenants(self, raw: Any) -> dict[str, TenantSettings]:
        if not isinstance(raw, dict) or not raw:
            self._bad("tenants", raw, "one table a tenant: [tenants.NAME]")
            return {}
        return {name: tenant for name, table in raw.items() if (tenant := self._tenant(name, table))}

    def _tenant(self, name: str, raw: Any) -> TenantSettings | None:
        where = f"tenants.{name}"
        if not TENANT_NAME.fullmatch(name):
            self.problems.append(f"{self.path}: [{_one_line(where)}]: a tenant's name must match {TENANT_NAME.pattern}")
            return None
        if not isinstance(raw, dict):
            self._bad(where, raw, f"a table: [{where}]")
            return None
        kind = raw.get("kind", registry.DEFAULT)
        entry = registry.by_name(kind) if isinstance(kind, str) else None
        if entry is None:
            self._bad(f"{where}.kind", kind, " or ".join(f'"{one.name}"' for one in registry.REGISTERED))
            return None
        rest = {}
        for key, value in raw.items():
            owners = [one.name for one in registry.REGISTERED if key in one.keys and key not in entry.keys]
            if owners:
                self._clash(f"{where}.{key}", value, f'a key of kind "{owners[0]}", but {where}.kind is "{kind}"')
            elif key != "kind":
                rest[key] = value
        return entry.settings(**self._fields(where, rest, {"kind": Key("kind", str), **entry.keys}))

    # -- limits against each other -----------------------------------------------------------------------------

    def _check_limits(self, s: Settings) -> None:
        chunk = self.engine.chunk_bytes
        if s.cache.hot_bytes < chunk:
            self._bad("cache.hot_bytes", format_size(s.cache.hot_bytes), f"at least {format_size(chunk)}: one chunk")
        if 0 < s.cache.warm_bytes < chunk:
            allowed = f"0 (no warm tier) or at least {format_size(chunk)}: one chunk"
            self._bad("cache.warm_bytes", format_size(s.cache.warm_bytes), allowed)
        for name, tenant in s.tenants.items():
            if tenant.quota_bytes is not None and tenant.quota_bytes < chunk:
                allowed = f'at least {format_size(chunk)} (one chunk), or "" for none'
                self._bad(f"tenants.{name}.quota", format_size(tenant.quota_bytes), allowed)
            for key, value, allowed in tenant.beyond_limits(chunk):
                self._bad(f"tenants.{name}.{key}", value, allowed)
        if s.remote.endpoint_url and s.remote.directory is not None:
            why = f"it goes with an s3:// url, but remote.url is {_as_toml(s.remote.url)}; empty it or change the url"
            self._clash("remote.endpoint_url", s.remote.endpoint_url, why)

    # -- places ------------------------------------------------------------------------------------------------

    def _with_absolute_paths(self, s: Settings) -> Settings:
        volume = VolumeSettings(
            mountpoint=self._absolute(s.volume.mountpoint), state_dir=self._absolute(s.volume.state_dir)
        )
        return msgspec.structs.replace(s, volume=volume)

    def _absolute(self, path: Path) -> Path:
        return Path(os.path.abspath(self.path.parent / path))  # noqa: PTH100 (no symlink is followed yet)

    def _check_places(self, s: Settings) -> None:
        """state_dir, the remote's folder and the mountpoint may not hold one another."""
        mountpoint, state_dir, remote = s.volume.mountpoint, s.volume.state_dir, s.remote.directory
        # A mountpoint is not looked at itself: where its daemon hangs, looking would hang too.
        mount = _Place("volume.mountpoint", mountpoint, Path(os.path.realpath(mountpoint.parent)) / mountpoint.name)
        places = [mount, _Place("volume.state_dir", state_dir, Path(os.path.realpath(state_dir)))]
        if remote is not None:
            places.append(_Place("remote.url", remote, Path(os.path.realpath(remote))))
        for place in places:
            if place.path == Path("/"):
                self._clash(place.key, "/", "it must be a folder of its own, not the root of the machine")
        for one, two in itertools.combinations(reversed(places), 2):
            if relation := _relation(one, two):
                why = f"it {relation} {two.key} ({two.path}); give each a folder of its own"
                self._clash(one.key, str(one.path), why)


def _file_path(url: str) -> Path:
    """The path in a file:// url; `file://localhost/x` is `/x`, `file://x` is relative."""
    text = url.removeprefix("file://")
    return Path(unquote(text.removeprefix("localhost") if text.startswith("localhost/") else text))


def _relation(a: _Place, b: _Place) -> str:
    """How two folders overlap, by name or once symlinks are followed; "" when they are apart."""
    for one, two in ((a.path, b.path), (a.real, b.real)):
        if one == two:
            return "is the same as"
        if one.is_relative_to(two):
            return "lies in"
        if two.is_relative_to(one):
            return "contains"
    return ""


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{_one_line(value)}"'
    return _one_line(str(value))


def _one_line(text: str) -> str:
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= 200 else f"{shown[:199]}…"
