"""The timed loops, run as a script of their own: `python work.py NAME ARGUMENT…` prints one JSON object.

In a process of its own so that a filesystem that hangs can be given up on, and so that all run the same loop.
Time starts before open and ends after close. Imports nothing of the project: starting it is quick.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
SMALL_BYTES = 4096
PART_BYTES = 8 * MIB
PARTS_AT_ONCE = 4
UPLOADS_AT_ONCE = 64
POOL_BYTES_MAX = 64 * MIB
SILENCE_MAX_S = 30.0


def write(path: str, size: int, seed: int, fsync: int) -> dict[str, float]:
    """A new file of bytes that neither compress nor repeat."""
    block = mmap.mmap(-1, MIB)
    block.write(random.Random(seed).randbytes(MIB))  # noqa: S311
    view = memoryview(block)
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    for n in range(0, size, MIB):
        view[:8] = (n + seed).to_bytes(8, "little")
        left = min(MIB, size - n)
        while left:
            left -= os.write(fd, view[:left])
    if fsync:
        os.fsync(fd)
    os.close(fd)
    return {"seconds": time.perf_counter() - start}


def writes(folder: str, count: int, size: int, seed: int) -> dict[str, float]:
    """New files, all at once."""
    Path(folder).mkdir()
    return by_threads(count, lambda n: write(f"{folder}/{n}", size, seed + n, 0), count, math.inf)


def _blocks(path: str) -> Iterator[memoryview]:
    block = memoryview(mmap.mmap(-1, MIB))
    fd = os.open(path, os.O_RDONLY)
    while got := os.readv(fd, [block]):
        yield block[:got]
    os.close(fd)


def read(path: str) -> dict[str, float]:
    start = time.perf_counter()
    total = sum(len(block) for block in _blocks(path))
    return {"seconds": time.perf_counter() - start, "bytes": total}


def checksum(path: str) -> dict[str, float]:
    crc = 0
    for block in _blocks(path):
        crc = zlib.crc32(block, crc)
    return {"crc32": crc}


def ranges(path: str, count: int, length: int, seed: int) -> dict[str, float]:
    """Reads at seeded offsets, multiples of 4 KiB."""
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    choose = random.Random(seed)  # noqa: S311
    last = (os.fstat(fd).st_size - length) // SMALL_BYTES
    total = sum(len(os.pread(fd, length, choose.randint(0, last) * SMALL_BYTES)) for _ in range(count))
    os.close(fd)
    return {"seconds": time.perf_counter() - start, "bytes": total}


def create(folder: str, count: int, budget_s: float) -> dict[str, float]:
    """Small files in one directory, until there are enough or the time is up."""
    Path(folder).mkdir()
    content = random.Random(1).randbytes(SMALL_BYTES)  # noqa: S311
    start = time.perf_counter()
    done = 0
    while done < count and time.perf_counter() - start < budget_s:
        fd = os.open(f"{folder}/{done:06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)
        done += 1
    return {"seconds": time.perf_counter() - start, "count": done}


def fill(folder: str, count: int, threads: int, size: int, seed: int, budget_s: float) -> dict[str, float]:
    """Files in one directory by several threads, no two with the same bytes, until there are enough or the time is up.

    `started` is by the clock that all processes share.
    """
    Path(folder).mkdir()
    contents = Contents(count, size, seed)

    def make(n: int) -> None:
        fd = os.open(f"{folder}/{n:06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, contents.of(n))
        os.close(fd)

    return by_threads(threads, make, count, budget_s)


def drain(
    folder: str, count: int, readers: int, size: int, seed: int, made: int, shuffled: int, budget_s: float
) -> dict[str, float]:
    """What `fill` made, read and compared by several threads, each file once: as it is listed, or shuffled."""
    contents = Contents(count, size, seed)
    start = time.perf_counter()
    names = [f"{n:06d}" for n in range(made)] if shuffled else os.listdir(folder)  # noqa: PTH208
    if shuffled:
        random.Random(seed).shuffle(names)  # noqa: S311

    def look(n: int) -> None:
        fd = os.open(f"{folder}/{names[n]}", os.O_RDONLY)
        data = os.read(fd, size + 1)
        os.close(fd)
        if data != contents.of(int(names[n])):
            raise RuntimeError(f"{names[n]}: wrong bytes")

    answer = by_threads(readers, look, len(names), budget_s)
    return {**answer, "seconds": time.perf_counter() - start}


class Contents:
    """What is in the files of a folder, by number: slices of random bytes."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self._size = size
        self._span = min(count * (size + 1), POOL_BYTES_MAX)
        self._pool = random.Random(seed).randbytes(self._span + size)  # noqa: S311

    def of(self, n: int) -> bytes:
        first = n * (self._size + 1) % self._span
        return self._pool[first : first + self._size]


