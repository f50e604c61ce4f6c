"""Records of one task, staged: payloads back to back in one file, headers in another, as a sealed segment has them.

    <staging>/<job>/<attempt>.<n>.payload, <attempt>.<n>.idx

Offsets begin at 0; the stream gives them others when the job is delivered (`engine/append/delivery.py`), which checks
every record. Header and footer of an index are written last: a file of an attempt that was killed is no index.

Invariants: each attempt has a name of its own, so that a speculative or a retried task never touches another's files;
an attempt that fails removes its files.

Owner: one task. A crash leaves files of its attempt, which `sweep` removes when they are old.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from aof2.engine.segment.index import INDEX_FIXED_BYTES
from aof2.engine.segment.staged import StagedIndex

FILE_BYTES_MAX: Final = 256 << 20  # headers included: the daemon has one index in memory at a time
KEPT_S: Final = 86_400.0


class Staged(NamedTuple):
    """What a task wrote."""

    files: list[tuple[str, str]]
    records: int


def stage(batches: Iterator[Any], folder: Path) -> Staged:
    """All records of a task. On any error nothing of it is left; so is the folder gone: the job is over."""
    attempt = uuid.uuid4().hex
    files: list[tuple[str, str]] = []
    writer: _Pair | None = None
    records = 0
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                writer = _Pair(folder / f"{attempt}.{len(files)}")
                files.append((str(writer.payload_path), str(writer.index_path)))
            writer.add(batch)
            records += batch.num_rows
            if writer.raw_bytes >= FILE_BYTES_MAX:
                writer.finish()
                writer = None
        if writer is not None:
            writer.finish()
    except BaseException:
        if writer is not None:
            writer.close()
        remove(files)
        raise
    return Staged(files, records)


class _Pair:
    """A payload file and its index, being written."""

    def __init__(self, stem: Path) -> None:
        self.payload_path, self.index_path = stem.with_name(stem.name + ".payload"), stem.with_name(stem.name + ".idx")
        self._staged = StagedIndex(time.time_ns() // 1_000_000)
        self._payload = open(self.payload_path, "xb")  # noqa: SIM115
        self._index = open(self.index_path, "xb")  # noqa: SIM115
        self._index.seek(INDEX_FIXED_BYTES)

    @property
    def raw_bytes(self) -> int:
        return self._staged.raw_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        records = records_of(batch)
        self._payload.write(records.payload)
        self._index.write(self._staged.add(*records))

    def finish(self) -> None:
        self._index.seek(0)
        self._index.write(self._staged.head())
        self.close()

    def close(self) -> None:
        for file in (self._payload, self._index):
            file.close()


# -- columns


class Records(NamedTuple):
    """Of a batch: payloads one behind the other, and what belongs to each."""

    payload: memoryview
    lengths: memoryview
    ext_ids: memoryview
    flags: memoryview


def records_of(batch: pa.RecordBatch) -> Records:
    ext_ids = column(batch, "ext_id", pa.int64()).cast("B").cast("Q")
    return Records(*payload_of(batch), ext_ids, column(batch, "flags", pa.int32()).cast("B").cast("I"))


def payload_of(batch: pa.RecordBatch) -> tuple[memoryview, memoryview]:
    """Payload bytes as Arrow has them, and the length of each. A column `value` is text: each is a line."""
    if "payload" in batch.schema.names:
        found = batch.column("payload")
    else:
        found = pc.binary_join_element_wise(batch.column("value"), "\n", "")
    if found.null_count:
        raise ValueError("a record is null; filter such rows, or give them a payload")
    found = found.cast(pa.binary())
    lengths = pc.binary_length(found).cast(pa.uint32())
    offsets = found.buffers()[1]
    first, last = (memoryview(offsets).cast("B").cast("i")[found.offset + i] for i in (0, len(found)))
    values = found.buffers()[2]
    data = memoryview(values).cast("B")[first:last] if values is not None else memoryview(b"")
    return data, memoryview(lengths.buffers()[1]).cast("B")[: 4 * len(found)].cast("I")


def column(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> memoryview:
    """A whole-number column, zeros where it is null or not there, in memory of its own."""
    if name not in batch.schema.names:
        return memoryview(bytes(batch.num_rows * kind.bit_width // 8))
    found = pc.fill_null(batch.column(name).cast(kind), 0)
    size = kind.bit_width // 8
    return memoryview(found.buffers()[1]).cast("B")[size * found.offset : size * (found.offset + len(found))]


# -- removing


def remove_job(folder: Path) -> None:
    """The job's folder. A task that still runs makes no file in it any more: it has another name while it goes."""
    gone = folder.with_name(folder.name + ".gone")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove(files: list[tuple[str, str]]) -> None:
    for pair in files:
        for name in pair:
            Path(name).unlink(missing_ok=True)


def sweep(staging: Path) -> None:
    """What attempts that were killed left, a day ago or more."""
    now_s = time.time()
    for path in staging.glob("*/*"):
        try:
            if now_s - path.stat().st_mtime > KEPT_S:
                path.unlink()
        except FileNotFoundError:
            continue
    for folder in staging.iterdir() if staging.is_dir() else ():
        try:
            folder.rmdir()
        except OSError:  # it holds what is not old
            continue
