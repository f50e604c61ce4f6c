"""`aof2 verify`: fsck for a volume. Read-only unless `--repair`; works mounted or not. `scripts/verify` is the same."""

from __future__ import annotations

from typing import Any

import click

from aof2.engine.errors import Aof2Error
from aof2.engine.verify.findings import Exit
from aof2.engine.verify.run import default_jobs
from aof2.engine.verify.run import verify as run_verify
from aof2.engine.verify.told import facts_of, lines_of
from aof2.fs.cli import output
from aof2.fs.cli.client import in_mount, placed
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import complain
from aof2.fs.cli.progress import counted
from aof2.fs.wording import explain


class FsckCommand(click.Command):
    """A verb whose usage errors exit with fsck's 16."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as e:
            e.exit_code = Exit.USAGE  # type: ignore[misc]
            raise


@click.command(cls=FsckCommand, epilog="Example: aof2 verify --remote --repair --jobs 4")
@click.argument("paths", metavar="[PATH…]", nargs=-1)
@click.option("--remote", is_flag=True, help="Read every blob in the remote, not only the listing.")
@click.option("--repair", is_flag=True, help="Mend what is provably safe to mend. The volume must not be mounted.")
@click.option("--jobs", metavar="N", type=click.IntRange(1, 256), help="Threads. Default: the processors, at most 4.")
@volume_options("The whole report as one JSON object.")
def verify(
    paths: tuple[str, ...], remote: bool, repair: bool, jobs: int | None, as_json: bool, conf: str | None
) -> None:
    """Check a volume: log, local copies and remote against each other, by content.

    Everything, or the files named by PATHs (in the mount, or TENANT/…). Exit code 0: clean; 1: errors were corrected;
    4: errors are left; 8: it could not run; 16: usage.
    """
    try:
        settings = load_conf(conf)
        if paths:
            settings = placed(settings)
        with counted("verify") as report_progress:
            report = run_verify(
                settings,
                deep_remote=remote,
                repair=repair,
                jobs=jobs or default_jobs(),
                paths=in_mount(settings, paths),
                on_progress=report_progress,
            )
    except (Aof2Error, OSError) as e:
        complain(explain(e))
        raise click.exceptions.Exit(Exit.FAILED) from None
    if as_json:
        output.print_json(report)
    else:
        output.print_facts(facts_of(report))
        for line in lines_of(report):
            complain(line)
    raise click.exceptions.Exit(report.exit_code)
