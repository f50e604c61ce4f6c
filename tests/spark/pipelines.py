"""What tests of the pipelines share: an end at a named instruction, and rows to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aof2.engine.env import Env


class Ended(BaseException):
    """The process ended there, as far as what is on the disk goes."""


class EndingEnv(Env):
    """Ends a run at the nth time that a point is passed."""

    def __init__(self, point: str, nth: int = 1) -> None:
        super().__init__()
        self._ends_at = point
        self._left = nth

    def failpoint(self, name: str) -> None:
        if name == self._ends_at:
            self._left -= 1
            if self._left == 0:
                raise Ended(name)


def json_files(folder: Path, files: int, rows: int) -> list[dict[str, Any]]:
    """Files of JSON lines; all of their rows."""
    folder.mkdir(exist_ok=True)
    found = []
    for number in range(files):
        some = [{"n": number * rows + i, "kind": i % 3, "text": "x" * (i % 50)} for i in range(rows)]
        (folder / f"{number}.json").write_text("".join(json.dumps(row) + "\n" for row in some))
        found += some
    return found


def small_files(folder: Path, files: int, rows: int, *, first: int = 0, where: str = "") -> list[int]:
    """Files of Parquet with a column `n`; its values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / where).mkdir(parents=True, exist_ok=True)
    for number in range(files):
        start = first + number * rows
        table = pa.table({"n": pa.array(range(start, start + rows)), "text": ["t" * (i % 9) for i in range(rows)]})
        pq.write_table(table, folder / where / f"small-{start}.parquet")
    return list(range(first, first + files * rows))


def numbers(spark: Any, folder: Path) -> list[int]:
    return sorted(row.n for row in spark.read.parquet(str(folder)).select("n").collect())


def until_ended(attempt: Callable[[Env], Any], point: str) -> None:
    """A run that is ended there."""
    try:
        attempt(EndingEnv(point))
    except Ended:
        return
    raise AssertionError(f"{point} was not passed")
