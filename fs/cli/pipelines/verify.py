"""`aof2 spark verify`: reads its options and hands them to the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aof2.engine.errors import Aof2Error
from aof2.engine.verify.findings import Exit
from aof2.fs.cli.errors import complain
from aof2.fs.cli.pipelines.launch import launch, pipeline_options
from aof2.fs.cli.pipelines.remote import remote_options, remote_settings
from aof2.fs.cli.verify import FsckCommand
from aof2.fs.wording import explain


@click.command(
    cls=FsckCommand, epilog="Example: aof2 spark verify --remote s3://bucket/volume -- --master spark://host:7077"
)
@remote_options
@pipeline_options
def verify(conf: str | None, url: str, endpoint_url: str, region: str, as_json: bool, spark_log: Path | None) -> None:
    """Check all that a volume has in its remote, by content, on every core of the cluster.

    Straight from the remote: no mount, and no disk of the volume. Findings and exit codes are those of
    `aof2 verify --remote`: 0 clean, 4 errors are left, 8 it could not run, 16 usage. What only that disk has is not
    looked at, and nothing is repaired.
    """
    from aof2.engine.spark.pipelines import verify as pipeline

    try:
        settings = remote_settings(conf, url, endpoint_url, region)
    except Aof2Error as e:
        complain(explain(e))
        raise click.exceptions.Exit(Exit.FAILED) from None
    how: dict[str, Any] = {"as_json": as_json, "spark_log": spark_log}
    launch(pipeline, pipeline.Arguments(settings), failed_code=int(Exit.FAILED), **how)
