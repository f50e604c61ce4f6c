"""A verb's talk with the daemon: paths as the daemon knows them, and how far it is, shown as it goes."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from aof2.engine.settings import Settings
from aof2.fs.cli.errors import CliError
from aof2.fs.cli.output import PLAIN_PROGRESS_S
from aof2.fs.control.client import NotMountedError, control_client
from aof2.fs.control.protocol import ControlError, Progress
from aof2.fs.mountpoint import real_mountpoint
from aof2.fs.wording import human_size

LINKS_MAX = 40


def ask(settings: Settings, verb: str, **args: object) -> Any:
    """What the daemon answers, with a bar or lines while it works. NotMountedError, ControlError."""
    with control_client(settings) as client, shown_progress() as show:
        return client.call(verb, show, **args)


def placed(settings: Settings) -> Settings:
    """As `served` where a daemon answers, else the conf's own."""
    try:
        return served(settings)
    except (NotMountedError, ControlError):
        return settings


def served(settings: Settings) -> Settings:
    """The settings with the mountpoint where the volume really is, which may not be the conf's. NotMountedError."""
    with control_client(settings) as client:
        mountpoint = Path(client.call("ping")["mountpoint"])
    volume = msgspec.structs.replace(settings.volume, mountpoint=mountpoint)
    return msgspec.structs.replace(settings, volume=volume)


# -- paths ---------------------------------------------------------------------------------------------------------


def in_mount(settings: Settings, paths: Iterable[str]) -> list[str]:
    """The paths as TENANT/…, "." for the mountpoint itself. CliError for one that is elsewhere.

    Symlinks on the way to the mountpoint are followed; nothing in the mount is looked at, so that a dead one does not
    hold the command up. A relative path that leads nowhere near the mount is taken as TENANT/….
    """
    mountpoint = settings.volume.mountpoint
    return [_in_mount(mountpoint, path) for path in paths]


def _in_mount(mountpoint: Path, text: str) -> str:
    if not text:
        raise CliError("an empty path; name one in the mount")
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:
        here = "/"
    absolute = os.path.join(here, text)  # noqa: PTH118
    roots = {str(mountpoint), str(real_mountpoint(mountpoint))}
    for below in (_below(os.path.normpath(absolute), roots), _follow(absolute, roots)):
        if below is not None:
            return below
    if text.startswith("/"):
        raise CliError(f"{text}: not below the mountpoint {mountpoint}")
    return os.path.normpath(text)


def _below(path: str, roots: set[str]) -> str | None:
    for root in roots:
        if path == root or path.startswith(f"{root}/"):
            return path[len(root) + 1 :] or "."
    return None


def _follow(path: str, roots: set[str]) -> str | None:
    """The path once symlinks are followed, up to where it enters the mount."""
    at, todo, links = "/", path.split("/")[::-1], 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)  # noqa: PTH118, PTH120
        if at in roots:
            rest = os.path.normpath("/".join(reversed(todo)) or ".")
            if not rest.startswith(".."):
                return rest
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.lstat(at).st_mode):
                links += 1
                if links > LINKS_MAX:
                    return None
                target = os.readlink(at)  # noqa: PTH115
                todo += target.split("/")[::-1]
                at = "/" if target.startswith("/") else os.path.dirname(at)  # noqa: PTH120
    return None


# -- progress ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A function to call with each Progress: a bar where stderr is a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    with contextlib.ExitStack() as stack:
        yield _Bars(stack).show


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
        return f"{p.done} {p.unit}" if p.done == p.total else f"{p.done} of {p.total} {p.unit}"
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
