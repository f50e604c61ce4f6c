"""`aof2 spark ingest`: its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aof2.fs.cli.pipelines.launch import launch, pipeline_options
from aof2.fs.cli.pipelines.options import absolute, layout_of, layout_options, pairs

EXAMPLE = "Example: aof2 spark ingest /data/clicks/*.json /aof2/events/clicks --format json -- --master 'local[4]'"


@click.command(epilog=EXAMPLE)
@click.argument("paths", metavar="[SOURCE…] TARGET", nargs=-1, required=True)
@click.option("--format", "kind", metavar="NAME", default="parquet", show_default=True, help="Of the source.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="Of the source, as for spark.read.")
@click.option("--schema", metavar="DDL", default="", help="Of the source: 'n bigint, text string'.")
@click.option("--select", metavar="EXPR", multiple=True, help="What becomes of a row: SQL expressions, one each.")
@click.option("--as", "into", type=click.Choice(["records", "parquet"]), help="Default: as the target's tenant is.")
@layout_options
@click.option("--write-option", "write_options", metavar="KEY=VALUE", multiple=True, help='Of format("aof2").')
@click.option("--overwrite", is_flag=True, help="A stream's records go when these come, by the same step.")
@click.option("--job", metavar="NAME", default="", help="Deliver once under this name, whatever the source holds.")
@click.option("--trigger", metavar="WHEN", default="", help="A growing source: available-now, or every '10 seconds'.")
@click.option("--checkpoint", metavar="DIR", default="", help="Of a growing source: how far it was read.")
@click.option(
    "--conf", metavar="FILE", default="", help="The mount.conf of the target's volume. Default: as elsewhere."
)
@pipeline_options
def ingest(
    paths: tuple[str, ...],
    kind: str,
    options: tuple[str, ...],
    schema: str,
    select: tuple[str, ...],
    into: str | None,
    write_options: tuple[str, ...],
    overwrite: bool,
    job: str,
    trigger: str,
    checkpoint: str,
    conf: str,
    **how: Any,
) -> None:
    """What Spark can read, into a stream or into Parquet.

    A row becomes a record by its column payload (binary) or value (text), else as a line of JSON. Count and checksum of
    what was read are compared with what is there. A directory of Parquet appears by one step, with all of its files.

    Run again, killed or not, the same command over the same files delivers nothing twice. With --trigger the source
    may grow: each run takes what came since the last one, and needs --checkpoint.
    """
    from aof2.engine.spark.pipelines import ingest as pipeline

    if checkpoint and not trigger:
        raise click.UsageError("--checkpoint is for a growing source: add --trigger available-now")
    if trigger and not checkpoint:
        raise click.UsageError("--trigger needs --checkpoint DIR: it is what tells one micro-batch from another")
    if trigger and job:
        raise click.UsageError("--job is for a batch; a growing source has its --checkpoint")
    *sources, target = paths
    arguments = pipeline.Arguments(
        target=absolute(target),
        sources=[absolute(source) for source in sources],
        format=kind,
        options=pairs("--option", options),
        schema=schema,
        select=select,
        into=into or "",
        layout=layout_of(how),
        write_options=pairs("--write-option", write_options),
        overwrite=overwrite,
        job=job,
        trigger=trigger,
        checkpoint=absolute(checkpoint) if checkpoint else "",
        conf=str(Path(conf).absolute()) if conf else "",
    )
    launch(pipeline, arguments, **how)