def by_threads(threads: int, step: Callable[[int], object], count: int, budget_s: float) -> dict[str, float]:
    """Steps 0, 1, 2 …, each by whichever thread is free, until all are done or the time is up."""
    numbers = iter(range(count))
    start = time.perf_counter()

    def some() -> int:
        done = 0
        while time.perf_counter() - start < budget_s and (n := next(numbers, None)) is not None:
            step(n)
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(future.result() for future in [pool.submit(some) for _ in range(threads)])
    return {"seconds": time.perf_counter() - start, "started": start, "count": done}


def stat(folder: str, count: int) -> dict[str, float]:
    start = time.perf_counter()
    for n in range(count):
        os.stat(f"{folder}/{n:06d}")
    return {"seconds": time.perf_counter() - start, "count": count}


def listing(folder: str) -> dict[str, float]:
    """As `ls -l` sees a directory: every name with its attributes."""
    start = time.perf_counter()
    with os.scandir(folder) as entries:
        count = sum(entry.stat(follow_symlinks=False).st_size == SMALL_BYTES for entry in entries)
    return {"seconds": time.perf_counter() - start, "count": count}


def command(lines: str) -> dict[str, float]:
    """Commands, a JSON list of lists, one after the other; the time of all."""
    start = time.perf_counter()
    for line in json.loads(lines):
        ended = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stderr.strip() or f"{line[0]} ended with {ended.returncode}")
    return {"seconds": time.perf_counter() - start, "started": start}


def _client(endpoint_url: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=PARTS_AT_ONCE, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=endpoint_url, config=config)


def download(endpoint_url: str, bucket: str, key: str, target: str) -> dict[str, float]:
    """The least a client in Python can do: parallel ranges straight into a file."""
    client = _client(endpoint_url)
    start = time.perf_counter()
    with open(target, "wb") as f:
        total = fetch(client, bucket, key, f.fileno())
    return {"seconds": time.perf_counter() - start, "bytes": total}


def fetch(client: Any, bucket: str, key: str, fd: int) -> int:
    """An object into a file, in parallel ranges; its bytes."""
    size = client.head_object(Bucket=bucket, Key=key)["ContentLength"]

    def part(first: int) -> int:
        wanted = f"bytes={first}-{min(first + PART_BYTES, size) - 1}"
        body = client.get_object(Bucket=bucket, Key=key, Range=wanted)["Body"].read()
        return os.pwrite(fd, body, first)

    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        return sum(pool.map(part, range(0, size, PART_BYTES)))


def downloads(endpoint_url: str, bucket: str, prefix: str, folder: str) -> dict[str, float]:
    """All objects under a prefix into a new folder, several at once."""
    client = _client(endpoint_url)
    start = time.perf_counter()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [found["Key"] for page in pages for found in page.get("Contents", ())]

    def one(key: str) -> int:
        target = Path(folder, key.removeprefix(prefix))
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as f:
            return fetch(client, bucket, key, f.fileno())

    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        total = sum(pool.map(one, keys))
    return {"seconds": time.perf_counter() - start, "bytes": total, "count": len(keys)}


