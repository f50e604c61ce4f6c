"""`scripts/demo`: AOF2 in two minutes, cell by cell, on a volume of its own.

Each cell prints what it is about, the line a user would type, and what came of it. Files go to a folder under $TMPDIR,
which is removed at the end, whatever happens; `--keep` leaves the volume mounted, to look around in.

Owner: the person who reads along. A crash leaves the folder, and perhaps its mount: `umount -l` it, remove it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

AOF2 = Path(sys.executable).with_name("aof2")
CONF = """\
[volume]
mountpoint = "{top}/aof2"
state_dir = "{top}/state"
[remote]
url = "file://{top}/remote"
[cache]
hot_bytes = "1GiB"
min_free = "1%"
[metrics]
listen = ""
[tenants.default]
kind = "files"
[tenants.events]
kind = "append"
ext = "jsonl"
segment_bytes = "4MiB"
"""
PAGES = ("/", "/pricing", "/docs", "/blog")
SHOWN_LINES = 14


class Walk:
    """One volume, and the words around what is done with it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.mount = top / "aof2"
        self.conf = top / "mount.conf"
        self.cells = 0

    def cell(self, title: str) -> None:
        self.cells += 1
        click.echo()
        click.secho(f"[{self.cells}] {title}", bold=True)

    def shell(self, *words: str | Path) -> None:
        """A command as a user types it; long output is cut."""
        line = [str(word) for word in words]
        click.secho("    $ " + shlex.join(line).replace(str(self.mount), "/aof2"), fg="cyan")
        command = [str(AOF2), *line[1:], "--conf", str(self.conf)] if line[0] == "aof2" else line
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = (done.stdout + done.stderr).replace(str(self.mount), "/aof2").splitlines()
        for text in said[:SHOWN_LINES]:
            click.echo(f"    {text}")
        if len(said) > SHOWN_LINES:
            click.echo(f"    … {len(said) - SHOWN_LINES} lines more")
        if done.returncode:
            raise click.ClickException(f"{line[0]} ended with {done.returncode}")

    def timed(self, text: str, work: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        result = work()
        click.secho(f"    > {text}", fg="cyan")
        click.echo(f"    {result}   ({time.perf_counter() - began_s:.2f} s)")


def append_events(stream: str, writer: int, count: int) -> None:
    """One of several processes that append at once: a line a write, as a logger does."""
    with open(f"{stream}/_append", "ab", buffering=0) as out:
        for n in range(count):
            event = {"writer": writer, "n": n, "page": PAGES[(writer + n) % len(PAGES)], "ms": n * 7 % 1000}
            out.write(json.dumps(event).encode() + b"\n")
        os.fsync(out.fileno())


def ingest(stream: Path, writers: int, count: int) -> str:
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=append_events, args=(str(stream), n, count)) for n in range(writers)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        raise click.ClickException("a writer failed")
    return f"{writers * count:,} events by {writers} processes"


def session() -> Any:
    """An ordinary session: nothing in it knows of the mount."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "4").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def walk(w: Walk, events: int) -> None:
    stream, table = w.mount / "events" / "clicks", w.mount / "default" / "clicks.parquet"
    w.cell("A volume: memory, this disk and a remote behind one mount")
    w.shell("aof2", "mount")

    w.cell("A stream is a directory; four processes append to it at once")
    w.shell("mkdir", stream)
    w.timed("open('…/clicks/_append', 'ab').write(line)", lambda: ingest(stream, 4, events // 4))
    w.shell("aof2", "seal", stream)
    w.shell("ls", "-l", stream)

    w.cell("Spark reads it with no code changes, or record by record with offsets")
    spark = session()
    w.timed("spark.read.json(stream).count()", lambda: spark.read.json(str(stream)).count())
    records = spark.read.format("aof2").load(str(stream))
    w.timed("spark.read.format('aof2').load(stream).count()", lambda: records.count())
    records.select("offset", "timestamp", "segment_id", "payload").orderBy("offset").show(3, truncate=60)

    w.cell("And writes tables, as on any disk")
    frame = spark.read.json(str(stream))
    w.timed("df.write.partitionBy('page').parquet(…)", lambda: frame.write.partitionBy("page").parquet(str(table)))

    w.cell("Durable means: the remote alone could restore it")
    w.shell("aof2", "wait", stream, table)
    w.shell("aof2", "status", stream)

    w.cell("Hot, then with every local copy gone, then hot again")
    count = lambda: spark.read.parquet(str(table)).groupBy("page").count().collect()  # noqa: E731
    w.timed("hot: spark.read.parquet(…).groupBy('page').count()", count)
    w.shell("aof2", "evict", table)
    w.timed("cold", count)
    w.timed("again", count)

    w.cell("Why is it where it is? The log knows")
    part = next(path for path in sorted(table.rglob("*.parquet")))
    w.shell("aof2", "why", part)
    w.cell("The volume as its operator sees it")
    w.shell("aof2", "top", "--once")
    w.shell("aof2", "verify", "--remote")
    spark.stop()


def leave(w: Walk) -> None:
    subprocess.run([AOF2, "umount", "--no-wait", "--conf", w.conf], capture_output=True, check=False)
    subprocess.run(["umount", "-l", w.mount], capture_output=True, check=False)
    shutil.rmtree(w.top, ignore_errors=True)


@click.command()
@click.option("--events", default=200_000, show_default=True, help="Appended to the stream.")
@click.option("--keep", is_flag=True, help="Leave the volume mounted.")
def main(events: int, keep: bool) -> None:
    """Mount, append, query with Spark hot and cold, ask why: AOF2 in one go."""
    w = Walk(Path(tempfile.mkdtemp(prefix="aof2-demo-")))
    w.mount.mkdir()
    w.conf.write_text(CONF.format(top=w.top))
    try:
        walk(w, events)
        if keep:
            click.echo(f"\nmounted at {w.mount}; when done: aof2 umount --conf {w.conf} && rm -r {w.top}")
            return
        w.cell("Unmounting uploads what is left")
        w.shell("aof2", "umount")
    finally:
        if not keep:
            leave(w)


if __name__ == "__main__":
    main()
