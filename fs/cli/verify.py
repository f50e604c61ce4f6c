"""`aof2 verify`: fsck for a volume. Read-only unless `--repair`; works mounted or not. `scripts/verify` is the same."""

from __future__ import annotations

from typing import Any

import click

from aof2.engine.errors import Aof2Error
from aof2.engine.units import format_size
from aof2.engine.verify.findings import Exit, Finding, Report, Severity
from aof2.engine.verify.run import default_jobs
from aof2.engine.verify.run import verify as run_verify
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
        output.print_facts(_facts(report))
        for found in report.findings:
            complain(_line(found))
    raise click.exceptions.Exit(report.exit_code)


def _line(found: Finding) -> str:
    if found.severity is Severity.NOTE:
        return f"note: {found.message}"
    if found.repaired:
        return f"repaired: {found.message}"
    hint = "; --repair mends it" if found.repairable else ""
    return f"{found.severity}: {found.kind}: {found.message}{hint}"


def _facts(report: Report) -> list[tuple[str, str]]:
    left = report.errors + report.warnings - report.repaired
    verdict = "clean" if report.clean else f"{left} finding(s) left, {report.repaired} repaired"
    local = f"{report.blocks} block(s) of {report.objects} object(s), {format_size(report.local_bytes)} read"
    read = f", {report.blobs} blob(s), {format_size(report.remote_bytes)} read" if report.remote == "read" else ""
    facts = [
        ("volume", report.state_dir + (" (mounted)" if report.live else "")),
        ("verdict", verdict),
        ("log", f"{report.streams} stream(s), {report.records} record(s), {report.evictions} eviction(s) proven"),
        ("local", local),
        ("remote", report.remote + read),
        ("errors", str(report.errors)),
        ("warnings", str(report.warnings)),
        ("notes", str(report.notes)),
    ]
    if report.left_off:
        facts.append(("left off", f"{report.left_off} more finding(s); run it again after repairs"))
    return facts
