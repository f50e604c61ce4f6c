"""What every check gets: the rows to check against, the settings, what to look at, where findings go.

Owner: made by run.py; `Context` is shared by its threads, an `OneStream` is one thread's. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.env import Env
from aof2.engine.follow.mark import load_mark
from aof2.engine.inspect.rows import MANIFEST_DIR
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import FINDINGS_MAX, Finding, Fix, Kind, Report, Severity, finding

# Files that came or changed this shortly before the start of a look at a running volume may not have rows yet.
LIVE_GRACE_MS = 10_000

K = TypeVar("K")
R = TypeVar("R")


@dataclass
class Context:
    """`scope`: object keys (stream, inode) to look at, None for everything. `damaged`: streams without whole logs."""

    env: Env
    settings: Settings
    rows: Catalog
    report: Report
    started_ms: int
    damaged: dict[int, str]
    tenants: dict[int, str] = field(default_factory=dict)
    scope: set[tuple[int, int]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state_dir(self) -> Path:
        return self.settings.volume.state_dir

    @property
    def follows(self) -> bool:
        """Whether the folder follows a volume that another machine writes."""
        return load_mark(self.state_dir) is not None

    @property
    def block_bytes(self) -> int:
        return self.settings.engine.block_bytes

    def recent(self, modified_ms: float) -> bool:
        """On a running volume: too new to have a row for certain."""
        return self.report.live and modified_ms > self.started_ms - LIVE_GRACE_MS

    @contextlib.contextmanager
    def stream(self, stream_id: int) -> Iterator[OneStream]:
        """For a worker thread."""
        with self.rows.view() as view:
            yield OneStream(self, view, stream_id)

    def add(self, found: Finding) -> None:
        with self._lock:
            if len(self.report.findings) < FINDINGS_MAX:
                self.report.findings.append(found)
            else:
                self.report.left_off += 1

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.report, name, getattr(self.report, name) + amount)


class OneStream:
    """A stream's rows in one view. Where its log is damaged they are not proven, and nothing of it is repaired."""

    def __init__(self, ctx: Context, view: View, stream_id: int) -> None:
        self.ctx = ctx
        self.view = view
        self.stream_id = stream_id
        self.tenant = ctx.tenants.get(stream_id, "")
        self.is_safe = stream_id not in ctx.damaged
        self.log_dir = ctx.state_dir / MANIFEST_DIR / str(stream_id)

    def get(self, table: t.Table[K, R], key: K) -> R | None:
        return self.view.get(self.stream_id, table, key)

    def scan(self, table: t.Table[K, R], *, prefix: bytes = b"") -> Iterator[tuple[K, R]]:
        return self.view.scan(self.stream_id, table, prefix=prefix)

    def objects(self) -> Iterator[ObjectRow]:
        """The object rows that are looked at."""
        scope = self.ctx.scope
        prefixes = [b""] if scope is None else [i.to_bytes(8, "big") for s, i in sorted(scope) if s == self.stream_id]
        for prefix in prefixes:
            for _, row in self.scan(t.OBJECTS, prefix=prefix):
                yield row

    def say(self, kind: Kind, severity: Severity, message: str, *, fix: Fix | None = None, **where: Any) -> Finding:
        return finding(kind, severity, message, fix=fix if self.is_safe else None, tenant=self.tenant, **where)


def name_of(row: ObjectRow) -> str:
    return f"{row.ino}.{row.generation}"
