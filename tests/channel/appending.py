"""Writing to an `_append` behind the channel, from this process and others, and what must be in its segments then."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from aof2.engine.kinds.kernel import AppendState
from tests.channel.streams import payloads
from tests.channel.support import Daemon, in_time, until

NAME = "_append"
RECORD = 36

# Lines "writer:number:…" of any length up to SIZE, one write each; says how many were acknowledged.
WRITER = """
import os, random, sys
path, writer, count, size, cut = sys.argv[1], *map(int, sys.argv[2:])
fd, rng, done = os.open(path, os.O_WRONLY | os.O_APPEND), random.Random(writer), 0
try:
    for i in range(count):
        line = b"%d:%d:" % (writer, i) + b"x" * rng.randrange(size) + b"\\n"
        at = rng.randrange(len(line)) if cut else 0
        for piece in (line[:at], line[at:]):
            if piece and os.write(fd, piece) != len(piece):
                sys.exit("short")
        done = i + 1
        if done % 64 == 0:
            print(done, flush=True)
except OSError as e:
    print("errno", e.errno, file=sys.stderr)
print(done, flush=True)
"""


class Appending:
    """A daemon with a stream, and its files."""

    def __init__(self, daemon: Daemon, folder: Path | None = None, **options: Any) -> None:
        self.daemon = daemon
        self.folder = folder or daemon.root.parent / "segments"
        self.path = daemon.file(NAME, b"")
        self.ino: int = daemon.call("stream", name=NAME, folder=str(self.folder), **options)
        self.opened: list[int] = []

    def call(self, cmd: str, **arguments: Any) -> Any:
        return self.daemon.call(cmd, name=NAME, **arguments)

    def open(self) -> int:
        fd = int(in_time(lambda: os.open(self.path, os.O_WRONLY)))
        self.opened.append(fd)
        return fd

    def write(self, fd: int, data: bytes) -> None:
        assert in_time(partial(os.write, fd, data)) == len(data)

    def close(self, fd: int) -> None:
        self.opened.remove(fd)
        in_time(partial(os.close, fd))

    def asked(self) -> list[tuple[str, int]]:
        return [(what, length) for what, _, length in self.call("asked")]

    def asked_until(self, last: str) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        assert until(lambda: bool(seen.extend(self.asked()) or last in dict(seen))), seen
        return seen

    def asked_in_all(self, count: int) -> list[tuple[str, int]]:
        """A process that closed a file is gone before its release arrives."""
        seen: list[tuple[str, int]] = []
        assert until(lambda: bool(seen.extend(self.asked()) or len(seen) >= count)), seen
        return seen

    def taken(self) -> AppendState | None:
        state = self.call("append_take")
        return None if state is None else AppendState(*state)

    def payloads(self) -> list[bytes]:
        return payloads(self.folder)


def writers(path: Path, n: int, count: int, size: int = 300, *, cut: bool = False) -> list[subprocess.Popen[str]]:
    script = [sys.executable, "-c", WRITER, str(path)]
    return [
        subprocess.Popen(
            [*script, *map(str, (i, count, size, int(cut)))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(n)
    ]


def acknowledged(processes: list[subprocess.Popen[str]], seconds: float = 100) -> list[int]:
    try:
        return [int(process.communicate(timeout=seconds)[0].split()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()


def check_lines(found: list[bytes], acked: list[int], *, beyond: int = 0) -> None:
    """Each writer's lines from the first on, in order, once, whole: all that were acknowledged, and `beyond` more at
    most."""
    seen = [0] * len(acked)
    for payload in found:
        writer, number, rest = payload.split(b":", 2)
        w = int(writer)
        assert int(number) == seen[w], payload
        assert rest.endswith(b"\n") and rest[:-1] == b"x" * (len(rest) - 1)
        seen[w] += 1
    for w, count in enumerate(acked):
        assert count <= seen[w] <= count + beyond, (w, seen[w], count)