def upload(endpoint_url: str, bucket: str, key: str, source: str) -> dict[str, float]:
    _client(endpoint_url).upload_file(source, bucket, key)
    return {}


def uploads(endpoint_url: str, bucket: str, prefix: str, folder: str) -> dict[str, float]:
    """All files below a folder, all at once."""
    client, top = _client(endpoint_url), Path(folder)
    names = sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())

    def one(n: int) -> None:
        client.upload_file(f"{folder}/{names[n]}", bucket, f"{prefix}{names[n]}")

    return by_threads(min(len(names), UPLOADS_AT_ONCE), one, len(names), math.inf)


def puts(endpoint_url: str, bucket: str, count: int, seed: int) -> dict[str, float]:
    """Small objects one after the other; the median time of one."""
    client, times = _client(endpoint_url), []
    for n, data in enumerate(_small(count, seed)):
        start = time.perf_counter()
        client.put_object(Bucket=bucket, Key=f"put{seed}-{n}", Body=data)
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times)}


def durable(directory: str, control: str, tenant: str, count: int, seed: int) -> dict[str, float]:
    """Small files one after the other, each waited for until the remote alone restores it; the median time of one."""
    times = _waits(directory, control, tenant, _small(count, seed), f"durable{seed}-")
    return {"seconds": statistics.median(times)}


def beside(directory: str, control: str, tenant: str, count: int, seed: int, size: int) -> dict[str, float]:
    """The same while a large file is written and on its way: as many as there is time for, at least one."""
    large, begun = f"large{seed}", time.perf_counter()

    def set_off() -> float:
        write(f"{directory}/{large}", size, seed, 0)
        ask(control, "wait", paths=[f"{tenant}/{large}"])
        return time.perf_counter() - begun

    times: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        on_its_way = pool.submit(set_off)
        for n, data in enumerate(_small(count, seed)):
            times += _waits(directory, control, tenant, [data], f"beside{seed}-{n}-")
            if on_its_way.done():
                break
    return {"seconds": statistics.median(times), "longest": max(times), "large": on_its_way.result()}


def _waits(directory: str, control: str, tenant: str, contents: Sequence[bytes], prefix: str) -> list[float]:
    times = []
    for n, data in enumerate(contents):
        name = f"{prefix}{n}"
        start = time.perf_counter()
        with open(os.path.join(directory, name), "xb") as f:  # noqa: PTH118
            f.write(data)
        ask(control, "wait", paths=[f"{tenant}/{name}"])
        times.append(time.perf_counter() - start)
    return times


def _small(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)  # noqa: S311
    return [rng.randbytes(SMALL_BYTES) for _ in range(count)]


def ask(control: str, verb: str, **arguments: object) -> Any:
    """The daemon's answer to what a command would ask it, without the start of a command."""
    folder, name = os.path.split(control)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SILENCE_MAX_S)
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            client.connect(f"/proc/self/fd/{fd}/{name}")  # an address holds 107 bytes, a path more
        finally:
            os.close(fd)
        client.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
        with client.makefile("rb") as answers:
            for line in answers:
                answer = json.loads(line)
                if "result" in answer:
                    return answer["result"]
                if "error" in answer:
                    raise RuntimeError(answer["error"])
    raise RuntimeError("the daemon hung up")


_LOCAL = (write, writes, read, checksum, ranges, create, fill, drain, stat, listing, command)
_REMOTE = (download, downloads, upload, uploads, puts, durable, beside)
TASKS: dict[str, Callable[..., dict[str, float]]] = {f.__name__: f for f in (*_LOCAL, *_REMOTE)}


def main(tasks: Mapping[str, Callable[..., dict[str, float]]], name: str, *arguments: str) -> None:
    """Arguments that look like numbers are numbers."""
    values = [json.loads(a) if a.replace(".", "", 1).isdigit() else a for a in arguments]
    result = tasks[name](*values)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(TASKS, *sys.argv[1:])
