"""Jobs that come by the inbox of a mounted volume while its daemon is killed; then, what is there."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from aof2.engine.env import Env
from aof2.engine.remote.keys import InboxBlobKey, InboxDoorKey, InboxPackKey, parse_key
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import BlobInfo
from aof2.engine.settings.loader import load_settings
from aof2.fs.bench.seaweed import REGION, Seaweed
from tests.mount import deliverer
from tests.support.mount import MountedVolume, mounted_volume, until

TENANTS = {"default": {"kind": "files"}, "events": {"kind": "append", "segment_bytes": "256KiB", "seal_after": "1h"}}
FOLLOW = {"inbox_period": "300ms", "inbox_keep": "1h"}  # answers stay until the last job is answered
ALL_DONE_MAX_S = 600.0


@contextlib.contextmanager
def delivered_to(root: Path, server: Seaweed) -> Iterator[MountedVolume]:
    """A volume in a bucket of the server; what is started meanwhile has its keys."""
    remote = {"url": f"s3://{server.bucket}/inbox", "endpoint_url": server.endpoint_url, "region": REGION}
    was = dict(os.environ)
    os.environ.update(server.environ())
    try:
        with mounted_volume(root, tenants=TENANTS, follow=FOLLOW, remote=remote, timeout_s=0) as volume:
            yield volume
    finally:
        os.environ.clear()
        os.environ.update(was)


class InboxRounds:
    """Of one volume, which is mounted."""

    def __init__(self, volume: MountedVolume, seed: int, say: Callable[[str], object] = lambda _: None) -> None:
        self._volume = volume
        self._rng = random.Random(seed)
        self._say = say
        self._remote = load_settings(volume.conf).remote

    def listed(self) -> list[BlobInfo]:
        store = open_remote(Env(), self._remote)
        try:
            return list(store.list("inbox/"))
        finally:
            store.close()

    def run(self, jobs: int, processes: int, kills: int) -> None:
        until(lambda: len([i for i in self.listed() if isinstance(parse_key(i.key), InboxDoorKey)]) == 2, "no doors")
        share = jobs // processes
        command = [sys.executable, "-m", "tests.mount.deliverer", str(self._volume.conf)]
        running = [
            subprocess.Popen([*command, str(n * share), str(share)], env=self._volume.environ())
            for n in range(processes)
        ]
        for n in range(kills):
            time.sleep(self._rng.uniform(0.2, 2.0))
            self._volume.kill()
            self._volume.remount()
            done = sum(info.key.endswith(".done") for info in self.listed())
            self._say(f"killed {n + 1} of {kills}: {done} jobs are answered")
        assert [p.wait() for p in running] == [0] * processes
        committed = {n for n in range(share * processes) if deliverer.fate(n) != deliverer.KILLED}
        names = {f"{deliverer.name_of(n)}.done" for n in committed}
        done = lambda: {i.key.rpartition("/")[2] for i in self.listed() if i.key.endswith(".done")}  # noqa: E731
        until(lambda: done() >= names, "not all jobs are answered", ALL_DONE_MAX_S)
        assert not [info.key for info in self.listed() if info.key.endswith(".refused")]
        self._check(committed)

    def _check(self, committed: set[int]) -> None:
        self._check_files({n for n in committed if not deliverer.is_of_records(n)})
        self._check_records({n for n in committed if deliverer.is_of_records(n)})
        attempts: dict[str, set[str]] = {}
        for info in self.listed():
            key = parse_key(info.key)
            if isinstance(key, InboxBlobKey | InboxPackKey):
                attempts.setdefault(key.job_id, set()).add(key.attempt)
        for number in committed:  # of two processes that put it one was committed, and what the other put went
            assert len(attempts[deliverer.name_of(number)]) == 1, number

    def _check_files(self, numbers: set[int]) -> None:
        top = self._volume.mountpoint / "default" / "jobs"
        assert {int(folder.name) for folder in top.iterdir()} == numbers
        for number in numbers:
            files = deliverer.files_of(number)
            folder = top / str(number)
            there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
            assert there == set(files), number
            for path, data in files.items():
                assert (folder / path).read_bytes() == data, (number, path)

    def _check_records(self, numbers: set[int]) -> None:
        found: list[int] = []
        for stream in sorted((self._volume.mountpoint / "events").iterdir()):
            payload = b"".join(path.read_bytes() for path in sorted(stream.glob("[0-9]*")))
            lines = payload.splitlines(keepends=True)
            for number, some in groupby(lines, key=lambda line: int(line.split()[0])):
                assert list(some) == deliverer.records_of(number), number
                found.append(number)
        assert sorted(found) == sorted(numbers)

    def keep_short(self) -> None:
        """From the next mount on nothing is kept for longer than a minute."""
        conf = self._volume.conf
        conf.write_text(conf.read_text().replace('inbox_keep = "1h"', 'inbox_keep = "1min"'))

    def is_clean(self, jobs: int) -> None:
        """After `inbox_keep` and another mount: doors, and what rows locate, are all that is left."""
        gone = {deliverer.name_of(n) for n in range(jobs) if deliverer.fate(n) == deliverer.KILLED}

        def is_swept() -> bool:
            keys = [parse_key(info.key) for info in self.listed()]
            blobs = [key for key in keys if isinstance(key, InboxBlobKey | InboxPackKey)]
            rest = [key for key in keys if key not in blobs]
            return all(isinstance(key, InboxDoorKey) for key in rest) and not {key.job_id for key in blobs} & gone

        until(is_swept, "the inbox is not swept", 60.0)
