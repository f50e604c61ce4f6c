"""Small files of Parquet into large ones: a directory into another, or in place.

    beside the result    _<name>.aof2/    the workspace: made and checked there, put into place by one rename
    in place             the same, by one exchange; then what was there is in the workspace, until it may go

The files that were read are listed in the plan and in the marker, with size and time. A file that changes or goes
before the result is in place ends the run; one that comes in place meanwhile is moved into the result, as it is.

Invariants
- Every row is in the directory's files once, whatever moment it is listed at.
- Sources go only when the result is in the remote, and only those that the marker lists, as they were.

Owner: the driver. Crash: `workspace.py` says; what is in place and listed in the plan of the workspace is gone on with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aof2.engine.spark.pipelines import jobs, tables
from aof2.engine.spark.pipelines.compact import Compaction, Done
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.seam import PipelineError
from aof2.engine.spark.pipelines.workspace import Workspace, beside, marker_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Files = list[list[Any]]  # path, size, time: as `jobs.seen`
TABLES: Final = ("_delta_log", ".hoodie", "_spark_metadata")  # formats that keep files which are no part of the table


def compact(work: Compaction) -> Done:
    asked = work.asked
    source = Path(asked.source)
    if asked.schema:
        raise PipelineError("--schema is for records; files of Parquet have theirs")
    in_place = asked.target in ("", asked.source)
    if in_place and not asked.remove_sources:
        raise PipelineError(f"{source}: in place means that the small files go; add --remove-sources, or name a TARGET")
    target = source if in_place else Path(asked.target)
    with Workspace.opened(beside(target), work.env) as workspace:
        steps = _InPlace(work, workspace, target) if in_place else _Beside(work, workspace, source, target)
        done = steps.run()
        workspace.end()
    return done


class _Steps:
    """What both ways have: reading, writing, checking."""

    def __init__(self, work: Compaction, workspace: Workspace, source: Path, target: Path) -> None:
        self.work = work
        self.workspace = workspace
        self.source = source
        self.target = target

    def request(self) -> list[Any]:
        asked = self.work.asked
        return [str(self.source), list(asked.select), list(asked.layout.partition_by), asked.layout.file_bytes]

    def made(self, files: Files) -> dict[str, Any]:
        """In the workspace, checked: made by a run before this, or now."""
        marker = self.workspace.checked()
        if marker is None or (marker["request"], marker["files"]) != (self.request(), files):
            self.workspace.begin({"request": self.request(), "files": files})
            tally = self._written(files)
            marker = {
                "pipeline": "compact",
                "request": self.request(),
                "files": files,
                "rows": tally.rows,
                "checksum": f"{tally.checksum:016x}",
            }
            self.workspace.check(marker)
        if changed := jobs.still_there(files):
            raise PipelineError(f"{changed}: it changed while it was compacted; run it again")
        return marker

    def _written(self, files: Files) -> Tally:
        session, layout = self.work.session, self.work.asked.layout
        names = [path for path, *_ in files]
        with tables.configured(session, {"spark.sql.files.openCostInBytes": str(min(64 << 10, layout.file_bytes))}):
            frame: DataFrame = session.read.option("basePath", str(self.source)).parquet(*names)
            if self.work.asked.select:
                frame = frame.selectExpr(*self.work.asked.select)
            if not layout.partition_by:
                layout = replace(layout, partition_by=tuple(_partitions(self.source, names)))
            return tables.write(session, tables.laid_out(frame, layout), self.workspace.new, layout, self.work.tell)

    def done(self, marker: dict[str, Any], *, removed: int = 0, notes: Sequence[str] = ()) -> Done:
        files = tables.files_of(self.target)
        return Done(
            tally=Tally(marker["rows"], int(marker["checksum"], 16)),
            result=str(self.target),
            files_before=len(marker["files"]),
            bytes_before=sum(size for _, size, _ in marker["files"]),
            files_after=len(files),
            bytes_after=sum(path.stat().st_size for path in files),
            removed=removed,
            notes=tuple(notes),
        )


class _Beside(_Steps):
    """Into another directory; the source stays, unless it is to go."""

    def run(self) -> Done:
        marker = marker_of(self.target)
        if marker is None:
            if self.target.exists():
                raise PipelineError(f"{self.target}: it is there already; name another, or move it away")
            marker = self.made(_listed(self.source))
            self.workspace.publish(self.target)
        elif marker.get("request") != self.request():
            raise PipelineError(f"{self.target}: it was made of other files, or by other options; name another TARGET")
        removed = self._removed(marker) if self.work.asked.remove_sources else 0
        came = len(_listed(self.source, some=False)) - (0 if removed else len(marker["files"]))
        notes = [f"{self.source}: {came} file(s) came since, and are not in {self.target}"] if came > 0 else []
        return self.done(marker, removed=removed, notes=notes)

    def _removed(self, marker: dict[str, Any]) -> int:
        """Those of its files that are as they were read."""
        self.work.until_durable(self.target)
        return _remove(self.source, marker["files"], self.work)


class _InPlace(_Steps):
    """Instead of what is there."""

    def __init__(self, work: Compaction, workspace: Workspace, target: Path) -> None:
        super().__init__(work, workspace, target, target)

    def run(self) -> Done:
        plan, marker = self.workspace.plan(), marker_of(self.target)
        went_on = plan is not None and marker is not None and plan.get("files") == marker.get("files")
        if marker is None or not went_on:
            marker = self.made(_listed(self.source))
            self.workspace.exchange(self.target)
        notes = self._late(marker)
        self.work.until_durable(self.target)
        removed = sum(1 for path in self._old(marker) if path.exists())
        self.work.env.failpoint("compact.removed")
        return self.done(marker, removed=removed, notes=notes)

    def _old(self, marker: dict[str, Any]) -> list[Path]:
        """What was in place, where it is now."""
        return [self.workspace.data / os.path.relpath(path, self.source) for path, *_ in marker["files"]]

    def _late(self, marker: dict[str, Any]) -> list[str]:
        """Files that came between the listing and the exchange are no part of the result: they join it as they are."""
        if not self.workspace.data.is_dir():
            return []
        read = set(self._old(marker))
        late = [path for path in tables.files_of(self.workspace.data) if path not in read]
        for path in late:
            place = self.target / path.relative_to(self.workspace.data)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                raise PipelineError(f"{path}: it came meanwhile, and {place} is there already; move one of them")
            path.rename(place)
            self.work.env.files.fsync_dir(place.parent)
        return [f"{len(late)} file(s) came meanwhile, and are there as they are"] if late else []


# -- files


def _listed(source: Path, *, some: bool = True) -> Files:
    if table := next((name for name in TABLES if (source / name).exists()), None):
        raise PipelineError(f"{source}: {table} says which of its files count; compact it by its own table format")
    files = tables.files_of(source)
    if other := next((path for path in files if path.suffix not in (".parquet", ".parq")), None):
        raise PipelineError(f"{other}: not a file of Parquet, and not hidden; compact takes directories of Parquet")
    if some and not files:
        raise PipelineError(f"{source}: there is no file of Parquet in it, and no stream")
    return jobs.seen(str(path) for path in files)


def _partitions(source: Path, names: Sequence[str]) -> list[str]:
    """The partition columns that directories' names tell, from the first to the last."""
    parts = Path(os.path.relpath(names[0], source)).parent.parts
    return [part.partition("=")[0] for part in parts if "=" in part]


def _remove(source: Path, files: Files, work: Compaction) -> int:
    removed = 0
    for one in files:
        path = Path(str(one[0]))
        if not jobs.still_there([one]):
            path.unlink()
            removed += 1
        with contextlib.suppress(OSError):  # others are in it
            path.parent.rmdir() if path.parent != source else None
    work.env.failpoint("compact.removed")
    return removed
