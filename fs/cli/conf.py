"""`--conf FILE`, for every verb that works on a volume: which file, and what is wrong with it, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from aof2.engine.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def conf_option(command: F) -> F:
    """Adds `--conf FILE`; the verb gets it as `conf`."""
    return click.option(
        "--conf",
        metavar="FILE",
        help="The volume's mount.conf. Default: $AOF2_CONF, ./mount.conf, /etc/aof2/mount.conf.",
    )(command)


def load_conf(conf: str | None) -> Settings:
    """The settings, or SettingsError: one line that says what to change."""
    from aof2.engine.settings import find_conf, load_settings

    return load_settings(find_conf(conf))
