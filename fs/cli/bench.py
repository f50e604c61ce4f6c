"""`aof2 bench …`: what this machine does, as ratios against baselines measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from aof2.engine.units import parse_size
from aof2.fs.bench.formats import run
from aof2.fs.bench.measure import Measurement
from aof2.fs.cli import output
from aof2.fs.cli.errors import CliError, complain, fail_if
from aof2.fs.cli.progress import counted

MIB = 1 << 20
F = TypeVar("F", bound=Callable[..., Any])

COLUMNS = ("what", "value", "baseline", "ratio", "target", "verdict", "processor")
STYLES = {True: "green", False: "bold red", None: ""}


def _report_options(command: F) -> F:
    check = click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
    as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a measurement.")
    return check(as_json(command))


def _tree_option(command: F) -> F:
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    text = "A local git repository to clone. Default: one that is made up."
    return click.option("--tree", metavar="REPOSITORY", type=folder, help=text)(command)


@click.group()
def bench() -> None:
    """Measure this machine against AOF2's targets."""


@bench.command(epilog="Example: aof2 bench formats --quick --check")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds: seconds, and less to rely on.")
@_report_options
def formats(quick: bool, check: bool, as_json: bool) -> None:
    """Checksums, segment scans, manifest append, replay and group commit.

    Only ratios have targets, each measured in one run against its baseline, in turns. Rates are what this machine does
    today. Files go to a folder under $TMPDIR and are removed.
    """
    _measure(run, quick=quick, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench engine --json")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds: seconds, and less to rely on.")
