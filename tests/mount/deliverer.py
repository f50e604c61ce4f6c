"""A process that delivers jobs to a volume's inbox and knows no mount: `python -m tests.mount.deliverer CONF 0 12`.

Of three jobs one is put as it should be, one is killed half-way, and one is put by two processes at once. What a job
holds follows from its number, so that who started it can tell what must be there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from pathlib import Path

from aof2.engine.errors import TransientError
from aof2.engine.inbox import open_inbox
from aof2.engine.settings.loader import load_settings

STREAMS = 4
ONCE, KILLED, TWICE = range(3)


def fate(number: int) -> int:
    return number % 3


def is_of_records(number: int) -> bool:
    return number // 3 % 2 == 1


def name_of(number: int) -> str:
    return f"job-{number}"


def files_of(number: int) -> dict[str, bytes]:
    rng = random.Random(number)
    files = {f"part={n % 2}/{n}": rng.randbytes(rng.randrange(1, 20_000)) for n in range(rng.randrange(1, 8))}
    return files | {"large": rng.randbytes(rng.randrange(1 << 20, 3 << 20))}


def records_of(number: int) -> list[bytes]:
    return [b"%d %d %s\n" % (number, n, b"." * (n % 50)) for n in range(500 + number)]


def deliver(conf: Path, number: int, *, killed: bool) -> None:
    records = is_of_records(number)
    with open_inbox(load_settings(conf).remote, "events" if records else "default") as inbox:
        job = inbox.open_job(name_of(number), to=f"s{number % STREAMS}" if records else f"jobs/{number}")
        if records:
            job.put_records(records_of(number))
            job.records().flush()
        else:
            for path, data in files_of(number).items():
                job.put(path, data)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        job.commit()


def in_child(conf: Path, number: int, *, killed: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        while code:
            try:
                deliver(conf, number, killed=killed)
                code = 0
            except TransientError as e:  # the server is slow, or away: the same job again
                print(f"job {number}: {e}", flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(conf: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        killed = fate(number) == KILLED
        pids = [in_child(conf, number, killed=killed) for _ in range(2 if fate(number) == TWICE else 1)]
        for pid in pids:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != (-signal.SIGKILL if killed else 0):
                sys.exit(f"job {number}: exit {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
