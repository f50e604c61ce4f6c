"""The loops over records of `aof2 bench spark`: `appendloops.py TASK …` prints one JSON object.

A record is a line of JSON. `_append` of a stream and an ordinary file opened with O_APPEND are written alike: each
write(2) of whole lines is one atomic append. In a process of its own: a filesystem that hangs can be given up on.
"""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

from aof2.fs.bench.work import main

MIB = 1 << 20
START_S = 60.0


def line(n: int, size: int) -> bytes:
    """A record of exactly `size` bytes; no two alike, and little in it repeats."""
    head = b'{"n": %d, "kind": %d, "text": "' % (n, n % 100)
    noise = base64.b64encode(hashlib.shake_128(b"%d" % n).digest(size))
    return head + noise[: size - len(head) - 3] + b'"}\n'


def lines(path: str, total: int, size: int, block: int, first: int, fsync: int) -> dict[str, float]:
    """Lines of `size`, as many of them a write as fit in `block` bytes, `total` bytes in all (whole lines)."""
    a_write = max(1, block // size)
    blocks = [b"".join(line(first + n + i, size) for i in range(a_write)) for n in range(0, 16 * a_write, a_write)]
    done = 0
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while done < total:
        block_of_lines = blocks[done // (a_write * size) % len(blocks)][: total - done]
        if os.write(fd, block_of_lines) != len(block_of_lines):
            raise SystemExit(f"{path}: a write was cut short")
        done += len(block_of_lines)
    if fsync:
        os.fsync(fd)
    os.close(fd)
    return {"seconds": time.perf_counter() - start, "bytes": done, "count": done // size}


def _writer(path: str, count: int, size: int, gate: Barrier, n: int) -> tuple[float, float]:
    some = [line(n * count + i, size) for i in range(256)]
    gate.wait(START_S)
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for i in range(count):
        os.write(fd, some[i & 255])
    os.close(fd)
    return start, time.perf_counter()


def by_processes(path: str, processes: int, count: int, size: int) -> dict[str, float]:
    """A line a write, by several processes at once; from when the first begins to when the last is done."""
    each = count // processes
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        gate = manager.Barrier(processes)
        times = list(pool.map(partial(_writer, path, each, size, gate), range(processes)))
    seconds = max(end for _, end in times) - min(start for start, _ in times)
    return {"seconds": seconds, "count": each * processes}


def split_files(folder: str, total: int, size: int, files: int, seed: int) -> dict[str, float]:
    """Files of lines, `total` bytes in all: what is scanned."""
    Path(folder).mkdir(parents=True)
    for i in range(files):
        first = (seed * files + i) * (total // size)
        with open(f"{folder}/{i:03d}.jsonl", "wb", buffering=MIB) as f:
            f.writelines(line(first + n, size) for n in range(total // files // size))
    return {"count": files * (total // files // size)}


TASKS = {f.__name__: f for f in (lines, by_processes, split_files)}

if __name__ == "__main__":
    main(TASKS, *sys.argv[1:])
