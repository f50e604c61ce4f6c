"""Files of a directory remote: opening below the root, the notes beside objects, listing in S3's order, errors.

Invariants: those of directory.py.

Owner: plain functions. A crash in `write_note` leaves the old note or the new, or `…json.tmp`, which is replaced.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.remote.errors import RemoteAuthError, RemoteRefusedError, RemoteUnavailableError
from aof2.engine.remote.keys import RESERVED_PREFIX

META_FOLDER: Final = f"{RESERVED_PREFIX}meta"
TEMP_PREFIX: Final = f"{RESERVED_PREFIX}tmp-"

_AUTH_ERRNOS: Final = (errno.EACCES, errno.EPERM)
_REFUSED_ERRNOS: Final = (errno.ENAMETOOLONG, errno.EFBIG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


_temps = itertools.count()


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of the object that has this size and mtime."""

    size: int
    mtime_ns: int
    crc64: int
    metadata: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def bare(cls, found: os.stat_result, crc64: int) -> Note:
        return cls(size=found.st_size, mtime_ns=found.st_mtime_ns, crc64=crc64)


def translate(error: OSError, what: str) -> Aof2Error:
    """What the caller has to do about an errno."""
    said = f"{what}: {error.strerror or type(error).__name__}"
    if error.errno in _AUTH_ERRNOS:
        return RemoteAuthError(f"{said}: the folder's owner or mode keeps this user out")
    if error.errno in _REFUSED_ERRNOS:
        return RemoteRefusedError(said)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RemoteUnavailableError(f"{said}: make room on the remote's disk", retryable=False)
    if error.errno == errno.EROFS:
        return RemoteUnavailableError(f"{said}: the remote's disk is mounted read-only", retryable=False)
    return RemoteUnavailableError(said, retryable=error.errno != errno.ENOENT)


def open_object(root: Path, key: str) -> int | None:
    """A descriptor of a regular file, or None. No part of the way may be a symbolic link."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    *folders, name = key.split("/")
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            for folder in folders:
                below = os.open(folder, os.O_PATH | os.O_DIRECTORY | flags, dir_fd=at)
                os.close(at)
                at = below
            # O_NONBLOCK: a fifo that another process put there must not hold us up.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=at)
        except (FileNotFoundError, NotADirectoryError):
            return None
    finally:
        os.close(at)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def make_folders(env: Env, root: Path, folder: Path) -> None:
    """Makes what is missing between the root and `folder`, durably; never the root itself, never through a link."""
    path = root
    for part in folder.relative_to(root).parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            _make_folder(env, path)
        else:
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, "a file or a link is where a folder must be")


def _make_folder(env: Env, path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
        env.files.fsync_dir(path.parent)
    except FileNotFoundError:
        return  # pruned under our feet: create_temp comes back


def create_temp(env: Env, root: Path, folder: Path) -> tuple[Path, int]:
    """A new file in `folder`, which is made if need be, again if a delete prunes it meanwhile."""
    for attempt in range(10):
        make_folders(env, root, folder)
        temp = folder / f"{TEMP_PREFIX}{os.getpid()}-{next(_temps)}-{env.rng.getrandbits(64):016x}"
        try:
            return temp, env.files.create(temp, 0o644)
        except FileNotFoundError:
            if attempt == 9:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def prune_folders(root: Path, folder: Path) -> None:
    """Removes folders that became empty. One with a put under way is not: its temp is there."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def note_path(root: Path, key: str) -> Path:
    return root / META_FOLDER / f"{key}.json"


def read_note(root: Path, key: str, found: os.stat_result) -> Note | None:
    """The note about exactly this object, or None."""
    try:
        note = msgspec.json.decode(note_path(root, key).read_bytes(), type=Note)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
    return note if (note.size, note.mtime_ns) == (found.st_size, found.st_mtime_ns) else None


def write_note(env: Env, root: Path, key: str, note: Note) -> None:
    path = note_path(root, key)
    temp, fd = create_temp(env, root, path.parent)
    try:
        env.files.pwrite(fd, msgspec.json.encode(note), 0)
        env.failpoint("remote.dir.note.temp")
        env.files.fsync(fd)
    finally:
        env.files.close(fd)
    env.failpoint("remote.dir.note.synced")
    env.files.rename(temp, path)
    env.failpoint("remote.dir.note.renamed")
    env.files.fsync_dir(path.parent)


def walk(root: Path, prefix: str, base: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Objects below the root in byte order of their keys. Subtrees that cannot hold any are not read."""
    try:
        with os.scandir(root / base) as entries:
            names = [
                (f"{base}{entry.name}{'/' if entry.is_dir(follow_symlinks=False) else ''}", entry)
                for entry in entries
                if not entry.name.startswith(RESERVED_PREFIX)
            ]
    except FileNotFoundError:
        if not base:
            raise
        return
    for key, entry in sorted(names, key=lambda pair: os.fsencode(pair[0])):
        if key.endswith("/"):
            if key.startswith(prefix) or prefix.startswith(key):
                yield from walk(root, prefix, key)
        elif key.startswith(prefix):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield key, found
