"""Structured streaming over a stream that grows, while Spark and the daemon are killed: every record is there once.

Writers append lines of their own to one stream, and mind which were answered. Spark, in a process of its own, runs two
queries, one over the payload files (`text`), one over `format("aof2")`; sinks and checkpoints are on the mount, too.
Killed and started again as often as asked, both sinks have each answered line once, and none that no writer wrote.

Owner: the torture `streams`. A crash leaves the volume's folder.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from tests.support.mount import MountedVolume, until

TENANTS: Final = {
    "events": {"kind": "append", "segment_bytes": "256KiB", "seal_after": "2s"},
    "default": {"kind": "files"},
}
SPARK_STARTS_MAX_S: Final = 900.0
BATCHES_BEFORE_A_KILL: Final = 2
TRIES: Final = 5
PAUSE_S: Final = 0.01


class Writers:
    """Processes of an application, as threads: they go on where the mount went and came back."""

    def __init__(self, stream: Path, count: int) -> None:
        self._stream = stream
        self._stop = threading.Event()
        self.answered: list[list[int]] = [[] for _ in range(count)]
        self.asked = [0] * count
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, writer: int) -> None:
        fd = -1
        while not self._stop.is_set():
            number = self.asked[writer]
            try:
                if fd < 0:
                    fd = os.open(self._stream / "_append", os.O_WRONLY | os.O_APPEND)
                self.asked[writer] += 1
                os.write(fd, line(writer, number))
            except OSError:  # the mount is gone, or not there yet
                fd = self._close(fd)
                time.sleep(0.2)
                continue
            self.answered[writer].append(number)
            time.sleep(PAUSE_S)
        self._close(fd)

    @staticmethod
    def _close(fd: int) -> int:
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                return -1
        return -1


def line(writer: int, number: int) -> bytes:
    return b'{"writer": %d, "number": %d, "text": "%s"}\n' % (writer, number, b"x" * (number * 37 % 200))


class Query:
    """Spark in a process of its own, with both queries. `once`: until all there is has been read."""

    def __init__(self, volume: MountedVolume, *, once: bool) -> None:
        self._log = volume.root / "spark.log"
        command = [sys.executable, "-m", "tests.mount.streaming", str(volume.mountpoint), "once" if once else "on"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout_s: float) -> None:
        code = self._process.wait(timeout_s)
        assert code == 0, f"Spark ended with {code}: {self._log.read_text(errors='replace')[-4000:]}"


class StreamRounds:
    """`run`: kill and start again, so many times; then compare."""

    def __init__(self, volume: MountedVolume, seed: int, say: Callable[[str], None], *, writers: int) -> None:
        self._volume = volume
        self._say = say
        self._rng = random.Random(seed)
        self._stream = volume.mountpoint / "events" / "clicks"
        self._stream.mkdir()
        self.writers = Writers(self._stream, writers)

    def run(self, rounds: int) -> None:
        self.writers.start()
        try:
            for n in range(rounds):
                self._one(("spark", "daemon", "both")[n % 3], n)
        finally:
            self.writers.stop()
        self._volume.done("seal", self._stream)
        Query(self._volume, once=True).wait(SPARK_STARTS_MAX_S)
        self._compare()

    def _one(self, killed: str, n: int) -> None:
        query = self._until_it_works()
        time.sleep(self._rng.uniform(0, 1.5))
        if killed != "spark":
            self._volume.kill()
        query.kill()
        if killed != "spark":
            self._volume.remount()
        self._say(f"round {n}: {killed} killed; {sum(map(len, self.writers.answered))} lines answered")

    def _until_it_works(self) -> Query:
        """Spark gives up by itself where its own processes come late, on a machine that is busy."""
        for _ in range(TRIES):
            batches, query = self._batches(), Query(self._volume, once=False)

            def went_on(batches: list[int] = batches, query: Query = query) -> bool:
                more = [now - was for was, now in zip(batches, self._batches(), strict=True)]
                return query.ended() is not None or min(more) >= BATCHES_BEFORE_A_KILL

            until(went_on, "no batch is committed", SPARK_STARTS_MAX_S)
            if query.ended() is None:
                return query
            self._say("Spark ended by itself; once more")
        raise AssertionError(f"Spark ended by itself {TRIES} times; see spark.log")

    def _batches(self) -> list[int]:
        """Committed so far, of each query."""
        return [len(list(self._checkpoint(name).glob("commits/[0-9]*"))) for name in QUERIES]

    def _checkpoint(self, name: str) -> Path:
        return self._volume.mountpoint / "default" / f"checkpoint-{name}"

    def _compare(self) -> None:
        import pyarrow.dataset as ds  # of the spark extra

        stored = Counter(self._stored())
        self._is_right("stream", stored)
        for name in QUERIES:
            files = sink_files(self._volume.mountpoint / "default" / f"out-{name}")
            rows = ds.dataset(files, format="parquet").to_table(columns=["line"])["line"].to_pylist()
            found = Counter(row.rstrip("\n").encode() for row in rows)
            self._is_right(name, found)
            assert found == stored, f"{name}: not what the stream has"
            self._say(f"{name}: {sum(found.values())} lines, each once")

    def _stored(self) -> Iterable[bytes]:
        for path in sorted(self._stream.glob("[0-9]*.jsonl")):
            yield from path.read_bytes().splitlines()

    def _is_right(self, name: str, found: Counter[bytes]) -> None:
        twice = [text for text, count in found.items() if count > 1]
        assert not twice, f"{name}: {len(twice)} lines twice: {twice[:3]}"
        for writer, answered in enumerate(self.writers.answered):
            missing = [n for n in answered if line(writer, n).rstrip() not in found]
            assert not missing, f"{name}: {len(missing)} of writer {writer} are missing: {missing[:5]}"
        asked = {line(writer, n).rstrip() for writer, count in enumerate(self.writers.asked) for n in range(count)}
        strange = [text for text in found if text not in asked]
        assert not strange, f"{name}: {len(strange)} lines that no writer wrote: {strange[:3]}"


def sink_files(sink: Path) -> list[str]:
    """The files that the sink's log names: what a killed batch left beside them is none of them."""
    import json

    named: dict[str, None] = {}
    entries = sorted((sink / "_spark_metadata").glob("[0-9]*"), key=lambda p: (int(p.name.split(".")[0]), p.name))
    for entry in entries:
        for text in entry.read_text().splitlines()[1:]:
            named[json.loads(text)["path"].removeprefix("file://")] = None
    return list(named)


QUERIES: Final = ("text", "aof2")


def main(mountpoint: Path, *, once: bool) -> None:
    """The process that Spark runs in."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark: SparkSession = (
        SparkSession.builder.master("local[2]")  # type: ignore[attr-defined]
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    stream, default = str(mountpoint / "events" / "clicks"), mountpoint / "default"
    frames = {
        "text": spark.readStream.format("text").load(stream).selectExpr("value as line"),
        "aof2": spark.readStream.format("aof2").load(stream).selectExpr("cast(payload as string) as line"),
    }
    queries = []
    for name, frame in frames.items():
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(default / f"checkpoint-{name}"))
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="500 milliseconds")
        queries.append(writer.start(str(default / f"out-{name}")))
    for query in queries:
        if once:
            query.awaitTermination()
        else:
            spark.streams.awaitAnyTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), once=sys.argv[2] == "once")