@_report_options
def engine(quick: bool, check: bool, as_json: bool) -> None:
    """Upload, hydration, resident reads, catalog operations, reopening and memory.

    Starts an S3 server (SeaweedFS) of its own on loopback for the run, and compares with bare boto3 on it. Files go to
    a folder under $TMPDIR (some 6 GiB without --quick) and are removed.
    """
    from aof2.fs.bench import tiers

    _measure(tiers.run, quick=quick, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench mount --size 256MiB --files 2000 --peers rclone")
@click.option("--size", metavar="SIZE", help="Of the large file. Default: 1GiB, with --quick 64MiB.")
@click.option("--files", metavar="N", type=click.IntRange(1), help="Small files. Default: 10000, with --quick 500.")
@click.option("--rounds", metavar="N", type=click.IntRange(1), help="Turns of each. Default: 3, with --quick 1.")
@click.option("--peers", metavar="NAMES", default="rclone,s3fs,weed", show_default=True, help="Or `none`.")
@click.option("--only", metavar="ROWS", help="Of resident, daemon, write, cold, ranges, files, durable. Default: all.")
@click.option("--without-aof2", is_flag=True, help="The others alone: what there is to beat.")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds, and less to rely on.")
@_report_options
def mount(
    size: str | None,
    files: int | None,
    rounds: int | None,
    peers: str,
    only: str | None,
    without_aof2: bool,
    quick: bool,
    check: bool,
    as_json: bool,
) -> None:
    """The mount against the local disk, rclone, s3fs and weed mount.

    Starts an S3 server (SeaweedFS) of its own on loopback and mounts them all on it, with the same files and the same
    loops, in turns, each alone. Beside a ratio stands the processor time that the daemons took for each unit, in
    brackets the baseline's. Peers that are not installed are installed when root, else named and left out; geesefs and
    libfuse's passthrough_hp make small files, too, where they are on PATH. Files go to a folder under $TMPDIR (some
    30 GiB at full size) and are removed, whatever happens.
    """
    from aof2.fs.bench.mount import FULL, PEERS, QUICK, run
    from aof2.fs.bench.rows import ROWS

    usual = QUICK if quick else FULL
    plan = msgspec.structs.replace(
        usual,
        size=usual.size if size is None else _size(size),
        files=files or usual.files,
        rounds=rounds or usual.rounds,
        with_aof2=not without_aof2,
        **_chosen(peers, PEERS, only, ROWS),
    )
    _race(run, plan, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench names --files 2000 --tree ~/src/linux --only one,tree")
@click.option("--changes", metavar="N", type=click.IntRange(4), help="Of each kind. Default: 2000, with --quick 400.")
@click.option("--files", metavar="N", type=click.IntRange(1), help="On their way to S3. Default: 10000, quick 1000.")
@click.option("--rounds", metavar="N", type=click.IntRange(1), help="Turns of each. Default: 2, with --quick 1.")
@click.option("--peers", metavar="NAMES", default="bindfs", show_default=True, help="Or `none`.")
@click.option("--only", metavar="ROWS", help="Of one, four (processes), tree. Default: all.")
@_tree_option
@click.option("--without-aof2", is_flag=True, help="The others alone: what there is to beat.")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds, and less to rely on.")
@_report_options
def names(
    changes: int | None,
    files: int | None,
    rounds: int | None,
    peers: str,
    only: str | None,
    tree: Path | None,
    without_aof2: bool,
    quick: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Names made, changed, looked at: the mount against the local disk and bindfs.

    By one process and by four, on an idle mount and while files are on their way to S3; then a source tree, cloned,
    checked out, walked, removed and unpacked. Each contestant is alone while it is measured. JuiceFS takes part where
    juicefs and redis-server are on PATH. Processor time is that of daemon and channel for each name, until it is in
    the catalog. Files go to a folder under $TMPDIR and are removed, whatever happens.
    """
    from aof2.fs.bench.names import FULL, PEERS, QUICK, ROWS, run

    usual = QUICK if quick else FULL
    plan = msgspec.structs.replace(
        usual,
        changes=changes or usual.changes,
        files=files or usual.files,
        rounds=rounds or usual.rounds,
        tree=tree.absolute() if tree else None,
        with_aof2=not without_aof2,
        **_chosen(peers, PEERS, only, ROWS),
    )
    _race(run, plan, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench small --files 2000 --peers rclone --only eight,cold")
@click.option("--files", metavar="N", type=click.IntRange(1), help="Of 4 KiB. Default: 10000, with --quick 500.")
@click.option("--size", metavar="SIZE", help="Of a large file. Default: 512MiB, with --quick 64MiB.")
@click.option("--rounds", metavar="N", type=click.IntRange(1), help="Turns of each. Default: 2, with --quick 1.")
@click.option("--peers", metavar="NAMES", default="rclone,s3fs,weed", show_default=True, help="Or `none`.")
@click.option("--only", metavar="ROWS", help="Of eight, one, cold, medium, large, beside, tree. Default: all.")
@_tree_option
@click.option("--without-aof2", is_flag=True, help="The others alone: what there is to beat.")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds, and less to rely on.")
@_report_options
def small(
    files: int | None,
    size: str | None,
    rounds: int | None,
    peers: str,
    only: str | None,
    tree: Path | None,
    without_aof2: bool,
    quick: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Small files to S3 and back, and large ones: the mount against rclone, s3fs and weed mount.

    Files of 4 KiB from the first create, by eight threads and by one, until all are durable; read cold, in order and at
    random; 512 MiB against boto3, and a small file that is waited for beside them. One S3 server (SeaweedFS) for all,
    which counts the requests. JuiceFS, geesefs and mount-s3 take part where their programs are on PATH. Files go to a
    folder under $TMPDIR (some 10 GiB at full size) and are removed, whatever happens.
    """
    from aof2.fs.bench.small import FULL, PEERS, QUICK, run
    from aof2.fs.bench.smallrows import ROWS

    usual = QUICK if quick else FULL
    plan = msgspec.structs.replace(
        usual,
        files=files or usual.files,
        size=usual.size if size is None else _size(size),
        rounds=rounds or usual.rounds,
        tree=tree.absolute() if tree else None,
        with_aof2=not without_aof2,
        **_chosen(peers, PEERS, only, ROWS),
    )
    _race(run, plan, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench spark --size 64MiB --only hot,source")
@click.option("--size", metavar="SIZE", help="Scanned, counted, appended. Default: 256MiB, with --quick 16MiB.")
@click.option("--rows", metavar="N", type=click.IntRange(1000), help="Written. Default: 1000000, with --quick 50000.")
@click.option("--rounds", metavar="N", type=click.IntRange(1), help="Turns of each. Default: 3, with --quick 1.")
@click.option("--only", metavar="ROWS", help="Of hot, written, cold, source, ingest. Default: all.")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds, and less to rely on.")
@_report_options
def spark(
    size: str | None, rows: int | None, rounds: int | None, only: str | None, quick: bool, check: bool, as_json: bool
) -> None:
    """Spark on the mount against Spark on the local disk.

    JSON, text and Parquet scanned hot and cold; Parquet written, in 4 files and in 400, while uploads go on; records
    counted by format("aof2"), as JSON and out of batches that are ready; records appended. One session runs all of it,
    in turns. Needs the `spark` extra and Java 17. JuiceFS takes part in cold scans where juicefs and redis-server are
    on PATH. Files go to a folder under $TMPDIR (some 5 GiB at full size) and are removed, whatever happens.
    """
    from aof2.fs.bench.spark import FULL, QUICK, run
    from aof2.fs.bench.sparkrows import ROWS

    usual = QUICK if quick else FULL
    plan = msgspec.structs.replace(
        usual,
        size=usual.size if size is None else _size(size),
        rows=rows or usual.rows,
        rounds=rounds or usual.rounds,
        only=list(ROWS) if only is None else _names("--only", only, ROWS),
    )
    _race(run, plan, check=check, as_json=as_json)


@bench.command(epilog="Example: aof2 bench pipelines --size 64MiB --only compact")
@click.option("--size", metavar="SIZE", help="Of records. Default: 256MiB, with --quick 16MiB.")
@click.option("--rounds", metavar="N", type=click.IntRange(1), help="Turns of each. Default: 3, with --quick 1.")
@click.option("--only", metavar="ROWS", help="Of compact, manifest, verify. Default: all.")
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer rounds, and less to rely on.")
@_report_options
def pipelines(size: str | None, rounds: int | None, only: str | None, quick: bool, check: bool, as_json: bool) -> None:
    """The pipelines of `aof2 spark` against what Spark does without them.

    A stream on the mount compacted into partitioned Parquet there, against the same from files of JSON to Parquet on
    the local disk, with and without counts and checksums. All that is in the remote verified by tasks, against two
    threads. The records of a log added up, against the same rows in Parquet. One session runs all of it, in turns.
    Needs the `spark` extra and Java 17. Files go to a folder under $TMPDIR (some 5 GiB at full size) and are removed,
    whatever happens.
    """
    from aof2.fs.bench.pipelines import FULL, QUICK, ROWS, run

    usual = QUICK if quick else FULL
    plan = msgspec.structs.replace(
        usual,
        size=usual.size if size is None else _size(size),
        rounds=rounds or usual.rounds,
        only=list(ROWS) if only is None else _names("--only", only, ROWS),
    )
    _race(run, plan, check=check, as_json=as_json)


def _race(run: Callable[..., list[Measurement]], plan: object, *, check: bool, as_json: bool) -> None:
    from aof2.fs.bench.process import StepError

    try:
        with counted("rows") as report_progress:
            results = run(plan, say=complain, on_progress=report_progress)
    except StepError as e:
        raise CliError(str(e)) from None
    _report(results, check=check, as_json=as_json)


def _size(text: str) -> int:
    """At least 1 MiB, in whole MiB: the bench reads and writes in these."""
    try:
        size = parse_size(text)
    except ValueError as e:
        raise click.BadParameter(f"{text!r}: {e}", param_hint="--size") from None
    if size < MIB or size % MIB:
        raise click.BadParameter(f"{text!r}: whole MiB, at least 1MiB", param_hint="--size")
    return size


def _chosen(peers: str, known: Collection[str], only: str | None, rows: Collection[str]) -> dict[str, list[str]]:
    """Who takes part, and in what."""
    return {
        "peers": [] if peers == "none" else _names("--peers", peers, known),
        "only": list(rows) if only is None else _names("--only", only, rows),
    }


def _names(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Comma-separated names, in the order they run in."""
    asked = {name.strip() for name in text.split(",")}
    if unknown := sorted(asked - set(allowed)):
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(allowed)}", param_hint=option)
    return [name for name in allowed if name in asked]


def _measure(work: Callable[..., list[Measurement]], *, quick: bool, check: bool, as_json: bool) -> None:
    with counted("measurements") as report_progress:
        results = work(quick=quick, on_progress=report_progress)
    _report(results, check=check, as_json=as_json)


def _report(results: list[Measurement], *, check: bool, as_json: bool) -> None:
    folding = {"what": 18, "baseline": 16}
    output.print_found(results, COLUMNS, _cells, as_json=as_json, folding=folding, style=lambda m: STYLES[m.ok])
    fail_if(check and any(result.ok is False for result in results))


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
        _cost(m),
    )


def _cost(m: Measurement) -> str:
    """Processor time of the daemons for each unit, and the baseline's: steadier than a rate on a noisy machine."""
    if m.cost_us is None:
        return "-"
    unit = "MiB" if m.unit == "B/s" else m.unit.removesuffix("s/s")
    other = "" if m.baseline_cost_us is None else f" ({m.baseline_cost_us:.3g})"
    return f"{m.cost_us:.3g}{other} µs/{unit}"


def amount(value: float, unit: str) -> str:
    """Three digits that matter: 12.3 GB/s, 2.05 M records/s, 64 fsyncs."""
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * scale or (value >= scale > 1e3):
            return f"{value / scale:.3g} {prefix}{unit}" if unit == "B/s" else f"{value / scale:.3g} {prefix} {unit}"
    return f"{value:.4g} {unit}"
