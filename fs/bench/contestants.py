"""Who takes part: what every contestant can do, and the simplest of them, a plain directory.

A contestant lives in a folder of its own. `directory` is where its files go once it started; `drop` makes everything it
holds locally go away; `until_remote` returns when all that was written is in the remote. Any step may raise StepError.

Owner: the calling thread. `stop` always works, also after a failed start, and again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aof2.fs.bench.process import OWNER_NAME, Processes, StepError, end, is_mounted, unmount, wait_until
from aof2.fs.bench.seaweed import Seaweed

START_S = 60.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and how much of it."""

    size: int = 1 << 30
    files: int = 10_000
    rounds: int = 3
    ranges: int = 64
    random_s: float = 3.0
    create_budget_s: float = 60.0
    later_s: float = 5.0
    deadline_s: float = 300.0
    peers: Sequence[str] = ()
    with_aof2: bool = True
    only: Sequence[str] = ()


class Setup(msgspec.Struct, frozen=True):
    """What all contestants of a run share."""

    root: Path
    server: Seaweed
    processes: Processes
    plan: Plan

    @property
    def cache_bytes(self) -> int:
        return max(4 * self.plan.size, 1 << 30)


class Contestant:
    """One filesystem under test."""

    name = ""
    bucket = True  # whether its files are in a bucket with the name of its folder
    object_a_file = False  # whether each is an object of its path there

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.folder = setup.root / self.name.replace(" ", "-")
        self.folder.mkdir()

    @property
    def directory(self) -> Path:
        return self.folder

    def start(self) -> None:
        """Ready to be measured when this returns."""

    def stop(self) -> None:
        """Unmounted, its processes ended."""

    def settle(self) -> None:
        """Returns when names that were changed are where it keeps them for good."""

    def until_remote(self, path: Path) -> None:
        """Returns when what was written there is in the remote."""

    def drop(self, path: Path) -> None:
        """Nothing of that file is on this machine any more but in the server."""

    def fetched_bytes(self) -> int | None:
        """What came from the remote so far, by the server's count, which has no reason to flatter."""
        return self.setup.server.sent_bytes(self.folder.name)

    def requests(self) -> int | None:
        """What it has asked the server for so far, by the server's count; None where it does not ask its S3 side."""
        return self.setup.server.requests(self.folder.name) if self.bucket else None

    def marked(self, environ: dict[str, str]) -> dict[str, str]:
        """The environment of its daemons: their processor time is counted as this contestant's."""
        return {**environ, OWNER_NAME: self.name}


class Disk(Contestant):
    """A plain directory on the disk that holds all contestants' caches: named after its filesystem."""

    bucket = False

    def __init__(self, setup: Setup, name: str) -> None:
        self.name = name
        super().__init__(setup)


class Bare(Contestant):
    """No filesystem: boto3 alone, the same object in parallel ranges into a file."""

    name = "boto3"


class Mounted(Contestant):
    """A filesystem with a daemon in the foreground, a mount point and a cache folder."""

    programs: tuple[str, ...] = ()  # of one that is not installed: takes part where they are on PATH

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.mountpoint = self.folder / "mnt"
        self.cache = self.folder / "cache"
        self.log = self.folder / "log"
        self.daemon: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        return self.mountpoint

    @classmethod
    def on_path(cls) -> bool:
        return all(map(shutil.which, cls.programs))

    def command(self) -> list[str]:
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        return {**self.setup.server.environ(), "HOME": str(self.folder)}

    def start(self) -> None:
        self.mountpoint.mkdir(exist_ok=True)
        self.cache.mkdir(exist_ok=True)
        self.daemon = daemon = self.setup.processes.spawn(self.command(), self.log, self.marked(self.environ()))
        wait_until(lambda: is_mounted(self.mountpoint) or daemon.poll() is not None, START_S, f"{self.name} is mounted")
        if daemon.poll() is not None:
            raise StepError(f"{self.name} ended while mounting: {self.log_tail()}")
        self.setup.processes.run(["stat", self.mountpoint], deadline_s=START_S)

    def stop(self) -> None:
        unmount(self.setup.processes, self.mountpoint)
        end(self.daemon)
        self.daemon = None
        unmount(self.setup.processes, self.mountpoint, lazy=True)

    def drop(self, path: Path) -> None:
        """A mount with an empty cache; the kernel's pages went with the old one."""
        self.stop()
        self.setup.processes.run(["rm", "-rf", self.cache], deadline_s=self.setup.plan.deadline_s)
        self.start()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "its log is empty"
