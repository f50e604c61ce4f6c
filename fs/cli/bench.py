"""`aof2 bench …`: what this machine does, as ratios against baselines measured in the same run."""

from __future__ import annotations

from collections.abc import Callable

import click

from aof2.engine.bench.formats import run
from aof2.engine.bench.measure import Measurement
from aof2.fs.cli import output
from aof2.fs.cli.errors import EXIT_FAILED

COLUMNS = ("what", "value", "baseline", "ratio", "target", "verdict")


@click.group()
def bench() -> None:
    """Measure this machine against AOF2's targets."""


@bench.command(epilog="Example: aof2 bench formats --quick --check")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds: seconds, and less to rely on.")
@click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a measurement.")
@click.pass_context
def formats(ctx: click.Context, quick: bool, check: bool, as_json: bool) -> None:
    """Checksums, segment scans, manifest append, replay and group commit.

    Only ratios have targets, each measured in one run against its baseline, in turns. Rates are what this machine does
    today. Files go to a folder under $TMPDIR and are removed.
    """
    _measure(ctx, run, quick=quick, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench engine --json")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds: seconds, and less to rely on.")
@click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a measurement.")
@click.pass_context
def engine(ctx: click.Context, quick: bool, check: bool, as_json: bool) -> None:
    """Upload, hydration, resident reads, catalog operations, reopening and memory.

    Starts an S3 server (SeaweedFS) of its own on loopback for the run, and compares with bare boto3 on it. Files go to
    a folder under $TMPDIR (some 6 GiB without --quick) and are removed.
    """
    from aof2.engine.bench import tiers

    _measure(ctx, tiers.run, quick=quick, check=check, as_json=as_json)


def _measure(
    ctx: click.Context, work: Callable[..., list[Measurement]], *, quick: bool, check: bool, as_json: bool
) -> None:
    with output.progress("measurements") as report_progress:
        results = work(quick=quick, on_progress=report_progress)
    if as_json:
        for result in results:
            output.print_json(result)
    else:
        _print(results)
    if check and any(result.ok is False for result in results):
        ctx.exit(EXIT_FAILED)


def _print(results: list[Measurement]) -> None:
    rows = [_cells(result) for result in results]
    if not output.on_terminal():
        output.print_tsv(COLUMNS)
        for row in rows:
            output.print_tsv(row)
        return
    folding = {"what": 18, "baseline": 16}
    columns = [output.Column(title, fold_min=folding.get(title, 0)) for title in COLUMNS]
    styles = {True: "green", False: "bold red", None: ""}
    output.print_table(columns, [output.Styled(r, styles[m.ok]) for r, m in zip(rows, results, strict=True)])


def _cells(m: Measurement) -> tuple[str, ...]:
    baseline = m.baseline
    if m.baseline_value is not None:
        baseline += f" {amount(m.baseline_value, m.unit)}"
    return (
        m.what,
        "-" if m.value is None else amount(m.value, m.unit),
        baseline or "-",
        "-" if m.ratio is None else f"{m.ratio:.2f}",
        m.target_text or "-",
        m.note or {True: "ok", False: "miss", None: "info"}[m.ok],
    )


def amount(value: float, unit: str) -> str:
    """Three digits that matter: 12.3 GB/s, 2.05 M records/s, 64 fsyncs."""
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * scale or (value >= scale > 1e3):
            return f"{value / scale:.3g} {prefix}{unit}" if unit == "B/s" else f"{value / scale:.3g} {prefix} {unit}"
    return f"{value:.4g} {unit}"
