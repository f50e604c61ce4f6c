"""Rows of one task as Parquet files of an attempt: one a task, or one a value of the columns that partition them.

    part-00003-<attempt>-0.zstd.parquet
    day=2026-11-18/country=__HIVE_DEFAULT_PARTITION__/part-00003-<attempt>-1.zstd.parquet

Names are Hive's, as Spark writes and finds them. A file is written here, then put; of many values at once the one that
waited longest is ended.

Owner: one task. A crash leaves temporary files, and what `inbox/stage.py` says.
"""

from __future__ import annotations

import datetime
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from aof2.engine.inbox.stage import Attempt

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OPEN_MAX: Final = 64
FILE_BYTES_MAX: Final = 512 << 20
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED: Final = frozenset("\"#%'*/:=?\\{[]^\x7f") | frozenset(map(chr, range(32)))


def put_parquet(
    batches: Iterator[pa.RecordBatch],
    schema: StructType,
    attempt: Attempt,
    partition: int,
    partition_by: tuple[str, ...],
) -> None:
    with tempfile.TemporaryDirectory(prefix="aof2-parquet-") as folder:
        files = _Files(Path(folder), attempt, partition)
        for batch in batches:
            for below, part in _split(batch, partition_by):
                if part.num_rows:
                    files.add(below, part)
        if not files.put and partition == 0 and not partition_by:
            files.begin("", _arrow_schema(schema))  # so that the directory can be read
        files.end_all()


def _arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    found: pa.Schema = to_arrow_schema(schema)
    return found


class _Files:
    """Files that are being written, by the directory that they go into."""

    def __init__(self, folder: Path, attempt: Attempt, partition: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._stem = f"part-{partition:05d}-{secrets.token_hex(8)}"
        self._open: dict[str, tuple[Path, pq.ParquetWriter]] = {}
        self.put = 0

    def begin(self, below: str, schema: pa.Schema) -> pq.ParquetWriter:
        while len(self._open) >= OPEN_MAX:
            self._end(next(iter(self._open)))
        path = self._folder / f"{self._stem}-{self.put}.zstd.parquet"
        self.put += 1
        writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._open[below] = (path, writer)
        return writer

    def add(self, below: str, batch: pa.RecordBatch) -> None:
        found = self._open.pop(below, None)
        if found is None:
            writer = self.begin(below, batch.schema)
        else:
            self._open[below] = found  # the last that is ended
            writer = found[1]
        writer.write_batch(batch)
        if self._open[below][0].stat().st_size >= FILE_BYTES_MAX:
            self._end(below)

    def _end(self, below: str) -> None:
        path, writer = self._open.pop(below)
        writer.close()
        self._attempt.put_file(f"{below}{path.name}", path)
        path.unlink()

    def end_all(self) -> None:
        for below in list(self._open):
            self._end(below)


# -- partitions


def _split(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Rows by the directory that they go into, without the columns that are its name."""
    if not columns:
        yield "", batch
        return
    rows: dict[tuple[Any, ...], list[int]] = {}
    values = [batch.column(name).to_pylist() for name in columns]
    for index, value in enumerate(zip(*values, strict=True)):
        rows.setdefault(value, []).append(index)
    rest = batch.select([name for name in batch.schema.names if name not in columns])
    for value, indices in rows.items():
        below = "".join(f"{escaped(name)}={escaped(written(one))}/" for name, one in zip(columns, value, strict=True))
        yield below, rest.take(pa.array(indices, pa.int64()))


def written(value: Any) -> str:
    """As Spark writes it into a directory's name."""
    if value is None or value == "":
        return NO_VALUE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, datetime.datetime):
        whole = value.strftime("%Y-%m-%d %H:%M:%S")
        return f"{whole}.{value.microsecond:06d}".rstrip("0") if value.microsecond else whole
    return str(value)


def escaped(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)
