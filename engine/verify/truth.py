"""The rows verify checks against: what the logs say, rebuilt beside the volume; the catalog is compared with them.

    the catalog's positions (child) → rows rebuilt from the logs up to there → compared → rebuilt to the logs' end

Where a stream's log is damaged, its rows are taken from the catalog instead, if that can be read: they are the best
there is, and nothing of that stream is repaired on their strength.

Invariants
- Read-only on the volume, and right while a daemon writes: both sides are at the same positions, whatever came since.

Owner: the calling thread. A crash leaves a temporary folder.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.catalog.store import Catalog, trusted
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.follow.ownlog import replay_here
from aof2.engine.inspect.rows import CATALOG_DIR, MANIFEST_DIR
from aof2.engine.manifest.format import LogPosition, ManifestIntegrityError
from aof2.engine.verify.findings import Finding, Kind, RebuildCatalog, Severity, finding
from aof2.engine.verify.probe import DIFFERENCES_MAX, Answer, Difference

ATTEMPTS = 3


class ProbeFailedError(Aof2Error):
    """The catalog could not be read; the message says how it ended."""


class Probe:
    """The child that looks at LMDB."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        command = [sys.executable, "-m", "aof2.engine.verify.probe", str(directory)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._child.kill()
        self._child.communicate()

    def positions(self) -> dict[int, LogPosition]:
        return {s: LogPosition(*p) for s, p in (self._hear().positions or {}).items()}

    def compare(self, folder: Path) -> tuple[list[Difference], int]:
        """The first differences, and how many there are."""
        answer = self._ask(f"compare {folder}\n")
        return answer.differences, answer.done

    def salvage(self, stream_id: int, folder: Path) -> None:
        self._ask(f"salvage {stream_id} {folder}\n")

    def _ask(self, line: str) -> Answer:
        if self._child.stdin is None:
            raise RuntimeError("the child has no stdin")
        with contextlib.suppress(BrokenPipeError):  # it ended: no answer comes
            self._child.stdin.write(line)
            self._child.stdin.flush()
        return self._hear()

    def _hear(self) -> Answer:
        line = self._child.stdout.readline() if self._child.stdout else ""
        if line:
            return msgspec.json.decode(line, type=Answer)
        _, said = self._child.communicate()
        code = self._child.returncode
        if code < 0:
            raise ProbeFailedError(f"{self._directory}: reading the catalog ended in {signal.Signals(-code).name}")
        raise ProbeFailedError(f"{self._directory}: the catalog cannot be read: {said.strip().splitlines()[-1:]}")


class Truth:
    """Rows rebuilt in `rows`; `damaged` streams with why; what the comparison found."""

    def __init__(self, state_dir: Path, rows: Catalog, *, live: bool) -> None:
        self.rows = rows
        self.live = live
        self.damaged: dict[int, str] = {}
        self.findings: list[Finding] = []
        self.stale = False  # retention overtook us: build it again
        self._catalog_dir = state_dir / CATALOG_DIR
        self._state_dir = state_dir
        self._manifest_dir = state_dir / MANIFEST_DIR

    def build(self) -> None:
        if not self._catalog_dir.exists() or not trusted(self._catalog_dir):
            self._note("the catalog was not closed under this boot; it is rebuilt from the logs at the next mount")
            self._rebuild(None)
            return
        with Probe(self._catalog_dir) as probe:
            try:
                self._rebuild(probe.positions())
                for stream_id in self.damaged:
                    probe.salvage(stream_id, self.rows.directory)
                self._report(*probe.compare(self.rows.directory))
            except ProbeFailedError as e:
                self._damage(str(e))
        if not self.live:
            self._rebuild(None)

    def _rebuild(self, positions: dict[int, LogPosition] | None) -> None:
        """Every stream's rows up to its position, None: to the end. A stream without a position has no rows yet."""
        for stream_id in stream_ids(self._manifest_dir):
            if stream_id in self.damaged or (positions is not None and stream_id not in positions):
                continue
            upto = positions[stream_id] if positions is not None else None
            try:
                replay_here(Env(), self.rows, self._state_dir, stream_id, upto=upto)
            except ManifestIntegrityError as e:
                self.damaged[stream_id] = str(e)
            except FileNotFoundError:
                self.stale = True
                self.damaged[stream_id] = "the log changed while it was read"

    def _report(self, found: list[Difference], count: int) -> None:
        for d in found:
            what = {"extra": "is not in the log", "missing": "is missing", "differs": "differs from the log"}[d.what]
            self._damage(f"{self._catalog_dir}: row {d.key} of {d.table}, stream {d.stream}, {what}", key=d.key)
        if count > DIFFERENCES_MAX:
            self._damage(f"{self._catalog_dir}: {count - DIFFERENCES_MAX} more rows are not as the log has them")

    def _damage(self, message: str, **where: str) -> None:
        # Throwing the rows away is safe only while every log can give them back.
        fix = RebuildCatalog() if not self.damaged else None
        path = str(self._catalog_dir)
        self.findings.append(finding(Kind.CATALOG, Severity.ERROR, message, fix=fix, path=path, **where))

    def _note(self, message: str) -> None:
        text = f"{self._catalog_dir}: {message}"
        self.findings.append(finding(Kind.CATALOG, Severity.NOTE, text, path=str(self._catalog_dir)))


@contextlib.contextmanager
def open_truth(env: Env, state_dir: Path, folder: Path, *, live: bool) -> Iterator[Truth]:
    """The rows, in `folder`, which the caller removes."""
    for attempt in range(ATTEMPTS):
        catalog = Catalog.open(env, folder / f"rows-{attempt}")
        truth = Truth(state_dir, catalog, live=live)
        try:
            truth.build()
            if truth.stale and attempt < ATTEMPTS - 1:
                continue
            yield truth
            return
        finally:
            catalog.abandon()
