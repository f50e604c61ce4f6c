"""`aof2 spark manifest`: reads its options and hands them to the pipeline."""

from __future__ import annotations

from pathlib import Path

import click

from aof2.fs.cli.errors import CliError
from aof2.fs.cli.pipelines.launch import launch, pipeline_options
from aof2.fs.cli.pipelines.remote import remote_options, remote_settings


@click.command(epilog="Example: aof2 spark manifest --remote s3://bucket/volume --out /aof2/default/log")
@click.argument("folder", metavar="[DIR]", required=False, default="")
@remote_options
@click.option("--out", metavar="DIR", default="", help="Write each table there as Parquet: a path that tasks see.")
@click.option("--price", "prices", metavar="NAME=DOLLARS", multiple=True, help="As of `aof2 report`.")
@pipeline_options
def manifest(
    folder: str, conf: str | None, url: str, endpoint_url: str, region: str, out: str, prices: tuple[str, ...],
    as_json: bool, spark_log: Path | None,
) -> None:  # fmt: skip
    """The manifest log as tables: records, segments, tiers, heat, returns and requests.

    Read from the remote, or from DIR, the folder of a volume's logs (state_dir/manifest). Prints what operators ask
    first; --out writes all of it as Parquet.
    """
    from aof2.engine.history.cost import prices_of
    from aof2.engine.spark.pipelines import manifest as pipeline

    if folder and (conf or url):
        raise CliError("name a folder, or the remote, not both")
    remote = None if folder else remote_settings(conf, url, endpoint_url, region).remote
    arguments = pipeline.Arguments(remote, folder, out, prices_of(prices))
    launch(pipeline, arguments, as_json=as_json, spark_log=spark_log)
