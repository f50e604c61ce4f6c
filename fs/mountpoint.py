"""A mountpoint, looked at from outside: what is mounted there, whether it answers, and how to take it away.

Nothing here touches a mount whose daemon may be gone without a deadline: such a stat can wait for ever.

Owner: the calling process; stateless. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.errors import Aof2Error

FSTYPE: Final = "fuse.aof2"
STAT_MAX_S: Final = 5.0
MOUNTINFO: Final = Path("/proc/self/mountinfo")
HOLDERS_MAX: Final = 3
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


class MountError(Aof2Error):
    """The mountpoint cannot be used, or not be let go of, as things are. The message says what to do."""


class BusyError(MountError):
    """The mount is in use. It is as it was; the message names the processes seen to use it."""


class MountEntry(NamedTuple):
    """A line of mountinfo."""

    device: str
    mountpoint: Path
    fstype: str
    source: str


# What calls on a mount fail with when its daemon is gone: ENOTCONN in the end; before that, of what was under way,
# ECONNABORTED, and of what the kernel was about to put on a ring that it is taking down, ECANCELED.
NO_DAEMON: Final = frozenset((errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED))


class Answer(StrEnum):
    """What a mountpoint says when it is asked."""

    LIVE = "live"
    DEAD = "dead"  # no daemon is behind it any more
    SILENT = "silent"  # no answer in time


def real_mountpoint(path: Path) -> Path:
    """With symlinks followed, but for the mountpoint itself, which is not looked at."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100
    return Path(os.path.realpath(absolute.parent)) / absolute.name


def mounted_at(path: Path, mountinfo: Path = MOUNTINFO) -> MountEntry | None:
    """What is mounted exactly there, the topmost if several are."""
    wanted = real_mountpoint(path)
    found = [entry for entry in mounts(mountinfo) if entry.mountpoint == wanted]
    return found[-1] if found else None


def mounts(mountinfo: Path = MOUNTINFO) -> Iterator[MountEntry]:
    for line in mountinfo.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ")
        if len(fields) >= 5 and len(rest) >= 2:
            where = Path(os.fsdecode(_unescape(fields[4])))
            yield MountEntry(fields[2].decode(), where, rest[0].decode(), os.fsdecode(_unescape(rest[1])))


def _unescape(field: bytes) -> bytes:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    return re.sub(rb"\\([0-7]{3})", lambda m: bytes((int(m[1], 8),)), field)


def ask(path: Path, timeout_s: float = STAT_MAX_S) -> Answer:
    """The mountpoint's answer, which may never come: a thread asks, and is left behind after `timeout_s`."""
    answer: list[Answer] = []

    def look() -> None:
        try:
            os.statvfs(path)  # a stat may be answered by the kernel, from what it remembers
        except OSError as e:
            answer.append(Answer.DEAD if e.errno in NO_DAEMON else Answer.LIVE)
        else:
            answer.append(Answer.LIVE)

    thread = threading.Thread(target=look, name="aof2-stat", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else Answer.SILENT


def make_mountpoint(path: Path) -> None:
    """Sees to it that there is an empty directory to mount on."""
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        with os.scandir(path) as entries:
            first = next(entries, None)
    except (FileExistsError, NotADirectoryError):
        raise MountError(f"{path}: not a directory; name one to mount on") from None
    except PermissionError:
        raise MountError(f"{path}: this user may not make or read it; make it first, or run as root") from None
    if first is not None:
        raise MountError(f"{path}: not empty ({first.name!r} is there); mount on an empty directory")


# -- taking it away ------------------------------------------------------------------------------------------------


def unmount(path: Path) -> None:
    """Unmounts. BusyError when it is in use; nothing has happened then."""
    _unmount(path, "-u", _UMOUNT_NOFOLLOW)


def detach(path: Path) -> None:
    """Takes it out of the tree at once, also while it is in use."""
    _unmount(path, "-uz", _MNT_DETACH | _UMOUNT_NOFOLLOW)


def check_idle(path: Path) -> None:
    """BusyError if processes can be seen that use it, so that `umount` does not wait for uploads in vain. It may still
    fail: not everything that keeps a mount busy is a process that we may look at."""
    if holders(path):
        raise busy(path)


def _unmount(path: Path, option: str, flags: int) -> None:
    if os.geteuid() != 0:
        _fusermount(path, option)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.get_errno() if libc.umount2(os.fsencode(path), flags) else 0
    if code == errno.EBUSY:
        raise busy(path)
    if code not in (0, errno.EINVAL, errno.ENOENT):  # EINVAL: it is not mounted any more
        raise MountError(f"{path}: cannot be unmounted: {os.strerror(code).lower()}")


def _fusermount(path: Path, flag: str) -> None:
    try:
        done = subprocess.run(
            ["fusermount3", flag, "--", str(path)], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise MountError(f"{path}: only root can unmount without fusermount3; install fuse3") from None
    except subprocess.TimeoutExpired:
        raise MountError(f"{path}: fusermount3 does not come back") from None
    if done.returncode and "busy" in done.stderr.lower():
        raise busy(path)
    if done.returncode and mounted_at(path) is not None:
        lines = done.stderr.strip().splitlines() or ["fusermount3 failed"]
        raise MountError(f"{path}: cannot be unmounted: {lines[-1]}")


def busy(path: Path) -> BusyError:
    users = ", ".join(f"{name} ({pid})" for pid, name in holders(path))
    return BusyError(f"{path}: in use{' by ' + users if users else ''}; stop what uses it, then umount again")


def holders(path: Path) -> list[tuple[int, str]]:
    """Some of the processes here (not in containers) with something open below the path, by the names of their links:
    what these lead to is not looked at."""
    found: list[tuple[int, str]] = []
    inside, own = str(real_mountpoint(path)), str(os.getpid())
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != own and _holds(process, inside):
            with contextlib.suppress(OSError):
                found.append((int(process.name), (process / "comm").read_text().strip()))
        if len(found) == HOLDERS_MAX:
            break
    return found


def _holds(process: Path, inside: str) -> bool:
    try:
        if os.readlink(process / "ns" / "mnt") != os.readlink("/proc/self/ns/mnt"):  # noqa: PTH115
            return False
        links = [process / "cwd", process / "root", *(process / "fd").iterdir()]
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):
            target = os.readlink(link)  # noqa: PTH115
            if target == inside or target.startswith(f"{inside}/"):
                return True
    with contextlib.suppress(OSError):
        return f" {inside}/" in (process / "maps").read_text(errors="replace")
    return False
