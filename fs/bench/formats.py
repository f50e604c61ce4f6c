"""The formats' benchmark: checksums, segment scan, manifest append and replay, group commit.

Everything is made here from a seed: buffers in memory, logs in a temporary folder that is removed at the end. A crash
leaves that folder (`aof2-bench-…` under $TMPDIR), nothing else.

Owner: the calling thread, and the threads of the group commit while they are measured.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.group import GroupThread
from aof2.engine.manifest import payloads
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from aof2.fs.bench.measure import Measurement, best, compared, run_parts, timed
from aof2.native import reference

SEED: Final = 2
PAYLOAD_LEN: Final = 256
SEGMENT_V3: Final = Struct("<IIQQIQ")
STAMP_MS: Final = 1_700_000_000_000
NEVER_MS: Final = 1 << 40
BLOCK_RECORDS: Final = 4096
GROUP_THREADS: Final = 64


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything; `quick` is for trying that it runs."""

    rounds: int = 7
    buffer_len: int = 64 << 20
    reference_len: int = 128 << 10
    loop_len: int = 8 << 20
    append_records: int = 65536
    replay_records: int = 1_000_000
    apply_records: int = 200_000


QUICK: Final = Sizes(
    rounds=3,
    buffer_len=8 << 20,
    reference_len=32 << 10,
    loop_len=1 << 20,
    append_records=8192,
    replay_records=50_000,
    apply_records=20_000,
)


def run(*, quick: bool, on_progress: Callable[[int, int], None]) -> list[Measurement]:
    """All measurements in order."""
    sizes = QUICK if quick else Sizes()
    memory_only = (lambda _: checksums(sizes), lambda _: segment_scan(sizes))
    on_disk = (partial(part, sizes) for part in (manifest_append, manifest_replay, group_commit))
    return run_parts([*memory_only, *on_disk], on_progress)


def _random_bytes(length: int) -> bytes:
    return random.Random(SEED).randbytes(length)  # noqa: S311 (the same bytes every time)


def _mib(length: int) -> str:
    return f"{length >> 20} MiB"


# -- checksums ---------------------------------------------------------------------------------------------------


def checksums(sizes: Sizes) -> list[Measurement]:
    data = _random_bytes(sizes.buffer_len)
    results = [_crc64(data, sizes), _crc64(data[: 1 << 20], sizes)]
    ours, theirs = best([timed(lambda: native.crc32(data)), timed(lambda: zlib.crc32(data))], sizes.rounds)
    what = f"crc32 of {_mib(len(data))}"
    return [*results, compared(what, "B/s", len(data) / ours, "zlib", len(data) / theirs, at_least=3)]


