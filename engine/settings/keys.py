"""The keys of mount.conf: which field each sets, and how its value is read.

A parser takes what TOML gave and returns the field's value, or raises ValueError with what is allowed; `loader` adds
the file, the key and the value to that.

Owner: tables and pure functions. Crash: nothing here touches a disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from aof2.engine.manifest.format import CAPACITY_MAX, CAPACITY_MIN
from aof2.engine.settings.model import Section, Settings
from aof2.engine.settings.remote import RemoteSettings, url_as_written
from aof2.engine.units import format_size, format_time, parse_min_free, parse_size, parse_time_ms

TENANT_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")
PAGE_CACHE_BYTES_MIN: Final = 16 << 20

_KIB, _MIB, _TIB, _PIB = 1 << 10, 1 << 20, 1 << 40, 1 << 50
_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS = 1000, 60_000, 3_600_000, 86_400_000

Parser = Callable[[Any], Any]


def _within(parse: Callable[[Any], int], shown: Callable[[int], str], least: int, most: int) -> Parser:
    def parse_within(value: Any) -> int:
        number = parse(value)
        if not least <= number <= most:
            raise ValueError(f"{shown(least)} to {shown(most)}")
        return number

    return parse_within


def _size(least: int, most: int = _PIB) -> Parser:
    return _within(parse_size, format_size, least, most)


def _time_ms(least_ms: int, most_ms: int) -> Parser:
    return _within(parse_time_ms, format_time, least_ms, most_ms)


def _time_s(least_ms: int, most_ms: int) -> Parser:
    parse_ms = _time_ms(least_ms, most_ms)
    return lambda value: parse_ms(value) / 1000


def _or_off(parse: Parser) -> Parser:
    """ "" gives None."""

    def parse_or_off(value: Any) -> Any:
        if value == "":
            return None
        try:
            return parse(value)
        except ValueError as e:
            raise ValueError(f'{e}, or "" for none') from None

    return parse_or_off


def _count(least: int, most: int) -> Parser:
    def parse(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"a whole number, {least} to {most}")
        return value

    return parse


def _share(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError("a number above 0 and at most 1")
    return float(value)


def _share_or_0(value: Any) -> float:
    if value == 0 and not isinstance(value, bool):
        return 0.0
    try:
        return _share(value)
    except ValueError:
        raise ValueError("a number from 0 to 1") from None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004
    return value


def _choice(*choices: str) -> Parser:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(" or ".join(f'"{c}"' for c in choices))
        return str(value)

    return parse


def _text(pattern: str, allowed: str) -> Parser:
    compiled = re.compile(pattern)

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError(allowed)
        return value

    return parse


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("a path")
    return Path(value)


def _page_bytes(value: Any) -> int:
    size = parse_size(value)
    if size & (size - 1) or not 512 <= size <= 64 * _KIB:
        raise ValueError("a power of two, 512B to 64KiB")
    return size


def _listen(value: Any) -> str:
    if value == "":
        return ""
    try:
        split_listen(str(value))
    except ValueError:
        raise ValueError('host:port (127.0.0.1:9464, [::1]:9464), or "" for none') from None
    return str(value)


def split_listen(listen: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` → (host, port). ValueError on anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^\s:/\[\]@]+)):([0-9]{1,5})", listen)
    if match is None or int(match[3]) > 65_535:
        raise ValueError(listen)
    return match[1] or match[2], int(match[3])


class Key(NamedTuple):
    """A key of the file: the field it sets and how its value is read."""

    field: str
    parse: Parser


TENANT_KEYS: Final = {
    "quota": Key("quota_bytes", _or_off(_size(1))),
    "compression": Key("compression", _choice("zstd", "none")),
}
SECTION_KEYS: Final[dict[str, dict[str, Key]]] = {
    "volume": {
        "mountpoint": Key("mountpoint", _path),
        "state_dir": Key("state_dir", _path),
    },
    "mount": {"uring": Key("uring", _choice("auto", "off"))},
    "remote": {
        "url": Key("url", url_as_written),
        "endpoint_url": Key("endpoint_url", _text(r"(https?://[^\s/@?#]+/?)?", 'http(s)://host:port, or "" for AWS')),
        "region": Key("region", _text(r"[A-Za-z0-9-]{0,64}", 'a region such as eu-central-1, or ""')),
        "timeout": Key("timeout_s", _time_s(100, _HOUR_MS)),
        "retries": Key("retries", _count(0, 100)),
        "parallel": Key("parallel", _count(1, 256)),
        "pack_after": Key("pack_after_s", _time_s(0, _MINUTE_MS)),
    },
    "cache": {
        "hot_bytes": Key("hot_bytes", _size(1)),
        "warm_bytes": Key("warm_bytes", _size(0)),
        "page_cache_bytes": Key("page_cache_bytes", _size(PAGE_CACHE_BYTES_MIN, _TIB)),
        "low_water": Key("low_water", _share),
        "min_free": Key("min_free", parse_min_free),
        "cold_scan_bytes_per_s": Key("cold_scan_bytes_per_s", _size(_MIB, _TIB)),
        "cold_scan_parallel": Key("cold_scan_parallel", _count(1, 256)),
        "scrub_every": Key("scrub_every_s", _or_off(_time_s(_MINUTE_MS, 3650 * _DAY_MS))),
    },
    "retention": {
        "undelete_window": Key("undelete_window_s", _time_s(0, 3650 * _DAY_MS)),
        "checkpoints": Key("checkpoints", _count(1, 1_000_000)),
        "purge_after": Key("purge_after_s", _time_s(0, 3650 * _DAY_MS)),
        "cursor_idle": Key("cursor_idle_s", _time_s(_SECOND_MS, 3650 * _DAY_MS)),
        "pack_live_share": Key("pack_live_share", _share_or_0),
        "rewrite_bytes_per_s": Key("rewrite_bytes_per_s", _size(64 * _KIB, _TIB)),
    },
    "manifest": {
        "chunk_capacity": Key("chunk_capacity_bytes", _size(CAPACITY_MIN, CAPACITY_MAX)),
        "rotation_period": Key("rotation_period_ms", _time_ms(1, _HOUR_MS)),
        "commit_period": Key("commit_period_ms", _time_ms(1, _MINUTE_MS)),
        "durable": Key("durable", _flag),
        "enabled": Key("enabled", _flag),
        "shadow": Key("shadow", _flag),
    },
    "follow": {
        "follow_period": Key("follow_period_s", _time_s(10, _HOUR_MS)),
        "inbox_period": Key("inbox_period_s", _or_off(_time_s(100, _HOUR_MS))),
        "inbox_keep": Key("inbox_keep_s", _time_s(_MINUTE_MS, 3650 * _DAY_MS)),
    },
    "metrics": {"listen": Key("listen", _listen)},
}
FILES_KEYS: Final = {**TENANT_KEYS, "write_mode": Key("write_mode", _choice("auto", "passthrough", "budget"))}
APPEND_KEYS: Final = {
    **TENANT_KEYS,
    "ext": Key("ext", _text(r"[A-Za-z0-9]{1,16}", "1 to 16 letters and digits, without the dot")),
    "framing": Key("framing", _choice("line", "record")),
    "segment_bytes": Key("segment_bytes", _size(4 * _KIB)),
    "seal_after": Key("seal_after_s", _time_s(10, _DAY_MS)),
}
PAGED_KEYS: Final = {
    **TENANT_KEYS,
    "page_bytes": Key("page_bytes", _page_bytes),
    "delta_threshold": Key("delta_threshold", _share),
    "checkpoint_every": Key("checkpoint_every_s", _time_s(100, _DAY_MS)),
}
SECTIONS: Final[dict[str, type[Section | RemoteSettings]]] = {
    field.name: field.type for field in msgspec.structs.fields(Settings) if field.name in SECTION_KEYS
}
