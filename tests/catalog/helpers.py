"""A catalog on disk for tests: open, write through the writer, close, and every row of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.recovery import Opened, open_catalog, open_stream
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter, WriterEvents
from aof2.engine.env import Env
from aof2.engine.manifest.writer import LogSettings


class Volume:
    """Catalog and writer over `root/catalog` and `root/manifest`, with streams made as they are asked for."""

    def __init__(self, env: Env, root: Path, opened: Opened, events: WriterEvents | None = None) -> None:
        self.env = env
        self.root = root
        self.opened = opened
        self.catalog: Catalog = opened.catalog
        self.target = CatalogTarget(env, opened.catalog, opened.streams, events)
        self.writer = CatalogWriter(self.target).start()

    def close(self) -> None:
        self.writer.close()
        self.catalog.close()

    def directory(self, stream_id: int) -> Path:
        return self.root / "manifest" / str(stream_id)


def settings(**changes: object) -> LogSettings:
    return LogSettings(**{"chunk_capacity": 16 << 10, "rotation_period_ms": 3_600_000, **changes})  # type: ignore[arg-type]


def open_volume(
    root: Path,
    *,
    streams: tuple[int, ...] = (1,),
    env: Env | None = None,
    map_bytes: int = 1 << 30,
    log: LogSettings | None = None,
    events: WriterEvents | None = None,
) -> Volume:
    env = env or Env()
    log = log or settings()
    opened = open_catalog(env, root / "catalog", root / "manifest", log, map_bytes=map_bytes)
    for stream_id in streams:
        if stream_id not in opened.streams and stream_id not in opened.quarantined:
            opened.streams[stream_id] = open_stream(env, opened.catalog, root / "manifest", log, stream_id)
    return Volume(env, root, opened, events)


@contextmanager
def volume(root: Path, **options: object) -> Iterator[Volume]:
    v = open_volume(root, **options)  # type: ignore[arg-type]
    try:
        yield v
    finally:
        v.close()


def every_row(view: View) -> dict[tuple[str, bytes], bytes]:
    """All rows but the log positions, which say how the rows came about and not what they are."""
    return {
        (name, key): value
        for name in t.DATABASES
        for key, value in view.raw_scan(name, b"")
        if not key.startswith(t.POSITION_PREFIX)
    }
