"""A small volume on a directory remote, and a way to run a trio test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
import trio

from aof2.engine.env import Env
from aof2.engine.settings import Settings
from aof2.engine.settings.model import (
    CacheSettings,
    EngineSettings,
    FilesTenant,
    ManifestSettings,
    MetricsSettings,
    RemoteSettings,
    VolumeSettings,
)
from aof2.engine.units import MinFree
from aof2.engine.volume import PARTS, Volume, open_volume

KIB = 1 << 10
MIB = 1 << 20


def small_settings(
    root: Path,
    *,
    hot_bytes: int = 64 * MIB,
    chunk_bytes: int = 256 * KIB,
    block_bytes: int = 16 * KIB,
    compression: str = "zstd",
    remote_url: str | None = None,
    **remote: object,
) -> Settings:
    """Chunks of 256 KiB and blocks of 16 KiB: large objects without large files."""
    (root / "remote").mkdir(parents=True, exist_ok=True)
    url = remote_url or f"file://{root / 'remote'}"
    return Settings(
        volume=VolumeSettings(mountpoint=root / "mnt", state_dir=root / "state"),
        remote=RemoteSettings(url=url, **remote),  # type: ignore[arg-type]
        cache=CacheSettings(hot_bytes=hot_bytes, page_cache_bytes=16 * MIB, min_free=MinFree()),
        manifest=ManifestSettings(chunk_capacity_bytes=16 * KIB),
        metrics=MetricsSettings(listen=""),
        tenants={"default": FilesTenant(compression=compression)},
        engine=EngineSettings(chunk_bytes=chunk_bytes, block_bytes=block_bytes),
    )


def run_volume(
    settings: Settings,
    body: Callable[[Volume], Awaitable[None]],
    *,
    env: Env | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    async def main() -> None:
        with trio.fail_after(120):
            async with open_volume(settings, env=env, parts=parts) as volume:
                await body(volume)

    trio.run(main)


def with_cache(settings: Settings, **changes: object) -> Settings:
    return msgspec.structs.replace(settings, cache=msgspec.structs.replace(settings.cache, **changes))
