"""`aof2 seal` and `aof2 truncate`: the end of a stream, and its beginning."""

from __future__ import annotations

import click

from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount, served
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.wording import human_size


@click.command(epilog="Example: aof2 seal /aof2/events/clicks")
@click.argument("stream", metavar="STREAM")
@volume_options("One JSON object.")
def seal(stream: str, as_json: bool, conf: str | None) -> None:
    """Make files of what is not sealed yet of a stream: what _tail shows is a payload file then.

    It is never needed: segments seal when they are full (segment_bytes) or old (seal_after).
    """
    settings = served(load_conf(conf))
    done = ask(settings, "seal", path=in_mount(settings, [stream])[0])
    said = f"{done['segments']} segment(s) sealed" if done["segments"] else "everything was sealed already"
    output.print_done(done, said, as_json=as_json)


@click.command(epilog="Example: aof2 truncate /aof2/events/clicks --before 1048576")
@click.argument("stream", metavar="STREAM")
@click.option("--before", metavar="OFFSET", type=click.IntRange(min=0), help="Whole segments before this offset go.")
@click.option("--tail", is_flag=True, help="What is not sealed goes.")
@volume_options("One JSON object.")
def truncate(stream: str, before: int | None, tail: bool, as_json: bool, conf: str | None) -> None:
    """Remove the beginning of a stream, or what of it is not sealed yet.

    OFFSET is a byte position in the stream's payload, as in the names of payload files. What went and was in the remote
    can be brought back with aof2 undelete; readers that have a segment open keep it. What was not sealed is gone.
    """
    if (before is None) == (not tail):
        raise click.UsageError("name either --before OFFSET or --tail")
    settings = served(load_conf(conf))
    done = ask(settings, "truncate", path=in_mount(settings, [stream])[0], before=before, tail=tail)
    what = "what was not sealed" if tail else f"{done['segments']} segment(s)"
    said = f"{what}, {human_size(done['bytes'])}, went; the stream begins at {done['first_offset']}"
    output.print_done(done, said if done["bytes"] else "nothing to remove", as_json=as_json)
