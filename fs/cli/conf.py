"""`--json` and `--conf FILE`, for every verb that works on a volume: which file, and what is wrong with it, in one
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from aof2.engine.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def volume_options(json_help: str) -> Callable[[F], F]:
    """Adds `--json` and `--conf FILE`; the verb gets them as `as_json` and `conf`."""
    as_json = click.option("--json", "as_json", is_flag=True, help=json_help)
    conf = click.option(
        "--conf",
        metavar="FILE",
        help="The volume's mount.conf. Default: $AOF2_CONF, ./mount.conf, /etc/aof2/mount.conf.",
    )
    return lambda command: as_json(conf(command))


def load_conf(conf: str | None) -> Settings:
    """The settings, or SettingsError: one line that says what to change."""
    from aof2.engine.settings import find_conf, load_settings

    return load_settings(find_conf(conf))
