"""Processes and mounts of a run: everything has a deadline, and nothing outlives the run.

Every process started here carries a token of the run in its environment, so a daemon that went to the background is
found again and ended, and no process from outside the run is. A mount point is looked up in the mount table, never
touched: a filesystem whose daemon hangs would hang the run.

Owner: the calling thread. A killed run leaves its folder and its mounts; `umount -l` on them is the way out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from aof2.fs.mountpoint import mounted_at, mounts

MARK_NAME: Final = "AOF2_BENCH_RUN"
OWNER_NAME: Final = "AOF2_BENCH_OWNER"
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
# A run is quiet when its processes take less than this share of one core.
QUIET_SHARE: Final = 0.1
QUIET_LOOK_S: Final = 0.2
KILL_WAIT_S: Final = 10.0
UMOUNT_S: Final = 30.0


class StepError(Exception):
    """A step of a contestant failed or ran out of time; the message is one line. Who failed sits out."""


class Processes:
    """Starts processes that carry the run's token, and ends whatever still carries it."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._mark = f"{MARK_NAME}={self.token}".encode()

    def run(self, argv: Sequence[str | Path], *, deadline_s: float, env: Mapping[str, str] | None = None) -> str:
        """What it printed. Into a file, not a pipe: a daemon it leaves behind may keep that open."""
        name = Path(argv[0]).name
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self._popen(argv, out.fileno(), err.fileno(), env)
            try:
                code = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise StepError(f"{name} took longer than {deadline_s:g} s") from None
            finally:
                if process.poll() is None:
                    _kill_group(process)
            out.seek(0)
            err.seek(0)
            if code:
                said = (err.read() or out.read()).decode(errors="replace").strip().splitlines()
                raise StepError(f"{name} ended with {code}: {said[-1] if said else 'it said nothing'}")
            return out.read().decode(errors="replace")

    def spawn(
        self, argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with open(log, "ab") as f:
            process = self._popen(argv, f.fileno(), f.fileno(), env)
        self._spawned.append(process)
        return process

    def _popen(
        self, argv: Sequence[str | Path], out: int, err: int, env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **(env or {}), MARK_NAME: self.token}
        try:
            return subprocess.Popen(
                [str(a) for a in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                start_new_session=True,
            )
        except OSError as e:
            raise StepError(f"{argv[0]}: {(e.strerror or str(e)).lower()}") from None

    def alive(self, owner: str | None = None) -> list[int]:
        """Processes of the run; with `owner`, those that were started with its name in OWNER_NAME."""
        wanted = {self._mark} if owner is None else {self._mark, f"{OWNER_NAME}={owner}".encode()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                        found.append(int(entry.name))
        return found

    def processor_s(self, owner: str | None = None) -> float:
        """User and system time that the living processes of an owner, or of the whole run, have taken so far."""
        return sum(map(_processor_s, self.alive(owner)))

    def quiet(self, deadline_s: float) -> None:
        """Returns when the run's processes are idle, or at the deadline.

        Work that an earlier turn left behind (uploads, sealing) takes a core from the next, or keeps it awake for it.
        """
        give_up = time.monotonic() + deadline_s
        before = self.processor_s()
        while self.alive() and time.monotonic() < give_up:
            time.sleep(QUIET_LOOK_S)
            now = self.processor_s()
            if now - before < QUIET_SHARE * QUIET_LOOK_S:
                return
            before = now

    def end_all(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.alive():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            with contextlib.suppress(StepError):
                wait_until(lambda: not self.alive(), KILL_WAIT_S / 2, "processes of the run end")
        for process in self._spawned:
            process.poll()


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Asks, waits, insists. A process stuck in the kernel is left behind rather than waited for."""
    if process is None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)
    if process.poll() is None:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _processor_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it ended
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, pause_s: float = 0.05) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up:
            raise StepError(f"waited {deadline_s:g} s until {what}")
        time.sleep(pause_s)


# -- mounts ------------------------------------------------------------------------------------------------------


def mounts_under(folder: Path) -> list[Path]:
    """Mount points at or below a folder, the deepest first, from the mount table."""
    top = os.path.realpath(folder)
    found = [entry.mountpoint for entry in mounts() if entry.mountpoint.is_relative_to(top)]
    return sorted(found, key=lambda p: len(p.parts), reverse=True)


def is_mounted(mountpoint: Path) -> bool:
    return mounted_at(mountpoint) is not None


def unmount(processes: Processes, mountpoint: Path, *, lazy: bool = False) -> None:
    """Unmounts when it is mounted; lazily when the ordinary way fails. Never raises: it is what cleaning up calls."""
    for is_lazy in (True,) if lazy else (False, True):
        if not is_mounted(mountpoint):
            return
        options = ["-l"] if is_lazy else []
        command = ["umount", *options] if os.geteuid() == 0 else ["fusermount3", "-uz" if is_lazy else "-u"]
        with contextlib.suppress(StepError):
            processes.run([*command, mountpoint], deadline_s=UMOUNT_S)


def remove_folder(processes: Processes, folder: Path) -> None:
    """Unmounts what is mounted below, then removes. A folder with a mount that stays is left alone."""
    for mountpoint in mounts_under(folder):
        unmount(processes, mountpoint, lazy=True)
    if not mounts_under(folder):
        shutil.rmtree(folder, ignore_errors=True)
