"""A volume on a real S3 server that comes and goes, and a load that minds what it was told."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from aof2.fs.bench.seaweed import REGION
from tests.mount.load import content
from tests.mount.world import World, wait_for, world
from tests.support.seaweed import Seaweed


def s3_world(
    root: Path, server: Seaweed, prefix: str, *, timeout: str = "2s"
) -> contextlib.AbstractContextManager[World]:
    """Impatient with its remote: outages are short here."""
    remote = (
        f'[remote]\nurl = "s3://{server.bucket}/{prefix}"\nendpoint_url = "{server.endpoint_url}"\n'
        f'region = "{REGION}"\ntimeout = "{timeout}"\nretries = 1\n'
    )
    return world(root, remote=remote, environ=server.environ())


class BlinkingLoad:
    """Writes new files and reads all there are, in two threads. A read is right or EIO; a write always works."""

    def __init__(self, w: World, *, files_max: int = 3000) -> None:
        self.w = w
        self.files_max = files_max
        self.files: dict[str, bytes] = {}
        self.wrong: list[str] = []
        self.reads = self.refused = 0
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._write, self._read)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _guarded(self, work: object) -> None:
        assert callable(work)
        try:
            work()
        except Exception as e:
            self.wrong.append(f"{work}: {e!r}")

    def _write(self) -> None:
        for n in range(self.files_max):
            if self._stop.is_set():
                return
            data = content(n, 100_000)
            (self.w.files / f"f{n}").write_bytes(data)
            self.files[f"f{n}"] = data

    def _read(self) -> None:
        while not self._stop.is_set():
            for name, data in list(self.files.items()):
                if self._stop.is_set():
                    return
                try:
                    got = (self.w.files / name).read_bytes()
                except OSError as e:
                    if e.errno != errno.EIO:
                        raise
                    self.refused += 1
                else:
                    self.reads += 1
                    if got != data:
                        self.wrong.append(f"{name}: {len(got)} bytes, not what was written")


def comes_back(call: Callable[[], object]) -> None:
    """After an outage the remote is asked again only now and then: it may take a while to be noticed."""

    def works() -> bool:
        try:
            call()
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return False
        return True

    wait_for(works, "the remote to be noticed again")


def everything_is_there(w: World, files: dict[str, bytes]) -> None:
    """In the remote, and after a restart; and verify finds nothing."""
    w.ok("wait", w.files)
    w.ok("evict", w.files)
    comes_back((w.files / min(files)).read_bytes)
    compare(w, files)
    w.umount()
    w.verify("--remote")
    w.mount()
    w.ok("evict", w.files)
    compare(w, files)
    w.umount()


def compare(w: World, files: dict[str, bytes]) -> None:
    differ = [name for name, data in files.items() if (w.files / name).read_bytes() != data]
    assert differ == []
