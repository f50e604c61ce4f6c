"""Rounds of: processes change names at once, a kill, the next mount, what each of them was told compared with the tree.
`test_at_once.py` runs a few, `scripts/torture names` as many as asked.

A process has its journal (`changers.py`): every change that was answered is there, in order, and nothing that was not
asked for; the one that was under way is there or not.

Owner: the caller, who has the volume.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.mount.changers import CURRENT, SHARED, Told, differences, may_be_current
from tests.support.mount import MountedVolume, until

KINDS = ("daemon", "channel", "both", "recovering")
ROUNDS_KEPT = 3
END_MAX_S = 60.0
PROJECT = Path(__file__).parents[2]
# Said by the daemon, and by libfuse in it, when the channel was killed.
CHANNEL_KILLED = ("the channel ended by itself", "short read on fuse", "fuse: reading device", "Broken pipe")


class NameRounds:
    def __init__(self, volume: MountedVolume, journals: Path, seed: int, *, processes: int) -> None:
        self.volume = volume
        self.journals = journals
        self.rng = random.Random(seed)
        self.processes = processes
        self.number = 0
        self.answered = 0
        self.told: dict[Path, list[Told]] = {}  # by the directory of a round
        journals.mkdir(exist_ok=True)

    def one(self, kind: str, changes: int) -> None:
        """AssertionError when something that was answered is not there, or something that was not asked for is."""
        self.number += 1
        top = self.volume.path / f"r{self.number}"
        for name in SHARED:
            (top / name).mkdir(parents=True)
        self.told[top] = self._until_killed(top, kind, changes)
        if kind == "recovering":
            self._kill_while_mounting()
        self.volume.remount()
        for folder, told in self.told.items():
            for one in told:
                self._check(folder, one, f"round {self.number}, {kind}, {folder.name}")
            replaced = [put for one in told for put in one.replaced]
            assert not replaced or may_be_current((folder / CURRENT).stat().st_ino, replaced)
        self.answered += sum(one.answered for one in self.told[top])
        while len(self.told) > ROUNDS_KEPT:
            folder = next(iter(self.told))
            del self.told[folder]
            shutil.rmtree(folder)

    def is_clean(self) -> None:
        """Unmounts: the log says nothing, and verify finds nothing."""
        told = [line for line in self.volume.complaints() if not any(said in str(line) for said in CHANNEL_KILLED)]
        assert not told, told[:5]
        self.volume.umount()
        verified = self.volume.aof2("verify", "--remote", timeout_s=600)
        assert not verified.returncode, verified.stdout + verified.stderr

    # -- parts -------------------------------------------------------------------------------------------------

    def _until_killed(self, top: Path, kind: str, changes: int) -> list[Told]:
        """After so many changes of each process."""
        journals = [self.journals / f"r{self.number}-{i}.jsonl" for i in range(self.processes)]
        running = [self._start(top, i, journal) for i, journal in enumerate(journals)]
        for process in running:
            assert process.stdout is not None
            while int(process.stdout.readline()) < changes:
                pass
        self._kill(kind)
        for process in running:
            process.communicate(timeout=END_MAX_S)
            assert not process.returncode, f"a process ended badly, see {self.journals}"
        return [Told(journal) for journal in journals]

    def _start(self, top: Path, i: int, journal: Path) -> subprocess.Popen[str]:
        words = [top, str(i), str(self.rng.getrandbits(32)), journal]
        command = [sys.executable, "-m", "tests.mount.changers", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT)

    def _kill(self, kind: str) -> None:
        daemon, channel = self.volume.daemon_pid(), self.volume.channel_pid()
        order = {"channel": [channel], "both": [daemon, channel]}.get(kind, [daemon])
        for pid in order if self.rng.random() < 0.5 else reversed(order):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.volume.pids(), "one of them lives on", END_MAX_S)

    def _kill_while_mounting(self) -> None:
        """Somewhere in a recovery, or just after it."""
        for _ in range(self.rng.randint(1, 3)):
            mounting = self.volume.mounting()
            time.sleep(self.rng.uniform(0.2, 1.5))
            for pid in {mounting.pid, *self.volume.pids()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            mounting.wait(END_MAX_S)
            until(lambda: not self.volume.pids(), "one of them lives on", END_MAX_S)

    def _check(self, top: Path, one: Told, when: str) -> None:
        found = [differences(nodes, top, one.own) for nodes in one.allowed()]
        assert not all(found), f"{when}, {one.own}, then {one.pending}: {min(found, key=len)[:10]}"
