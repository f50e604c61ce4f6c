"""`aof2 bench …`: what this machine does, as ratios against baselines measured in the same run."""

from __future__ import annotations

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
    with output.progress("measurements") as report_progress:
        results = run(quick=quick, on_progress=report_progress)
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
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    columns = [output.Column(title, width) for title, width in zip(COLUMNS, widths, strict=True)]
    styles = {True: "green", False: "bold red", None: ""}
    output.print_table(columns, [output.Styled(r, styles[m.ok]) for r, m in zip(rows, results, strict=True)])


def _cells(m: Measurement) -> tuple[str, ...]:
    baseline = m.baseline
    if m.baseline_value is not None:
        baseline += f" {amount(m.baseline_value)} {m.unit}"
    verdict = {True: "ok", False: "miss", None: ""}[m.ok]
    return (
        m.what,
        "-" if m.value is None else f"{amount(m.value)} {m.unit}",
        baseline,
        "-" if m.ratio is None else f"{m.ratio:.2f}",
        "-" if m.target is None else m.target_text,
        m.note or verdict or "information",
    )


def amount(value: float) -> str:
    """Three digits that matter: 12.3 G, 2.05 M, 640."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            return f"{value / (limit if limit != 1e4 else 1e3):.3g}{unit}"
    return f"{value:.4g}"
