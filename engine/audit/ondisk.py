"""The state of an audit log in a scratch file, for the upload task, which keeps it while the volume runs: a row a file,
and there may be millions of them.

LMDB without sync or lock: its pages are the kernel's, which takes them back when memory is short. The file is made anew
by each replay and goes with `close`; nothing in it is ever trusted. Not a writable map: on a full disk that is SIGBUS.

Invariants
- The same answers as `VisibleState`, in the same order.
- At most COMMIT_OPS changes are uncommitted: their pages are this process's memory.
- What LMDB cannot do is an OSError: the disk is full, or the file is gone.

Owner: one thread at a time. A crash leaves a folder that the next one replaces.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb

from aof2.engine.audit.format import ArtifactRef, encode_ref
from aof2.engine.audit.state import VisibleState, decode_key
from aof2.engine.catalog.lmdb_errors import explained, translated

MAP_BYTES: Final = 1 << 40  # address space; the file grows with what is in it
COMMIT_OPS: Final = 8_000
SCAN_ROWS: Final = 4096
_OBJECT: Final = struct.Struct(">QQ")
_REFS, _LIVE = bytes([4]), bytes([5])  # tables beside those of the state


class DiskState(VisibleState):
    """Also remembers which artifact an object is (`refs`): a deletion names a row, not its content."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        with explained(directory):
            self._lmdb: Any = lmdb.open(
                str(directory), map_size=MAP_BYTES, sync=False, metasync=False, lock=False, mode=0o600
            )
            self._txn: Any = self._lmdb.begin(write=True)
        self._ops = 0

    def close(self) -> None:
        """Harmless when called again."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
            self._lmdb.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    # -- rows --------------------------------------------------------------------------------------------------

    def _get(self, table: bytes, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(table + key)
        return value

    def _put(self, table: bytes, key: bytes, value: bytes | None) -> None:
        try:
            if value is None:
                self._txn.delete(table + key)
            else:
                self._txn.put(table + key, value)
            self._ops += 1
            if self._ops >= COMMIT_OPS:
                self._txn.commit()
                self._txn = self._lmdb.begin(write=True)
                self._ops = 0
        except lmdb.Error as e:
            raise translated(e, self._directory) from e

    def _keys(self, table: bytes) -> Iterator[bytes]:
        # Some at a time: a row may change between two of them.
        after = table
        while rows := list(islice(self._from(after), SCAN_ROWS)):
            for key in rows:
                if key[:1] != table:
                    return
                yield key[1:]
            after = rows[-1] + b"\0"

    def _from(self, start: bytes) -> Iterator[bytes]:
        with self._txn.cursor() as cursor:
            if cursor.set_range(start):
                yield from cursor.iternext(keys=True, values=False)

    # -- objects -----------------------------------------------------------------------------------------------

    def remember(self, key: tuple[int, int], ref: ArtifactRef) -> None:
        self._put(_REFS, _OBJECT.pack(*key), encode_ref(ref))

    def take(self, key: tuple[int, int]) -> ArtifactRef | None:
        """What the object was, once."""
        packed = _OBJECT.pack(*key)
        ref = self._get(_REFS, packed)
        if ref is not None:
            self._put(_REFS, packed, None)
        return None if ref is None else decode_key(ref)

    def without(self, live: Iterable[ArtifactRef]) -> Iterator[ArtifactRef]:
        """What is published and not among these, in root order."""
        for ref in live:
            self._put(_LIVE, encode_ref(ref), b"")
        for key in self.published():
            if self._get(_LIVE, key) is None:
                yield decode_key(key)
        for key in self._keys(_LIVE):
            self._put(_LIVE, key, None)
