"""Looks at a live or stopped volume's LMDB files in a process of its own.

LMDB has no checksums: a damaged page can end the process that reads it. So verify never opens the volume's catalog
itself; it starts this, speaks to it in lines, and takes a dead child for a damaged catalog.

    →  {"positions": {stream: [chunk, offset, ordinal]}}      at once: where the rows are; one read transaction is held
    ←  compare FOLDER                                         rows of the catalog in FOLDER, which are right
    →  {"differences": [{"table": …, "stream": …, "key": …, "what": …}, …], "done": how many}
    ←  salvage STREAM FOLDER                                  puts the stream's rows into FOLDER, in place of others
    →  {"done": rows}

Owner: its own process; read-only on the volume. Holding a transaction costs a running daemon pages, no time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import MAP_BYTES, View
from aof2.engine.errors import CorruptError
from aof2.engine.follow.ownlog import POSITION_PREFIX as OWN_POSITION_PREFIX
from aof2.engine.inspect.rows import ReadOnlyCatalog

DIFFERENCES_MAX: Final = 100
EXIT_UNREADABLE: Final = 3


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is not as the log has it. `what`: missing, extra or differs."""

    stream: int
    table: str
    key: str
    what: str


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line from the child."""

    positions: dict[int, tuple[int, int, int]] | None = None
    differences: list[Difference] = []
    done: int = 0


_TABLES: Final = {(table.database, table.tag): table.name for table in vars(t).values() if isinstance(table, t.Table)}


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _pairs(view: View, database: str) -> Iterator[tuple[bytes, bytes]]:
    for key, value in view.raw_scan(database, b""):
        if not key.startswith((t.POSITION_PREFIX, OWN_POSITION_PREFIX)):
            yield key, value


def differences(ours: View, right: View) -> Iterator[Difference]:
    """Rows of `ours` that are not those of `right`, both walked once, in order of keys."""
    for database in t.DATABASES:
        a, b = _pairs(ours, database), _pairs(right, database)
        x, y = next(a, None), next(b, None)
        while x is not None or y is not None:
            if y is None or (x is not None and x[0] < y[0]):
                yield _difference(database, x[0] if x else b"", "extra")
                x = next(a, None)
            elif x is None or y[0] < x[0]:
                yield _difference(database, y[0], "missing")
                y = next(b, None)
            else:
                if x[1] != y[1]:
                    yield _difference(database, x[0], "differs")
                x, y = next(a, None), next(b, None)


def _difference(database: str, key: bytes, what: str) -> Difference:
    stream = int(t.STREAM.unpack(key[:4])[0]) if len(key) >= 4 else 0
    table = _TABLES.get((database, key[4:5]), key[4:5].decode(errors="replace"))
    return Difference(stream=stream, table=table, key=key[5:].hex(), what=what)


def _compare(view: View, folder: Path) -> None:
    with ReadOnlyCatalog(folder).view() as right:
        found = differences(view, right)
        first = list(islice(found, DIFFERENCES_MAX))
        _say(Answer(differences=first, done=len(first) + sum(1 for _ in found)))


def _salvage(view: View, stream_id: int, folder: Path) -> None:
    target: Any = lmdb.open(str(folder), map_size=MAP_BYTES, max_dbs=len(t.DATABASES), sync=False, create=False)
    dbs = {name: target.open_db(name.encode(), create=False) for name in t.DATABASES}
    prefix = t.STREAM.pack(stream_id)
    count = 0
    with target.begin(write=True) as txn:
        for database, db in dbs.items():
            partial = [key for key, _ in View(txn, dbs).raw_scan(database, prefix)]
            for key in partial:
                txn.delete(key, db=db)
            for key, value in view.raw_scan(database, prefix):
                txn.put(key, value, db=db)
                count += 1
    target.close()
    _say(Answer(done=count))


def main(directory: str) -> int:
    try:
        catalog = ReadOnlyCatalog(Path(directory))
        with catalog.view() as view:
            streams = {stream_id: view.position(stream_id) for stream_id in view.streams()}
            _say(Answer(positions={s: (p[0], p[1], p[2]) for s, p in streams.items() if p}))
            for line in sys.stdin:
                match line.rstrip("\n").split(" ", 2):
                    case ["compare", folder]:
                        _compare(view, Path(folder))
                    case ["salvage", stream_id, folder]:
                        _salvage(view, int(stream_id), Path(folder))
    except (CorruptError, lmdb.Error, msgspec.MsgspecError, OSError) as e:
        sys.stderr.write(f"{e}\n")
        return EXIT_UNREADABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
