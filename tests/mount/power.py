"""Rounds of: processes change and sync names, the disk of state_dir loses its power, the next mount, what each of them
was told compared with the tree. `test_power.py` runs a few, `scripts/torture power` as many as asked.

The disk is ext4 in a file that is shut down without a flush of its journal: what was not synced is gone. What a process
was told before its last sync is there; of what came later, all up to some change, in order.

Owner: the caller, who has the volume and its disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.mount.changers import SHARED, Told, differences_from, own_paths
from tests.support.loop import LoopDisk, loop_disk
from tests.support.mount import MountedVolume, mounted_volume, until

PROCESSES = 3
DISK_BYTES = 400 << 20
END_MAX_S = 60.0
PROJECT = Path(__file__).parents[2]


@contextlib.contextmanager
def on_a_disk(folder: Path, *, options: list[str], timeout_s: float) -> Iterator[tuple[MountedVolume, LoopDisk]]:
    """A mount whose state is on a disk of its own, and its remote elsewhere."""
    with (
        loop_disk(folder, size_bytes=DISK_BYTES) as disk,
        mounted_volume(
            disk.path / "v",
            options=options,
            timeout_s=timeout_s,
            remote={"url": f"file://{folder / 'remote'}"},
            cache={"hot_bytes": "128MiB"},
        ) as volume,
    ):
        disk.sync()
        yield volume, disk


class PowerRounds:
    def __init__(self, volume: MountedVolume, disk: LoopDisk, journals: Path, seed: int) -> None:
        self.volume = volume
        self.disk = disk
        self.journals = journals
        self.rng = random.Random(seed)
        self.number = 0
        self.answered = 0
        self.lost = 0  # changes that were answered, not synced, and are gone
        journals.mkdir(exist_ok=True)

    def one(self, changes: int) -> None:
        """AssertionError when something that was synced is not there, or the tree is none that ever was."""
        self.number += 1
        top = self.volume.path / f"r{self.number}"
        for name in SHARED:
            (top / name).mkdir(parents=True)
        _sync(top)
        told = self._until_cut(top, changes)
        self._power_up()
        self.volume.mount()
        for one in told:
            self._check(top, one)
            self.answered += one.answered
        self.volume.umount()
        verified = self.volume.aof2("verify", "--remote")
        assert not verified.returncode, verified.stdout + verified.stderr
        self.volume.mount()
        shutil.rmtree(top)

    # -- parts -------------------------------------------------------------------------------------------------

    def _until_cut(self, top: Path, changes: int) -> list[Told]:
        journals = [self.journals / f"r{self.number}-{i}.jsonl" for i in range(PROCESSES)]
        running = []
        for i, journal in enumerate(journals):
            words = [top, str(i), str(self.rng.getrandbits(32)), journal, "sync"]
            command = [sys.executable, "-m", "tests.mount.changers", *words]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT))
        for process in running:
            assert process.stdout is not None
            while int(process.stdout.readline()) < changes:
                pass
        # The power takes them all at once. An fsync that the cut meets midway may still be answered as done, by a
        # filesystem that is half shut down: nothing of the volume is to hear of that.
        pids = self.volume.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(map(_is_stopped, pids)), "one of them does not stop", END_MAX_S)
        self.disk.cut()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.volume.pids(), "one of them lives on", END_MAX_S)
        for process in running:
            process.communicate(timeout=END_MAX_S)
            assert not process.returncode, f"a process ended badly, see {self.journals}"
        return [Told(journal) for journal in journals]

    def _power_up(self) -> None:
        subprocess.run(["umount", "-l", self.volume.mountpoint], check=True, timeout=END_MAX_S)
        until(self.disk.let_go, "the disk is in use", END_MAX_S)  # a request that fails may still hold it
        self.disk.power_up()
        trust = self.volume.state_dir / "catalog" / "trust.json"
        with contextlib.suppress(FileNotFoundError, ValueError):  # power comes back with a boot
            trust.write_text(json.dumps(json.loads(trust.read_text()) | {"boot_id": "before"}))

    def _check(self, top: Path, one: Told) -> None:
        allowed = one.allowed_after_power_loss()
        there = own_paths(top, one.own)
        alike = [at for at, nodes in enumerate(allowed) if nodes.keys() == there.keys()] or [0]
        found = {at: differences_from(allowed[at], top, there) for at in alike}
        least = min(found, key=lambda at: len(found[at]))
        assert not found[least], f"round {self.number}, {one.own}: {found[least][:10]} of {len(allowed)} that may be"
        self.lost += len(allowed) - 1 - least


def _is_stopped(pid: int) -> bool:
    """Every thread of it, so none is inside a system call."""
    try:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread ended meanwhile
    return all(state in "TZX" for state in states)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
