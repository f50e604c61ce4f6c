"""A volume's rows without its lock: the LMDB files read-only where they may be trusted, else rebuilt from the logs.

Invariants
- Nothing below state_dir is written (LMDB's reader table aside, which every reader takes a slot in).
- LMDB is looked at only when `trusted` says so: a torn file can take the process down.
- This process has not opened the same environment already: inside the daemon use its own catalog.

Owner: the calling thread. A crash leaves a temporary folder at most.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.lmdb_errors import explained
from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.catalog.store import Catalog, View, trusted
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.fds import opened
from aof2.engine.follow.ownlog import replay_here
from aof2.engine.manifest.format import ManifestIntegrityError

VOLUME_STREAM: Final = 0
CATALOG_DIR: Final = "catalog"
MANIFEST_DIR: Final = "manifest"
# What LMDB says when it may not write its reader table: a disk mounted read-only, or another user's files.
_NO_LOCK: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


class NoVolumeError(Aof2Error):
    """There is no volume in this folder. Check state_dir in the conf, or mount it once."""


class ReadOnlyCatalog:
    """LMDB opened for reading only; another process may be writing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with explained(directory):
            self._lmdb = _open(directory)
            self._dbs = {name: self._lmdb.open_db(name.encode(), create=False) for name in t.DATABASES}

    @contextlib.contextmanager
    def view(self) -> Iterator[View]:
        with explained(self._directory), self._lmdb.begin(buffers=False) as txn:
            yield View(txn, self._dbs)

    def close(self) -> None:
        self._lmdb.close()


def _open(directory: Path) -> lmdb.Environment:
    def attempt(*, lock: bool) -> lmdb.Environment:
        return lmdb.open(
            str(directory), readonly=True, create=False, lock=lock, max_dbs=len(t.DATABASES), max_readers=512
        )

    try:
        return attempt(lock=True)
    except (lmdb.ReadonlyError, PermissionError):
        return attempt(lock=False)
    except lmdb.Error as e:
        if not any(os.strerror(code) in str(e) for code in _NO_LOCK):
            raise
        return attempt(lock=False)


def check_state_dir(state_dir: Path) -> Path:
    """`state_dir`, or NoVolumeError."""
    if not (state_dir / MANIFEST_DIR / str(VOLUME_STREAM)).is_dir():
        raise NoVolumeError(f"{state_dir}: no volume here; check volume.state_dir in the conf, or mount it first")
    return state_dir


def is_live(state_dir: Path) -> bool:
    """Whether a process has the volume open. Takes no lock that outlives the call."""
    with opened(state_dir, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class OpenRows(NamedTuple):
    """Rows to look at, and what they are: `rebuilt` from the logs; `damaged` streams that could not be."""

    view: Callable[[], contextlib.AbstractContextManager[View]]
    rebuilt: bool
    damaged: dict[int, str]


@contextlib.contextmanager
def open_rows(state_dir: Path) -> Iterator[OpenRows]:
    """The volume's rows as they are now, for reading."""
    check_state_dir(state_dir)
    if trusted(state_dir / CATALOG_DIR):
        try:
            catalog = ReadOnlyCatalog(state_dir / CATALOG_DIR)
        except CorruptError:
            pass
        else:
            try:
                yield OpenRows(catalog.view, rebuilt=False, damaged={})
            finally:
                catalog.close()
            return
    with temporary_catalog() as rebuilt:
        damaged: dict[int, str] = {}
        for stream_id in stream_ids(state_dir / MANIFEST_DIR):
            try:
                replay_here(Env(), rebuilt, state_dir, stream_id)
            except ManifestIntegrityError as e:
                damaged[stream_id] = str(e)
        yield OpenRows(rebuilt.view, rebuilt=True, damaged=damaged)


@contextlib.contextmanager
def temporary_catalog() -> Iterator[Catalog]:
    """An empty catalog in a folder that goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="aof2-rows-") as folder:
        catalog = Catalog.open(Env(), Path(folder) / CATALOG_DIR)
        try:
            yield catalog
        finally:
            catalog.abandon()


def tenant_names(view: View) -> dict[int, str]:
    return {tenant_id: row.name for tenant_id, row in view.scan(VOLUME_STREAM, t.TENANTS)}
