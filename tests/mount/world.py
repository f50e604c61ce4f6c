"""A mounted volume to be rough with: its conf, its daemon and channel by pid, and the `aof2` command as users run it.

Everything is under one folder: `mnt`, `state`, `remote`. Nothing here asserts on time; what must come back has a
deadline only so that a hang is a failure and not a stuck test.

Owner: the test that made it; `close` leaves no process and no mount behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aof2.fs.mountpoint import NO_DAEMON
from tests.support import forked

HANG_S = 120.0
TENANT = "default"


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class World:
    """One volume in a folder of its own."""

    def __init__(
        self, root: Path, *, conf: str = "", remote: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.mnt = root / "mnt"
        self.state = root / "state"
        self.conf = root / "mount.conf"
        self.environ = {**os.environ, **(environ or {})}
        root.mkdir(parents=True, exist_ok=True)
        self.conf.write_text(
            f'[volume]\nmountpoint = "{self.mnt}"\nstate_dir = "{self.state}"\n'
            f'[metrics]\nlisten = ""\n'
            + (remote or f'[remote]\nurl = "file://{root / "remote"}"\n')
            + (conf or f'[tenants.{TENANT}]\nkind = "files"\n')
        )

    @property
    def files(self) -> Path:
        """The tenant's directory in the mount."""
        return self.mnt / TENANT

    # -- the command -------------------------------------------------------------------------------------------

    def command(self, verb: str, *args: object) -> list[str]:
        return [str(Path(sys.executable).with_name("aof2")), *verb.split(), *map(str, args), "--conf", str(self.conf)]

    def run(self, verb: str, *args: object, hang_s: float = HANG_S) -> Done:
        done = forked.run(self.command(verb, *args), env=self.environ, timeout=hang_s)
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, verb: str, *args: object, hang_s: float = HANG_S) -> str:
        """Runs it; AssertionError with everything it said when it did not end well."""
        done = self.run(verb, *args, hang_s=hang_s)
        assert done.code == 0, f"aof2 {verb} {args}: exit {done.code}\n{done.out}{done.err}\n{self.log_tail()}"
        return done.out

    def mount(self) -> None:
        self.ok("mount")

    def umount(self, *args: str) -> None:
        self.ok("umount", *args)

    def verify(self, *args: str) -> None:
        """fsck's 0: clean, and nothing was corrected."""
        done = self.run("verify", *args, hang_s=10 * HANG_S)
        assert done.code == 0, f"aof2 verify: exit {done.code}\n{done.out}{done.err}"

    def json(self, verb: str, *args: object) -> object:
        return json.loads(self.ok(verb, *args, "--json"))

    def json_lines(self, verb: str, *args: object) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.ok(verb, *args, "--json").splitlines()]

    # -- processes ---------------------------------------------------------------------------------------------

    def daemon_pid(self) -> int:
        """Of the daemon that mounted last."""
        lines = (self.state / "daemon.log").read_text().splitlines()
        return next(int(row["pid"]) for row in map(_parsed, reversed(lines)) if row.get("message") == "mounted")

    def channel_pid(self) -> int:
        found = [pid for pid in children(self.daemon_pid()) if name_of(pid).startswith("aof2-channel")]
        assert len(found) == 1, f"channels of daemon {self.daemon_pid()}: {found}"
        return found[0]

    def log_tail(self, n: int = 4000) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.state / "daemon.log").read_text(errors="replace")[-n:]
        return ""

    def complaints(self) -> list[str]:
        """Lines of the daemon's log that are not a normal life."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.state / "daemon.log").read_text(errors="replace").splitlines()
            return [line for line in lines if _parsed(line).get("level") not in ("INFO", "DEBUG")]
        return []

    def close(self) -> None:
        """Whatever state it is in: no process, no mount."""
        with contextlib.suppress(Exception):
            for pid in (self.channel_pid(), self.daemon_pid()):
                kill(pid)
        with contextlib.suppress(Exception):
            kill(self.daemon_pid())
        for _ in range(3):
            if not is_mounted(self.mnt):
                break
            subprocess.run(["umount", "-l", str(self.mnt)], check=False, capture_output=True)


@contextlib.contextmanager
def world(root: Path, **kw: object) -> Iterator[World]:
    made = World(root, **kw)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def _parsed(line: str) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    return {"level": "TRACEBACK", "message": line}


def is_mounted(path: Path) -> bool:
    return any(line.split()[4] == os.fsencode(path) for line in Path("/proc/self/mountinfo").read_bytes().splitlines())


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def rss_bytes(pid: int) -> int:
    """What it holds in memory; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def kill(pid: int) -> None:
    """SIGKILL, and returns when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), f"process {pid} to end")


def wait_for(condition: object, what: str, hang_s: float = HANG_S) -> None:
    assert callable(condition)
    give_up = time.monotonic() + hang_s
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"waited {hang_s:.0f} s for {what}")
        time.sleep(0.02)


def says(path: Path) -> int:
    """What the mount there answers: 0 or an errno. Asked by a process that may hang without harm."""
    code = "import os, sys\ntry: os.statvfs(sys.argv[1])\nexcept OSError as e: sys.exit(e.errno)\n"
    return subprocess.run([sys.executable, "-c", code, str(path)], timeout=HANG_S, check=False).returncode


def refuses(path: Path) -> bool:
    """Whether the mount there says that no daemon is behind it."""
    return says(path) in NO_DAEMON
