"""Sets that do not fit in memory, in a scratch LMDB: references by content, and the keys the remote should hold.

Owner: the calling thread writes, between threads only reads. Lives in verify's temporary folder; a crash leaves that.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb
import msgspec

from aof2.engine.catalog.lmdb_errors import explained
from aof2.engine.catalog.store import MAP_BYTES
from aof2.engine.catalog.tables import STREAM
from aof2.engine.remote.location import Location


class Refs(NamedTuple):
    """How many chunks have this content in the remote, and one of them that is whole on this disk (0: none)."""

    refs: int = 0
    resident_chunk: int = 0


class Expected(NamedTuple):
    """A key the rows or the log name. `must`: the object has to be there; pending ones may or may not be."""

    key: str
    stream_id: int
    sha256: bytes
    location: Location | None  # of the blob in it; None: any size is right
    must: bool
    seen: bool


_refs: Final = msgspec.msgpack.Decoder(Refs)
_expected: Final = msgspec.msgpack.Decoder(Expected)


class Index:
    """Two tables. Writes are batched: call `with index.writing():` around many."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        with explained(folder):
            self._env: Any = lmdb.open(str(folder), map_size=MAP_BYTES, max_dbs=2, sync=False, metasync=False)
            self._refs = self._env.open_db(b"refs")
            self._keys = self._env.open_db(b"keys")

    @contextlib.contextmanager
    def _writing(self, db: Any) -> Iterator[Any]:
        with explained(self._folder), self._env.begin(write=True, db=db) as txn:
            yield txn

    def add_refs(self, stream_id: int, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Counts (content hash, chunk id or 0 when it is not whole here)."""
        with self._writing(self._refs) as txn:
            for sha256, resident in chunks:
                key = STREAM.pack(stream_id) + sha256
                data = txn.get(key)
                old = _refs.decode(data) if data else Refs()
                txn.put(key, msgspec.msgpack.encode(Refs(old.refs + 1, old.resident_chunk or resident)))

    def refs(self, stream_id: int, sha256: bytes) -> Refs:
        with self._env.begin(db=self._refs) as txn:
            data = txn.get(STREAM.pack(stream_id) + sha256)
        return _refs.decode(data) if data else Refs()

    def expect(self, keys: Iterable[Expected]) -> None:
        """A key expected twice must be there if either says so."""
        with self._writing(self._keys) as txn:
            for one in keys:
                slot = _slot(one.key)
                data = txn.get(slot)
                if data is None or (one.must and not _expected.decode(data).must):
                    txn.put(slot, msgspec.msgpack.encode(one))

    def meet(self, listed: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, Expected | None]]:
        """Marks listed keys as seen; each with what was expected of it, None for nothing."""
        with self._writing(self._keys) as txn:
            for key, info in listed:
                data = txn.get(_slot(key))
                if data is None:
                    yield info, None
                    continue
                expected = _expected.decode(data)
                txn.put(_slot(key), msgspec.msgpack.encode(expected._replace(seen=True)))
                yield info, expected

    def unseen(self) -> Iterator[Expected]:
        with self._env.begin(db=self._keys) as txn:
            for _, data in txn.cursor():
                expected = _expected.decode(data)
                if expected.must and not expected.seen:
                    yield expected

    def close(self) -> None:
        self._env.close()


def _slot(key: str) -> bytes:
    # LMDB's keys end at 511 bytes, the remote's at 900.
    return hashlib.sha256(key.encode()).digest()
