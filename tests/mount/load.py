"""Writers that keep a journal outside the mount: before each operation what it is, after it how it ended.

    python -m tests.mount.load DIR JOURNAL SEED        one writer in a directory of its own, until the mount is gone

One operation is under way at a time, so after a kill at most one is uncertain (`model.py` says what is allowed then).
When the mount is gone the writer goes on through the descriptors it still has: passed-through ones still work.

Owner: the process itself.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import stat
import sys
from pathlib import Path

# ECANCELED: what was on its way through a ring when its channel was killed.
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.EIO, errno.ESTALE)
NAMES = 24
FILE_BYTES = (0, 1, 100, 4096, 20_000, 300_000, 1_100_000)
FILE_BYTES_MAX = 3 << 20
WRITES_AFTER_THE_END = 6
DURABLE = b"user.note"


def content(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


class GoneError(Exception):
    """The mount is."""


class Writer:
    def __init__(self, top: Path, journal: Path, seed: int) -> None:
        self.top = top
        self.rng = random.Random(seed)
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.n = 0
        self.fds: dict[int, int] = {}  # our number → descriptor
        self.next_file = 0

    # -- journal -----------------------------------------------------------------------------------------------

    def note(self, **fields: object) -> None:
        os.write(self.journal, (json.dumps(fields) + "\n").encode())

    def do(self, op: str, call: object, **args: object) -> object:
        assert callable(call)
        self.n += 1
        self.note(n=self.n, op=op, **args)
        try:
            result = call()
        except OSError as e:
            self.note(n=self.n, errno=e.errno)
            if self.is_gone(e):
                raise GoneError from e
            raise
        self.note(n=self.n, errno=0)
        return result

    def is_gone(self, e: OSError) -> bool:
        """Nobody answers, or the mount was taken out of the tree: then our directory is not there."""
        return e.errno in GONE or not os.path.isdir(self.top)

    # -- operations --------------------------------------------------------------------------------------------

    def at(self, name: str) -> str:
        return os.path.join(self.top, name)

    def names(self, kind: str) -> list[str]:
        found = []
        for folder, dirs, files in os.walk(self.top):
            for name in dirs if kind == "d" else files:
                path = os.path.join(folder, name)
                # Not islink(): of a mount that just died it says False, and what the kernel remembers still opens.
                if kind == "d" or not stat.S_ISLNK(os.lstat(path).st_mode):
                    found.append(os.path.relpath(path, self.top))
        return sorted(found)

    def new_name(self) -> str:
        folder = self.rng.choice(["", *self.names("d")])
        return os.path.join(folder, f"f{self.rng.randrange(NAMES)}")

    def open(self, name: str, flags: int, op: str) -> int:
        number, self.next_file = self.next_file, self.next_file + 1
        self.fds[number] = self.do(op, lambda: os.open(self.at(name), flags, 0o640), name=name, fd=number)  # type: ignore[assignment]
        return number

    def write(self, number: int, offset: int, length: int) -> None:
        seed = self.rng.getrandbits(48)
        data = content(seed, length)
        self.do(
            "write", lambda: write_all(self.fds[number], data, offset), fd=number, off=offset, len=length, seed=seed
        )

    def fsync(self, number: int) -> None:
        self.do("fsync", lambda: os.fsync(self.fds[number]), fd=number)

    def close(self, number: int) -> None:
        fd = self.fds.pop(number)
        self.do("close", lambda: os.close(fd), fd=number)

    def fsync_dir(self, name: str) -> None:
        fd = os.open(self.at(name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.do("fsyncdir", lambda: os.fsync(fd), name=name)
        finally:
            os.close(fd)

    def create(self) -> None:
        name = self.new_name()
        if os.path.lexists(self.at(name)):
            return
        number = self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, "create")
        self.fill(number)
        self.maybe_close(number)

    def fill(self, number: int) -> None:
        size, at = self.rng.choice(FILE_BYTES), 0
        while at < size:
            step = min(size - at, self.rng.choice((1000, 4096, 65_536, 1 << 20)))
            self.write(number, at, step)
            at += step
        if self.rng.random() < 0.6:
            self.fsync(number)

    def maybe_close(self, number: int) -> None:
        if self.rng.random() < 0.8 or len(self.fds) > 6:
            self.close(number)

    def rewrite(self) -> None:
        files = self.names("f")
        if not files:
            return
        name = self.rng.choice(files)
        number = self.open(name, os.O_RDWR, "open")
        size = os.fstat(self.fds[number]).st_size
        for _ in range(self.rng.randint(1, 4)):
            offset = self.rng.randrange(size + 1)
            self.write(number, offset, self.rng.choice((1, 700, 4096, 30_000)))
            if self.rng.random() < 0.5:
                self.fsync(number)
        self.maybe_close(number)

    def append(self) -> None:
        files = self.names("f")
        if not files:
            return
        number = self.open(self.rng.choice(files), os.O_RDWR, "open")
        for _ in range(self.rng.randint(1, 5)):
            size = os.fstat(self.fds[number]).st_size
            if size > FILE_BYTES_MAX:
                break
            self.write(number, size, self.rng.randint(1, 9000))
        if self.rng.random() < 0.5:
            self.fsync(number)
        self.maybe_close(number)

    def store(self) -> None:
        """Through a mapping."""
        files = self.names("f")
        if not files:
            return
        number = self.open(self.rng.choice(files), os.O_RDWR, "open")
        size = os.fstat(self.fds[number]).st_size
        if size:
            offset = self.rng.randrange(size)
            length = min(size - offset, 5000)
            seed = self.rng.getrandbits(48)

            def stores() -> None:
                with mmap.mmap(self.fds[number], size) as m:
                    m[offset : offset + length] = content(seed, length)

            self.do("write", stores, fd=number, off=offset, len=length, seed=seed)
            if self.rng.random() < 0.7:
                self.fsync(number)
        self.maybe_close(number)

    def truncate(self) -> None:
        files = self.names("f")
        if not files:
            return
        number = self.open(self.rng.choice(files), os.O_RDWR, "open")
        size = os.fstat(self.fds[number]).st_size
        new = self.rng.choice((0, size // 2, size + 5000))
        self.do("truncate", lambda: os.ftruncate(self.fds[number], new), fd=number, size=new)
        if self.rng.random() < 0.5:
            self.fsync(number)
        self.maybe_close(number)

    def replace(self) -> None:
        """Write a temporary, fsync, rename into place, fsync the directory: the new file or the old, never neither."""
        name = self.new_name()
        if os.path.isdir(self.at(name)):
            return
        temporary = name + ".tmp"
        if os.path.lexists(self.at(temporary)):
            return
        number = self.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, "create")
        self.write(number, 0, self.rng.choice((10, 5000, 200_000)))
        self.fsync(number)
        if self.rng.random() < 0.7:
            self.close(number)
        self.do("rename", lambda: os.rename(self.at(temporary), self.at(name)), name=temporary, to=name)
        if self.rng.random() < 0.8:
            self.fsync_dir(os.path.dirname(name))
        if number in self.fds:
            self.close(number)

    def rename(self) -> None:
        names = self.names("f") + self.names("d")
        if not names:
            return
        old, new = self.rng.choice(names), self.new_name() + self.rng.choice(("", "r"))
        if old == new or os.path.lexists(self.at(new)) or (new + "/").startswith(old + "/"):
            return
        self.do("rename", lambda: os.rename(self.at(old), self.at(new)), name=old, to=new)

    def mkdir(self) -> None:
        dirs = self.names("d")
        if len(dirs) > 8:
            return
        name = os.path.join(self.rng.choice(["", *dirs]), f"d{self.rng.randrange(NAMES)}")
        if not os.path.lexists(self.at(name)):
            self.do("mkdir", lambda: os.mkdir(self.at(name), 0o750), name=name)

    def rmdir(self) -> None:
        empty = [name for name in self.names("d") if not os.listdir(self.at(name))]
        if empty:
            name = self.rng.choice(empty)
            self.do("rmdir", lambda: os.rmdir(self.at(name)), name=name)

    def unlink(self) -> None:
        files = self.names("f")
        if len(files) > 6:
            name = self.rng.choice(files)
            self.do("unlink", lambda: os.unlink(self.at(name)), name=name)

    def link(self) -> None:
        files, new = self.names("f"), self.new_name() + "l"
        if files and not os.path.lexists(self.at(new)):
            old = self.rng.choice(files)
            self.do("link", lambda: os.link(self.at(old), self.at(new)), name=old, to=new)

    def symlink(self) -> None:
        name = self.new_name() + "s"
        if not os.path.lexists(self.at(name)):
            target = f"../{self.rng.randrange(1000)}/nowhere"
            self.do("symlink", lambda: os.symlink(target, self.at(name)), name=name, target=target)

    def attributes(self) -> None:
        files = self.names("f")
        if not files:
            return
        name = self.rng.choice(files)
        if self.rng.random() < 0.5:
            mode = self.rng.choice((0o600, 0o644, 0o755))
            self.do("chmod", lambda: os.chmod(self.at(name), mode), name=name, mode=mode)
        else:
            value = f"v{self.rng.randrange(1000)}"
            self.do("setxattr", lambda: os.setxattr(self.at(name), DURABLE, value.encode()), name=name, value=value)

    # -- the whole ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the mount is gone, or an operation fails that should not."""
        weights = {
            self.create: 6, self.rewrite: 8, self.append: 6, self.store: 3, self.truncate: 2, self.replace: 6,
            self.rename: 3, self.mkdir: 2, self.rmdir: 1, self.unlink: 4, self.link: 2, self.symlink: 1,
            self.attributes: 2,
        }  # fmt: skip
        try:
            while True:
                self.rng.choices(list(weights), list(weights.values()))[0]()
        except GoneError:
            pass
        except OSError as e:
            if not self.is_gone(e):
                raise
        self.go_on_without_a_daemon()

    def go_on_without_a_daemon(self) -> None:
        for _ in range(WRITES_AFTER_THE_END):
            for number in list(self.fds):
                try:
                    self.write(number, self.rng.randrange(5000), self.rng.choice((1, 3000)))
                except GoneError:
                    del self.fds[number]


def write_all(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


if __name__ == "__main__":
    Writer(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])).run()
