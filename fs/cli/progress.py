"""How far work is, as people see it: bars where stderr is a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from aof2.fs.control.protocol import Progress
from aof2.fs.wording import human_size

PLAIN_PROGRESS_S = 5.0


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A function to call with each Progress."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    with contextlib.ExitStack() as stack:
        yield _Bars(stack).show


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, total)."""
    with shown_progress() as show:
        yield lambda done, total: show(Progress(what, done, total, ""))


class _Bars:
    """A bar for each thing that is done, from the first time it is heard of."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def show(self, p: Progress) -> None:
        if self._bars is None:
            self._bars = self._stack.enter_context(_new_bars())
        if p.what not in self._tasks:
            self._tasks[p.what] = self._bars.add_task(p.what, total=None, amount="")
        self._bars.update(self._tasks[p.what], completed=p.done, total=p.total or None, amount=_amount(p))


def _new_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn()
    return RichProgress(*columns, console=Console(stderr=True), transient=True)


def _amount(p: Progress) -> str:
    if p.unit != "bytes":
        return (f"{p.done} {p.unit}" if p.done == p.total else f"{p.done} of {p.total} {p.unit}").rstrip()
    return f"{human_size(p.done)} of {human_size(p.total)}"


class _Lines:
    """A line now and then, with the time left."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._due_s = self._started_s + PLAIN_PROGRESS_S

    def show(self, p: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + PLAIN_PROGRESS_S
        left = ""
        if 0 < p.done < p.total:
            left = f", {(now_s - self._started_s) * (p.total - p.done) / p.done:.0f} s left"
        click.echo(f"{p.what}: {_amount(p)}{left}", err=True)
