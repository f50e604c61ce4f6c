"""`aof2 spark compact`: its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aof2.fs.cli.pipelines.launch import launch, pipeline_options
from aof2.fs.cli.pipelines.options import absolute, layout_of, layout_options

EXAMPLE = "Example: aof2 spark compact /aof2/events/clicks /aof2/default/clicks --partition-by 'day=date(timestamp)'"


@click.command(epilog=EXAMPLE)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="[TARGET]", required=False, default="")
@click.option("--as", "into", type=click.Choice(["records", "parquet"]), help="Default: as the target's tenant is.")
@click.option("--schema", metavar="DDL", default="", help="Of records of JSON: their fields become the columns.")
@click.option("--select", metavar="EXPR", multiple=True, help="Columns: SQL expressions, one each.")
@layout_options
@click.option("--remove-sources", is_flag=True, help="Sources go when the result is in the remote.")
@click.option("--skip-gap", is_flag=True, help="Go on behind records that were truncated before they were compacted.")
@click.option("--checkpoint", metavar="DIR", default="", help="Of records into records: how far the source was read.")
@click.option("--conf", metavar="FILE", default="", help="The mount.conf of the volume. Default: as elsewhere.")
@pipeline_options
def compact(
    source: str,
    target: str,
    into: str | None,
    schema: str,
    select: tuple[str, ...],
    remove_sources: bool,
    skip_gap: bool,
    checkpoint: str,
    conf: str,
    **how: Any,
) -> None:
    """Many segments of a stream, or many small files of Parquet, into few large ones.

    A stream goes into Parquet, each run what was sealed since the one before as TARGET/run=OFFSET; or into larger
    segments of another stream. A directory of Parquet goes into TARGET, or is compacted in place. The result appears by
    one step, after counts and checksums of what was read and of what was written were compared.

    Run again, killed or not, nothing is there twice and nothing is missing.
    """
    from aof2.engine.spark.pipelines import compact as pipeline

    arguments = pipeline.Arguments(
        source=absolute(source),
        target=absolute(target) if target else "",
        into=into or "",
        schema=schema,
        select=select,
        layout=layout_of(how),
        remove_sources=remove_sources,
        skip_gap=skip_gap,
        checkpoint=absolute(checkpoint) if checkpoint else "",
        conf=str(Path(conf).absolute()) if conf else "",
    )
    launch(pipeline, arguments, **how)
