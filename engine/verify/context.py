"""What every check gets: the rows to check against, the settings, what to look at, where findings go.

Owner: made by run.py; shared by its threads. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.env import Env
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Collector

# Files that came or changed this shortly before the start of a look at a running volume may not have rows yet.
LIVE_GRACE_MS = 10_000


@dataclass
class Context:
    """`scope`: object keys (stream, inode) to look at, None for everything. `damaged`: streams without whole logs."""

    env: Env
    settings: Settings
    rows: Catalog
    out: Collector
    live: bool
    started_ms: int
    tenants: dict[int, str] = field(default_factory=dict)
    scope: set[tuple[int, int]] | None = None
    damaged: dict[int, str] = field(default_factory=dict)

    @property
    def state_dir(self) -> Path:
        return self.settings.volume.state_dir

    @property
    def block_bytes(self) -> int:
        return self.settings.engine.block_bytes

    def safe(self, stream_id: int) -> bool:
        """Whether the stream's rows are proven: where its log is damaged nothing of it is repaired."""
        return stream_id not in self.damaged

    def objects(self, view: View, stream_id: int) -> Iterator[ObjectRow]:
        """The object rows of a stream that are looked at."""
        if self.scope is None:
            for _, row in view.scan(stream_id, t.OBJECTS):
                yield row
            return
        for stream, ino in sorted(self.scope):
            if stream == stream_id:
                for _, row in view.scan(stream_id, t.OBJECTS, prefix=ino.to_bytes(8, "big")):
                    yield row

    def recent(self, modified_ms: float) -> bool:
        """On a running volume: too new to have a row for certain."""
        return self.live and modified_ms > self.started_ms - LIVE_GRACE_MS


def where(tenant: str, row: ObjectRow) -> dict[str, Any]:
    return {"tenant": tenant, "object": f"{row.ino}.{row.generation}"}
