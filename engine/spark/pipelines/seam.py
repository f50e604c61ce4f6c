"""What every pipeline takes and gives back, and how far Spark is with it.

Owner: the driver's main thread; `watched` has a thread of its own while jobs run, which only asks Spark how far it is.
Crash: nothing is written here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from aof2.engine.errors import Aof2Error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ASK_EVERY_S: Final = 0.5
GROUP: Final = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


class PipelineError(Aof2Error):
    """A pipeline cannot do what it was asked; the message is the whole line. Run again what it names, changed."""


class Tell(Protocol):
    """How far the work is; a bar or a line shows it. `total` is 0 where it is not known."""

    def __call__(self, what: str, done: int, total: int, unit: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """What a pipeline did or found. `facts` is the table, `report` the same as one JSON object."""

    report: Mapping[str, Any]
    facts: Sequence[tuple[str, str]]
    complaints: Sequence[str] = field(default=())  # a line each on stderr, behind the table
    exit_code: int = 0


def silent(what: str, done: int, total: int, unit: str = "") -> None:
    """A Tell that shows nothing."""


@contextlib.contextmanager
def watched(session: SparkSession, tell: Tell, what: str) -> Iterator[None]:
    """Tells of the tasks of every job that this thread runs inside, and cancels them when it is left by an error."""
    context = session.sparkContext
    group = f"aof2 {what}"
    before = [context.getLocalProperty(name) for name in GROUP]  # a query has one of its own
    context.setJobGroup(group, what, interruptOnCancel=False)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(context, group, tell, what, over), name="watched", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        context.cancelJobGroup(group)
        raise
    finally:
        over.set()
        watcher.join()
        for name, value in zip(GROUP, before, strict=True):
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None takes it away


def _watch(context: Any, group: str, tell: Tell, what: str, over: threading.Event) -> None:
    tracker = context.statusTracker()
    while not over.wait(ASK_EVERY_S):
        with contextlib.suppress(Exception):  # a session that ends meanwhile has nothing to tell
            done, total = _tasks(tracker, group)
            if total:
                tell(what, done, total, "tasks")


def _tasks(tracker: Any, group: str) -> tuple[int, int]:
    """Tasks that are over, and tasks there are, of all jobs of the group so far."""
    done = total = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job else ():
            stage = tracker.getStageInfo(stage_id)
            if stage:
                done, total = done + stage.numCompletedTasks, total + stage.numTasks
    return done, total
