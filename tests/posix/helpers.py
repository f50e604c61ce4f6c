"""What the tests of the mount share: errno of a call, a call as another user, and the system calls Python has not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
NOBODY = 65534
OTHER = 65533
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW, AT_SYMLINK_FOLLOW = 0x100, 0x400
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 0x10, 0x20

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]


class Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_int64))


def code(what: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The name of the errno a call fails with; "" when it goes well."""
    try:
        what(*args, **kwargs)
    except OSError as e:
        return {errno.EOPNOTSUPP: "EOPNOTSUPP"}.get(e.errno or 0) or errno.errorcode.get(e.errno or 0, str(e.errno))
    return ""


def check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    check(libc.fallocate(fd, mode, offset, length))


def renameat2(old: Path | str, new: Path | str, flags: int) -> None:
    check(libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))


def link_fd(fd: int, new: Path) -> None:
    """A name for an open file."""
    check(libc.linkat(AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(new), AT_SYMLINK_FOLLOW))


def utimensat(path: Path | str, atime: tuple[int, int], mtime: tuple[int, int], flags: int = 0) -> None:
    times = (Timespec * 2)(Timespec(*atime), Timespec(*mtime))
    check(libc.utimensat(AT_FDCWD, os.fsencode(path), times, flags))


def forked(
    what: Callable[[], T],
    *,
    uid: int = 0,
    gid: int | None = None,
    groups: tuple[int, ...] = (),
    cwd: Path | None = None,
    timeout_s: int = 60,
) -> T:
    """What the function returns or raises in another process, as this user. Relative paths start at `cwd`, which is
    entered as root: the folders above it may be anybody's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        answer: tuple[bool, Any] = (False, OSError(errno.EIO, "not run"))
        try:
            signal.alarm(timeout_s)
            os.close(reader)
            if cwd is not None:
                os.chdir(cwd)
            if uid:
                os.setgroups(list(groups))
                os.setgid(uid if gid is None else gid)
                os.setuid(uid)
            answer = (True, what())
        except BaseException as e:
            answer = (False, e)
        finally:
            with contextlib.suppress(Exception):
                os.write(writer, pickle.dumps(answer))
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert said, "the process said nothing"
    went_well, value = pickle.loads(said)
    if went_well:
        return value  # type: ignore[no-any-return]
    raise value


def code_as(uid: int, cwd: Path, what: Callable[..., Any], *args: Any, groups: tuple[int, ...] = ()) -> str:
    """`code`, as another user, in a folder."""
    return forked(lambda: code(what, *args), uid=uid, groups=groups, cwd=cwd)


@contextlib.contextmanager
def opened(path: Path | str | bytes, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o644) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def bits(path: Path | str) -> int:
    """The permissions, with suid, sgid and sticky."""
    return os.lstat(path).st_mode & 0o7777


def names(path: Path | str) -> list[str]:
    return sorted(os.listdir(path))


class Inotify:
    """(name, mask) of what happens in a directory."""

    CREATE, MODIFY, MOVED_FROM, MOVED_TO, DELETE, CLOSE_WRITE, ATTRIB = 0x100, 2, 0x40, 0x80, 0x200, 8, 4

    def __init__(self, path: Path) -> None:
        self.fd = check(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        check(libc.inotify_add_watch(self.fd, os.fsencode(path), 0x3CE))

    def read(self) -> list[tuple[str, int]]:
        out = []
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, 65536)
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                out.append((os.fsdecode(data[16 : 16 + length].rstrip(b"\0")), mask & 0xFFF))
                data = data[16 + length :]
        return out

    def close(self) -> None:
        os.close(self.fd)
