"""fio: the same job for each contestant, one process with a deadline, its JSON read into rates.

Buffers are aligned (a misaligned one costs a warm read most of its speed), and a sequential job opens the file again
for each pass, as an application does. fio drops the kernel's pages of the file at open only when it is asked to: then
the filesystem answers, from its own copy on the local disk, whose pages stay warm.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from aof2.fs.bench.process import StepError

SEQUENTIAL_PASSES = 4


class Rates(msgspec.Struct, frozen=True):
    bytes_per_s: float
    reads_per_s: float
    bytes_read: int
    reads: int


def read_job(path: Path, *, threads: int, size: int, random_s: float | None, drop: bool = False) -> list[str]:
    """The command. Sequential: so many passes in all, shared among the threads; random: for `random_s` seconds."""
    job = [
        "fio", "--name=job", f"--filename={path}", "--ioengine=psync", "--iomem_align=4096", "--thread",
        f"--numjobs={threads}", "--group_reporting", f"--invalidate={int(drop)}", "--fadvise_hint=0", "--readonly",
        "--allow_file_create=0", "--randrepeat=1", f"--size={size}", "--output-format=json",
    ]  # fmt: skip
    if random_s is None:
        return [*job, "--rw=read", "--bs=1M", f"--loops={max(1, SEQUENTIAL_PASSES // threads)}"]
    return [*job, "--rw=randread", "--bs=4k", "--norandommap", "--time_based", f"--runtime={round(1000 * random_s)}ms"]


def parse_fio(text: str) -> Rates:
    """fio may print a warning or two before its JSON."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        if job["error"]:
            raise StepError(f"fio: error {job['error']}")
        read = job["read"]
        rates = Rates(float(read["bw_bytes"]), float(read["iops"]), int(read["io_bytes"]), int(read["total_ios"]))
    except (ValueError, KeyError, IndexError, TypeError):
        raise StepError("fio printed something else than its report") from None
    if not rates.bytes_per_s:
        raise StepError("fio read nothing")
    return rates
