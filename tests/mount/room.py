"""What tests of the room share: data larger than a cache, writers of every sort, and a look at the cache meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

MIB = 1 << 20
STEP = 1 << 20


def random_file(path: Path, size: int) -> Path:
    """Bytes that no compression makes smaller."""
    with path.open("wb") as out:
        left = size
        while left:
            out.write(os.urandom(min(STEP, left)))
            left -= min(STEP, left)
    return path


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while data := f.read(STEP):
            digest.update(data)
    return digest.hexdigest()


def disk_bytes(folder: Path) -> int:
    """As `du` counts."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


class Watched:
    """The most that a folder took while somebody looked."""

    def __init__(self) -> None:
        self.most = 0
        self.looks = 0


@contextlib.contextmanager
def watching(folder: Path, every_s: float = 0.002) -> Iterator[Watched]:
    seen, over = Watched(), threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            seen.most = max(seen.most, disk_bytes(folder))
            seen.looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


SENDFILE = """
import os, sys
a, b = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
while os.sendfile(b, a, None, 1 << 22):
    pass
"""
COPYFILE = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[2])"
SPLICE = """
import fcntl, os, sys
a, b = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
r, w = os.pipe()
fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 1 << 20)
while n := os.splice(a, w, 1 << 20):
    while n:
        n -= os.splice(r, b, n)
"""
PARQUET = """
import sys
import pyarrow as pa, pyarrow.parquet as pq
source = open(sys.argv[1], "rb")
schema = pa.schema([("b", pa.binary())])
with pq.ParquetWriter(sys.argv[2], schema, compression="none", use_dictionary=False) as w:
    while data := source.read(8 << 20):
        rows = [data[i : i + 65536] for i in range(0, len(data), 65536)]
        w.write_table(pa.table({"b": rows}, schema))
"""
PARQUET_SAYS = """
import hashlib, sys
import pyarrow.parquet as pq
digest = hashlib.sha256()
for batch in pq.ParquetFile(sys.argv[1]).iter_batches(batch_size=256):
    for row in batch.column(0):
        digest.update(row.as_buffer())
print(digest.hexdigest())
"""
TOOLS = ("cp", "dd", "rsync", "parquet", "append", "sendfile", "copyfile", "splice")


def command(tool: str, source: Path, target: Path) -> list[str]:
    """How this tool writes `target`."""
    at = (str(source), str(target))
    return {
        "cp": ["cp", *at],
        "dd": ["dd", f"if={source}", f"of={target}", "bs=4k", "status=none"],
        "rsync": ["rsync", "--inplace", *at],
        "append": ["sh", "-c", 'cat "$1" >> "$2"', "sh", *at],
        "sendfile": [sys.executable, "-c", SENDFILE, *at],
        "copyfile": [sys.executable, "-c", COPYFILE, *at],
        "splice": [sys.executable, "-c", SPLICE, *at],
        "parquet": [sys.executable, "-c", PARQUET, *at],
    }[tool]


def run_all(commands: Sequence[Sequence[str]], timeout_s: float) -> None:
    """All at once; each must go well."""
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    for process, what in zip(running, commands, strict=True):
        _, said = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{what[0]} {what[-1]}: {said}"


def content_hash(tool: str, path: Path) -> str:
    """Of the source's bytes, as they are in what the tool made of them."""
    if tool != "parquet":
        return sha256(path)
    said = subprocess.run([sys.executable, "-c", PARQUET_SAYS, path], capture_output=True, text=True, check=True)
    return said.stdout.strip()
