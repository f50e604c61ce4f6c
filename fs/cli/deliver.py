"""`aof2 deliver`: files or records into a volume that need not be mounted here, by way of its remote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from aof2.engine.errors import Aof2Error
from aof2.engine.inbox import Job, open_inbox
from aof2.engine.inbox.job import WAIT_S
from aof2.engine.units import parse_time_ms
from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import CliError
from aof2.fs.control.protocol import ControlError
from aof2.fs.wording import human_size


@click.command(epilog="Example: aof2 deliver --to /aof2/default/reports --job daily-2026-11-18 out/*.csv")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--to", metavar="DIR", required=True, help="A directory of the volume, or a stream; made if need be.")
@click.option("--job", metavar="ID", default="", help="What makes it the same job when it is delivered again.")
@click.option("--overwrite", is_flag=True, help="What is there goes, by the same step.")
@click.option("--deadline", metavar="TIME", default=f"{WAIT_S:g}s", show_default=True, help="To wait for the answer.")
@volume_options("One JSON object.")
def deliver(
    files: tuple[Path, ...], to: str, job: str, overwrite: bool, deadline: str, as_json: bool, conf: str | None
) -> None:
    """Put files, and directories with all that is below them, into a volume without mounting it.

    Only the remote is needed, with rights to write there. The volume's writer takes all of it in by one step, within
    [follow] inbox_period, or at its next mount. Into a stream, each line of the files becomes a record.
    """
    try:
        wait_s = parse_time_ms(deadline) / 1000
    except ValueError as e:
        raise click.UsageError(f"--deadline {deadline}: {e}") from None
    settings = load_conf(conf)
    tenant, _, below = in_mount(settings, [to])[0].partition("/")
    if tenant == ".":
        raise CliError(f"{to}: name a directory in a tenant")
    with open_inbox(settings.remote, tenant) as inbox:
        one = inbox.open_job(job, to=below, mode="overwrite" if overwrite else "append")
        _put(one, files)
        one.commit()
        with contextlib.suppress(Aof2Error, ControlError, OSError):  # not mounted here: its writer looks by itself
            ask(settings, "inbox")
        done = one.wait(wait_s)
    said = f"{done.records} record(s)" if one.takes_records else f"{done.files} file(s)"
    output.print_done(
        msgspec.to_builtins(done), f"{said}, {human_size(done.bytes)}, are in {to} (job {done.job_id})", as_json=as_json
    )


def _put(job: Job, files: tuple[Path, ...]) -> None:
    for name, path in _all(files):
        if job.takes_records:
            with open(path, "rb") as f:
                job.put_records(f)
        else:
            job.put(name, path)


def _all(files: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Files by their names below the target: of a directory, with its own."""
    for path in files:
        if not path.is_dir():
            yield path.name, path
            continue
        base = path.resolve()
        for folder, folders, names in os.walk(base):
            folders.sort()
            for name in sorted(names):
                found = Path(folder, name)
                yield str(found.relative_to(base.parent)), found
