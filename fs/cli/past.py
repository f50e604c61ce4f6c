"""`aof2 generations` and `aof2 revert`: what a file was, and having that again."""

from __future__ import annotations

import click
import msgspec

from aof2.engine.generations import Generation
from aof2.engine.generations import generations as generations_of
from aof2.engine.inspect.paths import resolve
from aof2.engine.inspect.rows import open_rows
from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount, served
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import CliError
from aof2.fs.cli.records import iso_time
from aof2.fs.control.client import NO_DAEMON

COLUMNS = ("generation", "state", "current", "bytes", "sealed (UTC)", "sha256")


@click.command(epilog="Example: aof2 generations /aof2/default/report.parquet")
@click.argument("path", metavar="PATH")
@volume_options("One JSON object a generation and line, newest first.")
def generations(path: str, as_json: bool, conf: str | None) -> None:
    """What can be had of a file: what it is now, and the published generations that retention.checkpoints keeps.

    A file gets a new generation when it is opened for writing after it reached the remote. Those that are published can
    be brought back with aof2 revert. Also works while nothing is mounted.
    """
    output.print_found(_find(path, conf), COLUMNS, _cells, as_json=as_json)


def _cells(one: Generation) -> tuple[str, ...]:
    sealed = iso_time(one.sealed_ms) if one.sealed_ms else ""
    return (str(one.generation), one.state, "yes" if one.current else "", str(one.size), sealed, one.sha256)


def _find(path: str, conf: str | None) -> list[Generation]:
    settings = load_conf(conf)
    try:
        settings = served(settings)
        answer = ask(settings, "generations", path=in_mount(settings, [path])[0])
        return msgspec.convert(answer, list[Generation])
    except NO_DAEMON:
        with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
            place = resolve(view, settings.volume.mountpoint, in_mount(settings, [path])[0])
            if place is None or not place.is_file:
                raise CliError(f"{path}: not a file; only files have generations") from None
            return generations_of(view, place.tenant_id, place.inode, settings.engine.block_bytes)


@click.command(epilog="Example: aof2 revert /aof2/default/report.parquet --generation 3")
@click.argument("path", metavar="PATH")
@click.option("--generation", metavar="N", type=click.IntRange(min=1), required=True, help="As aof2 generations says.")
@click.option("--to", metavar="NEWPATH", default="", help="A new file of the same tenant; PATH stays as it is.")
@volume_options("One JSON object.")
def revert(path: str, generation: int, to: str, as_json: bool, conf: str | None) -> None:
    """Bring back what a file was: as its new generation, or beside it.

    No bytes move: the remote has them, and they are fetched when they are read. What the file is now reaches the remote
    first and stays a generation, so a revert can be reverted. A file that is open cannot be; --to can.
    """
    settings = served(load_conf(conf))
    where = in_mount(settings, [path, to] if to else [path])
    done = ask(settings, "revert", path=where[0], generation=generation, to=where[1] if to else "")
    said = (
        f"{done['path']} is generation {generation} again: {done['size']} bytes, "
        f"as generation {done['generation']}{' of a new file' if to else ''}"
    )
    output.print_done(done, said, as_json=as_json)
