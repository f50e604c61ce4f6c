"""`aof2 spark NAME … [-- SPARK-SUBMIT-OPTIONS]`: the pipelines.

Pipelines are listed here by name and imported when they run. What stands behind `--` goes to spark-submit as it is:
`--master spark://…`, `--conf k=v`, YARN's and Kubernetes' own.
"""

from __future__ import annotations

import click

from aof2.fs.cli.lazy import Commands, LazyGroup

PIPELINES: Commands = {
    "compact": ("aof2.fs.cli.pipelines.compact", "Many segments or small files into few large ones."),
    "ingest": ("aof2.fs.cli.pipelines.ingest", "What Spark can read, into a stream or into Parquet."),
    "manifest": ("aof2.fs.cli.pipelines.manifest", "The log as tables: heat, misses, thrash, bytes per tier, cost."),
    "verify": ("aof2.fs.cli.pipelines.verify", "Check all that is in the remote, by content."),
}
SUBMIT_OPTIONS = "aof2.spark.submit_options"  # their key in a context's meta


class Pipelines(LazyGroup):
    """The group: everything behind the first `--` is spark-submit's."""

    LISTED = PIPELINES
    HEADING = "Pipelines"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[SUBMIT_OPTIONS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@click.group(cls=Pipelines, epilog="Example: aof2 spark ingest /data/clicks /aof2/events/clicks -- --master local[4]")
def spark() -> None:
    """Data pipelines on Spark.

    Each shows progress, prints what it did, and can be run again after it was killed: nothing is done twice. Options of
    spark-submit come after --. Workers need `pip install 'aof2[spark]'` and nothing else.
    """
