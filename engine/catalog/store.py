"""The LMDB environment: open it, read it, know whether it may be trusted.

LMDB is opened without sync: it is only an index of the logs. Its files are right after a clean stop and after the end
of the process (the page cache has everything), and not to be trusted after anything else. `trust.json` beside them
says which boot wrote them and whether they were closed cleanly; it is read before LMDB is opened, because a torn LMDB
file can take the process down.

Invariants
- One process opens the environment, once, and never across fork. The state folder's lock sees to that.
- Read transactions are short: no reader awaits, sleeps or does I/O inside `view()`.
- `clean` is durable only after LMDB itself is, and is withdrawn, durably, before the first write.

Owner: opened by recovery; write transactions belong to the writer thread, read transactions to the thread that reads.
A crash leaves rows that a replay from their recorded positions completes, or files that are thrown away and rebuilt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import msgspec

from aof2.engine.catalog.lmdb_errors import explained, translated
from aof2.engine.catalog.tables import DATABASES, POSITION_PREFIX, STREAM, Table
from aof2.engine.env import Env
from aof2.engine.fds import opened
from aof2.engine.local.reserve import is_no_room
from aof2.engine.manifest.format import LogPosition

R = TypeVar("R")
K = TypeVar("K")

TRUST_NAME: Final = "trust.json"
FORMAT_VERSION: Final = 1
# Address space, not memory or disk: the file grows with the rows.
MAP_BYTES: Final = 1 << 40
# What the data file has on the disk ahead of its end; and what a group may begin with when no more is to be had.
AHEAD_BYTES: Final = 4 << 20
AHEAD_MIN_BYTES: Final = 512 << 10
LOCK_FILE_BYTES: Final = 36 << 10  # at least what LMDB's is long, with places for 512 readers
CRASH_POINTS: Final = ("catalog.trust.withdrawn", "catalog.trust.synced")


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    clean: bool
    format_version: int = FORMAT_VERSION


def current_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class View:
    """A consistent picture of the rows: one read transaction, which ends with the `with` block it is in."""

    __slots__ = ("_dbs", "_txn")

    def __init__(self, txn: Any, dbs: Mapping[str, Any]) -> None:
        self._txn = txn
        self._dbs = dbs

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._txn.abort()

    def get(self, stream_id: int, table: Table[K, R], key: K) -> R | None:
        packed = STREAM.pack(stream_id) + table.tag + table.pack_key(key)
        data = self._txn.get(packed, db=self._dbs[table.database])
        return None if data is None else table.decode(data)

    def raw(self, database: str, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(key, db=self._dbs[database])
        return value

    def raw_many(self, database: str, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of the keys that are there."""
        with self._txn.cursor(db=self._dbs[database]) as cursor:
            return dict(cursor.getmulti(keys))

    def get_many(self, stream_id: int, table: Table[K, R], keys: Iterable[K]) -> list[R | None]:
        """`get` of each."""
        lead = STREAM.pack(stream_id) + table.tag
        packed = [lead + table.pack_key(key) for key in keys]
        found, decode = self.raw_many(table.database, packed), table.decode
        return [None if (data := found.get(name)) is None else decode(data) for name in packed]

    def scan(
        self, stream_id: int, table: Table[K, R], *, prefix: bytes = b"", after: bytes | None = None
    ) -> Iterator[tuple[K, R]]:
        """Rows in key order. `prefix` narrows by packed key; `after` resumes behind a packed key."""
        lead = STREAM.pack(stream_id) + table.tag
        start = lead + (prefix if after is None else after)
        for key, value in self.raw_scan(table.database, lead + prefix, start):
            if after is not None and key == start:
                continue
            yield table.unpack_key(key[len(lead) :]), table.decode(value)

    def raw_scan(self, database: str, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor(db=self._dbs[database]) as cursor:
            if not cursor.set_range(start or prefix):
                return
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield key, value

    def position(self, stream_id: int) -> LogPosition | None:
        """How far into the stream's log these rows are."""
        data = self.raw("meta", POSITION_PREFIX + STREAM.pack(stream_id))
        return None if data is None else LogPosition(*msgspec.msgpack.decode(data, type=tuple[int, int, int]))

    def streams(self) -> list[int]:
        keys = (key for key, _ in self.raw_scan("meta", POSITION_PREFIX))
        return [int(STREAM.unpack(key[len(POSITION_PREFIX) :])[0]) for key in keys]


class Catalog:
    """The open environment. `view` to read; only the writer thread calls `begin_write`."""

    def __init__(self, env: Env, directory: Path, lmdb_env: lmdb.Environment) -> None:
        self.directory = directory
        self._env = env
        self._lmdb = lmdb_env
        self._dbs = {name: lmdb_env.open_db(name.encode()) for name in DATABASES}
        self._page_bytes = lmdb_env.stat()["psize"]
        self._held_to = 0  # the data file has its blocks up to here

    @classmethod
    def open(cls, env: Env, directory: Path, *, map_bytes: int = MAP_BYTES) -> Catalog:
        """Opens or creates it, and withdraws the trust in it until `close`."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _hold_lock_file(env, directory)
        with explained(directory):
            lmdb_env = lmdb.open(
                str(directory),
                map_size=map_bytes,
                max_dbs=len(DATABASES),
                sync=False,
                metasync=False,
                mode=0o600,
                max_readers=512,
            )
        try:
            with explained(directory):
                lmdb_env.reader_check()  # places of a channel that was killed
                catalog = cls(env, directory, lmdb_env)
            catalog.take_room_ahead()
            catalog._write_trust(clean=False)
        except BaseException:
            lmdb_env.close()
            raise
        env.failpoint("catalog.trust.withdrawn")
        return catalog

    def take_room_ahead(self) -> None:
        """The data file has its next AHEAD_BYTES on the disk already, so that a commit does not meet a full one. ENOSPC
        when not even what one group takes is left; nothing has happened then. By the writer thread, between groups."""
        end = (self._lmdb.info()["last_pgno"] + 1) * self._page_bytes
        if self._held_to - end >= AHEAD_BYTES // 2:
            return
        fd = os.open(self.directory / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._env.essential(partial(self._env.files.allocate_ahead, fd, end, AHEAD_BYTES))
            self._held_to = end + AHEAD_BYTES
        except OSError as e:
            if not is_no_room(e) or self._held_to - end < AHEAD_MIN_BYTES:
                raise OSError(e.errno, e.strerror, str(self.directory)) from e
        finally:
            os.close(fd)

    def view(self) -> View:
        """For a `with` block. A class and not a generator: every look-up of a name takes one."""
        try:
            return View(self._lmdb.begin(buffers=False), self._dbs)
        except lmdb.Error as e:
            raise translated(e, self.directory) from e

    def get(self, stream_id: int, table: Table[K, R], key: K) -> R | None:
        """One row, in a view of its own."""
        with self.view() as view:
            return view.get(stream_id, table, key)

    def begin_write(self) -> Any:
        with explained(self.directory):
            return self._lmdb.begin(write=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Any]:
        """A write transaction, committed at the end of the block; for recovery. The writer has its own way."""
        self.take_room_ahead()
        with explained(self.directory), self._lmdb.begin(write=True) as txn:
            yield txn

    def db(self, name: str) -> Any:
        return self._dbs[name]

    def view_of(self, txn: Any) -> View:
        return View(txn, self._dbs)

    def sync(self) -> None:
        """LMDB's own files are durable when this returns; done at snapshots and at the end."""
        with explained(self.directory):
            self._lmdb.sync(True)

    def close(self) -> None:
        """A clean stop: the next open needs no replay beyond the recorded positions."""
        try:
            self.sync()
            self._env.failpoint("catalog.trust.synced")
            self._write_trust(clean=True)
        finally:
            self._lmdb.close()

    def abandon(self) -> None:
        """Lets go without a clean mark: after a failure, or when a test ends the process."""
        self._lmdb.close()

    def nearly_full(self) -> bool:
        """Whether a group might not fit any more. The margin is wide: LMDB needs pages to commit, too."""
        info = self._lmdb.info()
        used = (info["last_pgno"] + 1) * self._page_bytes
        return bool(used * 8 > info["map_size"] * 7)

    def _write_trust(self, *, clean: bool) -> None:
        trust = Trust(boot_id=current_boot_id(), clean=clean)
        self._env.replace_file(self.directory / TRUST_NAME, msgspec.json.encode(trust))


def _trust(directory: Path) -> Trust:
    try:
        return msgspec.json.decode((directory / TRUST_NAME).read_bytes(), type=Trust)
    except (FileNotFoundError, msgspec.DecodeError):
        return Trust(boot_id="", clean=False)


def _hold_lock_file(env: Env, directory: Path) -> None:
    """LMDB maps its lock file and writes to it: on a full disk a page that is a hole would be SIGBUS. Before LMDB opens
    it: closing a descriptor of it takes the locks away by which the channel's LMDB sees that this process is there."""
    with opened(directory / "lock.mdb", os.O_RDWR | os.O_CREAT, 0o600) as fd:
        env.essential(partial(env.files.allocate_ahead, fd, 0, LOCK_FILE_BYTES))


def trusted(directory: Path) -> bool:
    """Whether the rows on disk may be used: closed cleanly, or written under this boot."""
    trust = _trust(directory)
    return trust.format_version == FORMAT_VERSION and (trust.clean or trust.boot_id == current_boot_id())


def closed_cleanly(directory: Path) -> bool:
    """Whether the last to have the rows open closed them: nothing was logged after what they hold."""
    return _trust(directory).clean


def discard(directory: Path) -> None:
    """Throws the rows away; the logs are the truth."""
    if directory.exists():
        shutil.rmtree(directory)
    os.makedirs(directory, mode=0o700)  # noqa: PTH103
