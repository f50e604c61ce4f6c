"""Which volume a pipeline reads from its remote: `--conf FILE`, or `--remote URL` with what an S3 server needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aof2.fs.cli.errors import CliError

if TYPE_CHECKING:
    from aof2.engine.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def remote_options(command: F) -> F:
    """Adds the options; the command hands them to `remote_settings` as one dictionary's."""
    for option in (
        click.option("--region", metavar="NAME", default="", help="Of the S3 server."),
        click.option("--endpoint-url", metavar="URL", default="", help="Any S3 server. Default: AWS."),
        click.option("--remote", "url", metavar="URL", default="", help="s3://bucket/prefix or file:///directory."),
        click.option("--conf", metavar="FILE", help="The volume's mount.conf, where there is no --remote."),
    ):
        command = option(command)
    return command


def remote_settings(conf: str | None, url: str, endpoint_url: str, region: str) -> Settings:
    """The conf's settings; with a URL the defaults with that remote. Keys come from the usual AWS chain."""
    from aof2.engine.settings.model import Settings, VolumeSettings
    from aof2.engine.settings.remote import RemoteSettings
    from aof2.fs.cli.conf import load_conf

    if not url:
        if endpoint_url or region:
            raise CliError("--endpoint-url and --region go with --remote")
        return load_conf(conf)
    if conf:
        raise CliError("name the volume by --conf or by --remote, not by both")
    try:
        remote = RemoteSettings(url=url, endpoint_url=endpoint_url, region=region)
    except ValueError as e:
        raise CliError(str(e)) from None
    nowhere = Path("/nonexistent")  # no mount and no disk of the volume has a part in this
    return Settings(volume=VolumeSettings(mountpoint=nowhere, state_dir=nowhere), remote=remote)
