"""A verb's talk with the daemon, and paths as the daemon knows them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aof2.engine.catalog.store import View
from aof2.engine.inspect.rows import open_rows
from aof2.engine.settings import Settings
from aof2.fs.cli.errors import CliError
from aof2.fs.cli.progress import shown_progress
from aof2.fs.control.client import NO_DAEMON, ControlClient, NotMountedError
from aof2.fs.control.protocol import ControlError
from aof2.fs.mountpoint import real_mountpoint

LINKS_MAX = 40
T = TypeVar("T")


def ask(settings: Settings, verb: str, **args: object) -> Any:
    """What the daemon answers, with a bar or lines while it works. NotMountedError, ControlError."""
    with ControlClient(settings) as client, shown_progress() as show:
        return client.call(verb, show, **args)


def ask_or_read(settings: Settings, kind: type[T], read: Callable[[View], T], verb: str, **args: object) -> T:
    """What the daemon answers; where none is, what `read` finds in the rows on this disk."""
    try:
        return msgspec.convert(ask(settings, verb, **args), kind)
    except NO_DAEMON:
        with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
            return read(view)


def placed(settings: Settings) -> Settings:
    """As `served` where a daemon answers, else the conf's own."""
    try:
        return served(settings)
    except (NotMountedError, ControlError):
        return settings


def served(settings: Settings) -> Settings:
    """The settings with the mountpoint where the volume really is, which may not be the conf's. NotMountedError."""
    with ControlClient(settings) as client:
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
