"""A directory that appears by one step: made and checked in a hidden workspace, then renamed into place.

    <workspace>/plan.json            what is being made, and of what: written before anything else
    <workspace>/new-…/               what Spark writes, each run into one of its own: tasks of a run that was killed may
                                     go on for a moment
    <workspace>/data/…               the same when it was checked; in it
    <workspace>/data/_aof2.json      the marker, which goes into place with the data

Names that begin with `_` are hidden from Spark. One run at a time has a workspace: it holds a lock on the directory,
which the kernel takes away from a process that ends.

Invariants
- A directory with a marker is whole, was reconciled, and was synced before the marker was written.
- What is in place was put there by one rename; `exchange` puts what was there before into `data`.

Owner: the driver. Crash: a workspace. Without a marker its data is made anew; with one it is put into place by the next
run, if that is the same job.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from aof2.engine.env import Env
from aof2.engine.spark.pipelines.seam import PipelineError

PLAN: Final = "plan.json"
DATA: Final = "data"
MARKER: Final = "_aof2.json"
CRASH_POINTS: Final = (
    "pipeline.planned",
    "pipeline.written",
    "pipeline.checked",
    "pipeline.published",
)
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100
_libc: Final = ctypes.CDLL(None, use_errno=True)


def beside(target: Path) -> Path:
    """The workspace of a directory that is not there yet. Spark sees names with `=` in them, hidden or not."""
    return target.with_name(f"_{target.name.replace('=', '-')}.aof2")


def marker_of(folder: Path) -> dict[str, Any] | None:
    """What a pipeline noted of a directory; None where it made none, or not all of it."""
    return _json(folder / MARKER)


class Workspace:
    """Held by `opened` from the first look to the end."""

    def __init__(self, folder: Path, env: Env) -> None:
        self.folder = folder
        self.data = folder / DATA
        self.new = folder / f"new-{uuid.uuid4().hex}"
        self._env = env

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, env: Env) -> Iterator[Workspace]:
        """PipelineError where another run has it. It goes again if nothing was put in it."""
        fd = _locked(folder)
        try:
            yield cls(folder, env)
        finally:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
            os.close(fd)

    def plan(self) -> dict[str, Any] | None:
        """What a run before this one set out to make."""
        return _json(self.folder / PLAN)

    def begin(self, plan: dict[str, Any]) -> None:
        """Nothing of another plan is left; `new` is free."""
        for path in self.folder.iterdir():
            if path.is_dir():
                _remove(path)
        self._env.replace_file(self.folder / PLAN, _text(plan))
        self._env.failpoint("pipeline.planned")

    def checked(self) -> dict[str, Any] | None:
        """The marker, where all is ready to be put into place."""
        return marker_of(self.data)

    def check(self, marker: dict[str, Any]) -> None:
        """All of it is what it should be: synced, then noted."""
        self._env.failpoint("pipeline.written")
        self._sync()
        self._env.replace_file(self.new / MARKER, _text(marker), mode=0o644)
        self._env.files.rename(self.new, self.data)
        self._env.files.fsync_dir(self.folder)
        self._env.failpoint("pipeline.checked")

    def publish(self, target: Path) -> None:
        """Data has the name `target`, which was free."""
        try:
            _rename(self.data, target, _RENAME_NOREPLACE)
        except FileExistsError:
            raise PipelineError(f"{target}: it is there already; name another, or move it away") from None
        self._published(target)

    def exchange(self, target: Path) -> None:
        """Data has the name `target`, its owner and its mode; what had it is data."""
        had = target.stat()
        self.data.chmod(stat.S_IMODE(had.st_mode))
        with contextlib.suppress(PermissionError):
            os.chown(self.data, had.st_uid, had.st_gid)
        _rename(self.data, target, _RENAME_EXCHANGE)
        self._published(target)

    def _published(self, target: Path) -> None:
        self._env.files.fsync_dir(target.parent)
        self._env.failpoint("pipeline.published")

    def end(self) -> None:
        """The workspace goes, with all that is in it."""
        _remove(self.folder)

    def _sync(self) -> None:
        for folder, _, names in os.walk(self.new, topdown=False):
            for name in names:
                with self._env.files.closing(self._env.files.open_ro(Path(folder, name))) as fd:
                    self._env.files.fsync(fd)
            self._env.files.fsync_dir(Path(folder))


def _locked(folder: Path) -> int:
    """The lock is on the directory that has the name now: a run that ends takes its workspace away."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), folder.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise PipelineError(f"{folder}: another run is at work there; wait until it has ended") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _rename(old: Path, new: Path, flags: int) -> None:
    if _libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags):
        code = ctypes.get_errno()
        if code == errno.EXDEV:
            raise PipelineError(f"{new}: its workspace {old.parent} is on another disk")
        raise OSError(code, os.strerror(code), str(new))


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise PipelineError(f"{path}: not what a pipeline writes; move it away") from None
    return found if isinstance(found, dict) else None


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"