def _crc64(data: bytes, sizes: Sizes) -> Measurement:
    what = f"crc64 of {_mib(len(data))}"
    # Short buffers take microseconds: repeat them until a round is long enough to time.
    times = max(1, (64 << 20) // len(data) // 4)

    def repeat(function: Callable[[bytes], int]) -> Callable[[], float]:
        return timed(lambda: [function(data) for _ in range(times)])

    try:
        from awscrt.checksums import crc64nvme
    except ImportError:
        (seconds,) = best([repeat(native.crc64)], sizes.rounds)
        rate = len(data) * times / seconds
        return Measurement(what=what, unit="B/s", value=rate, baseline="awscrt", note="awscrt not installed")
    ours, theirs = best([repeat(native.crc64), repeat(crc64nvme)], sizes.rounds)
    total = len(data) * times
    return compared(what, "B/s", total / ours, "awscrt", total / theirs, at_least=0.8)


# -- segments ----------------------------------------------------------------------------------------------------


def segment_scan(sizes: Sizes) -> list[Measurement]:
    data = _segment(sizes.buffer_len)
    small, middle = data[: _whole(sizes.reference_len)], data[: _whole(sizes.loop_len)]
    sides = [
        timed(lambda: list(native.SegmentScanner(data, start=0, version=3))),
        timed(lambda: native.crc64(data)),
    ]
    scan, checksum = best(sides, sizes.rounds)
    rate = len(data) / scan
    slow_sides = [timed(lambda: reference.segment_scan(small, start=0, version=3)), timed(lambda: _struct_scan(middle))]
    slow, loop = best(slow_sides, min(3, sizes.rounds))
    what = f"segment scan of {_mib(sizes.buffer_len)}, {PAYLOAD_LEN}-byte payloads"
    return [
        compared(what, "B/s", rate, "crc64 alone", len(data) / checksum, at_least=0.25),
        compared(what, "B/s", rate, "Python reference", len(small) / slow, at_least=50),
        compared(what, "B/s", rate, "Python loop, native checksums", len(middle) / loop),
    ]


def _whole(length: int) -> int:
    record = SEGMENT_V3.size + PAYLOAD_LEN
    return length // record * record


def _segment(length: int) -> bytes:
    count = length // (SEGMENT_V3.size + PAYLOAD_LEN)
    return native.segment_encode(
        3,
        _random_bytes(count * PAYLOAD_LEN),
        array("I", [PAYLOAD_LEN]) * count,
        array("Q", range(0, count * PAYLOAD_LEN, PAYLOAD_LEN)),
        array("Q", range(STAMP_MS, STAMP_MS + count)),
        array("Q", range(count)),
        array("I", [0]) * count,
    )


def _struct_scan(data: bytes) -> list[tuple[int, ...]]:
    """What one would write in Python with fast checksums at hand."""
    rows: list[tuple[int, ...]] = []
    pos, next_logical = 0, 0
    zeros = bytes(4)
    while pos < len(data):
        length, crc, logical, stamp, flags, ext_id = SEGMENT_V3.unpack_from(data, pos)
        end = pos + SEGMENT_V3.size + length
        if native.crc32(data[pos : pos + 4] + zeros + data[pos + 8 : end]) != crc or logical < next_logical:
            raise ValueError(f"record at {pos} is damaged")
        rows.append((pos, length, logical, stamp, ext_id, flags))
        pos, next_logical = end, logical + length
    native.crc64(data)
    return rows


# -- manifest ----------------------------------------------------------------------------------------------------


def manifest_append(sizes: Sizes, folder: Path) -> list[Measurement]:
    records = [_record(i) for i in range(BLOCK_RECORDS)]
    blocks = max(1, sizes.append_records // BLOCK_RECORDS)
    slow_records = records[: BLOCK_RECORDS // 4]
    slow_sweep: list[payloads.Payload] = [payloads.LocalEvicted(i << 10) for i in range(BLOCK_RECORDS // 4)]
    filled = _filled_batch(records)
    settings = LogSettings(durable=False, rotation_period_ms=NEVER_MS)
    with ManifestLogWriter.open(Env(), folder, settings) as writer:

        def append(block: Callable[[], object]) -> Callable[[], float]:
            """One block, timed before its commit; the chunk it went to is then sealed."""
            clock = timed(block)

            def once() -> float:
                seconds = clock()
                writer.rotate()
                return seconds

            return once

        def one_by_one() -> None:
            for i, payload in enumerate(records):
                writer.append(payload, segment_id=i, logical_offset=i, timestamp_ms=STAMP_MS)

        sides = [
            append(lambda: writer.append_batch(_column_batch(BLOCK_RECORDS))),
            append(lambda: writer.append_batch(_filled_batch(records))),
            append(lambda: writer.append_batch(filled)),
            append(one_by_one),
            timed(lambda: _append_slowly(slow_records)),
            timed(lambda: _append_slowly(slow_sweep)),
        ]
        columns, built, encoded, single, slow, slow_fixed = best(sides, max(sizes.rounds, blocks))
    slow_rate = len(slow_records) / slow
    pure = "pure Python, a struct at a time"
    return [
        compared("manifest append, a batch of columns, built and appended", "records/s", BLOCK_RECORDS / columns, pure,
                 len(slow_sweep) / slow_fixed, at_least=20),
        compared("manifest append, a mixed batch, built and appended", "records/s", BLOCK_RECORDS / built, pure,
                 slow_rate),
        compared("manifest append, a batch already built", "records/s", BLOCK_RECORDS / encoded, pure, slow_rate),
        compared("manifest append, one at a time", "records/s", BLOCK_RECORDS / single, pure, slow_rate,
                 expected="some 200 k"),
    ]  # fmt: skip


def _record(i: int) -> payloads.Payload:
    """The life of a segment, over and over."""
    key = f"tenants/7/segments/{i // 8:016x}.zst"
    life: tuple[payloads.Payload, ...] = (
        payloads.SegmentOpened(i << 20, i),
        payloads.SealSegment(i << 10, i * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF),
        payloads.CompressionStarted(i),
        payloads.CompressionDone(i << 9, 0),
        payloads.UploadStarted(key),
        payloads.UploadDone(key, f"{i:032x}"),
        payloads.LocalEvicted(i << 10),
        payloads.HydrationDone(i << 10),
    )
    return life[i % len(life)]


def _filled_batch(records: list[payloads.Payload]) -> RecordBatch:
    batch = RecordBatch()
    add = batch.add
    for i, payload in enumerate(records):
        add(payload, segment_id=i, logical_offset=i, timestamp_ms=STAMP_MS)
    return batch


def _column_batch(count: int) -> RecordBatch:
    """An eviction sweep, as the engine writes it."""
    batch = RecordBatch()
    numbers = range(count)
    freed = [i << 10 for i in numbers]
    batch.add_columns(payloads.LocalEvicted, numbers, freed, logical_offsets=numbers, timestamp_ms=STAMP_MS)
    return batch


def _append_slowly(records: list[payloads.Payload]) -> bytes:
    out = bytearray()
    crc64 = 0
    for i, payload in enumerate(records):
        kind, data = payloads.encode(payload)
        record, crc64 = reference.manifest_encode([kind], [i], [i], [STAMP_MS], data, [len(data)], crc64)
        out += record
    return bytes(out)


def manifest_replay(sizes: Sizes, folder: Path) -> list[Measurement]:
    _write_log(folder, sizes.replay_records)
    stream = Stream(folder)
    rounds = min(3, sizes.rounds)
    counts = [0, 0]

    def read() -> None:
        counts[0] = sum(chunk.count for chunk in stream.read())

    def fold() -> None:
        index = ManifestIndex()
        counts[1] = 0
        for chunk in stream.read():
            index.apply_chunk(chunk)
            counts[1] += chunk.count
            if counts[1] >= sizes.apply_records:
                return

    read_s, fold_s = best([timed(read), timed(fold)], rounds)
    return [
        Measurement(what="manifest replay, every checksum", unit="records/s", value=counts[0] / read_s,
                    target_text="some 2 M"),
        Measurement(what="manifest replay into the index", unit="records/s", value=counts[1] / fold_s,
                    target_text="some 300 k"),
    ]  # fmt: skip


def _write_log(folder: Path, count: int) -> None:
    batch = _filled_batch([_record(i) for i in range(BLOCK_RECORDS // 2)])
    settings = LogSettings(durable=False, rotation_period_ms=NEVER_MS)
    with ManifestLogWriter.open(Env(), folder, settings) as writer:
        for _ in range(-(-count // len(batch))):
            writer.append_batch(batch)
            writer.rotate()


def group_commit(sizes: Sizes, folder: Path) -> list[Measurement]:
    """As many threads as there are, each waiting for its own durable commit: how many fsyncs that takes."""
    fsyncs, seconds = [], []
    for number in range(sizes.rounds):
        count, elapsed = _group_round(folder / str(number))
        fsyncs.append(count)
        seconds.append(elapsed)
    median = statistics.median(fsyncs)
    return [
        Measurement(
            what=f"group commit, {GROUP_THREADS} threads waiting for durable commits",
            unit="fsyncs",
            value=median,
            baseline="one each",
            baseline_value=GROUP_THREADS,
            ratio=GROUP_THREADS / max(1, median),
            target=4,
            target_text="over 4",
            ok=median < GROUP_THREADS / 4,
        ),
        Measurement(what="group commit, durable commits", unit="commits/s", value=GROUP_THREADS / min(seconds)),
    ]


class _LogTarget:
    """A log as the thread sees it."""

    def __init__(self, writer: ManifestLogWriter) -> None:
        self._writer = writer
        self.sync, self.close = writer.sync, writer.close

    def before(self, batch: RecordBatch) -> Iterator[None]:
        return iter(())

    def append(self, batch: RecordBatch) -> Callable[[], object]:
        self._writer.append_batch(batch)
        return lambda: self._writer.position

    def full(self) -> bool:
        return False

    def commit(self, *, sync: bool) -> None:
        self._writer.commit(sync=sync)

    def due_s(self) -> None:
        return None

    def housekeep(self) -> None:
        pass


def _group_round(folder: Path) -> tuple[int, float]:
    writer = ManifestLogWriter.open(Env(), folder, LogSettings(rotation_period_ms=NEVER_MS))
    group: GroupThread[RecordBatch] = GroupThread(writer.env, _LogTarget(writer), name="aof2-bench")
    group.start()
    started: list[float] = []
    ready = threading.Barrier(GROUP_THREADS, action=lambda: started.append(time.perf_counter()))

    def one(i: int) -> None:
        batch = RecordBatch()
        batch.add(_record(i), segment_id=i)
        ready.wait()
        group.submit(batch, sync=True).result()

    with ThreadPoolExecutor(GROUP_THREADS) as pool:
        list(pool.map(one, range(GROUP_THREADS)))
    elapsed = time.perf_counter() - started[0]
    fsyncs = writer.fsyncs
    group.close()
    return fsyncs, elapsed
