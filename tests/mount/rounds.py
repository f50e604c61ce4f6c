"""Rounds of: load, kill, mount again, compare. `test_kill.py` runs a few, `scripts/torture kill` as many as asked.

A round: some files are made, uploaded and evicted, so that they are cold; writers start; something is killed with
SIGKILL at a random moment; the volume is mounted again and every writer's directory compared with its journal; what was
there in earlier rounds is compared again; unmounted, the volume verifies clean. Now and then everything is evicted
and read back from the remote before that.

Owner: the caller, who has the world.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.mount import model
from tests.mount.load import content
from tests.mount.world import HANG_S, World, alive, children, is_mounted, kill, name_of, refuses, says, wait_for

WRITERS = 3
COLD_FILES = 5
ROUNDS_KEPT = 3
KINDS = ("daemon", "daemon", "daemon", "channel", "both", "mounting", "unmounting")
PROJECT = Path(__file__).parents[2]


def photograph(top: Path) -> dict[str, tuple[object, ...]]:
    """Every name below, and what is behind it, in short."""
    out: dict[str, tuple[object, ...]] = {}
    for path in model.walk(top):
        st = path.lstat()
        what: tuple[object, ...] = (stat.filemode(st.st_mode), st.st_nlink if not stat.S_ISDIR(st.st_mode) else 0)
        if stat.S_ISREG(st.st_mode):
            what += (st.st_size, hashlib.sha256(path.read_bytes()).hexdigest(), model.note_of(path))
        elif stat.S_ISLNK(st.st_mode):
            what += (os.readlink(path),)
        out[str(path.relative_to(top))] = what
    return out


class Rounds:
    def __init__(self, world: World, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.say = say
        self.number = 0
        self.kept: dict[str, dict[str, tuple[object, ...]]] = {}
        self.acknowledged = 0

    def run(self, times: int, kinds: tuple[str, ...] = KINDS) -> None:
        for _ in range(times):
            self.one(self.rng.choice(kinds))

    def one(self, kind: str) -> None:
        """AssertionError when anything acknowledged is not there, or verify is not clean."""
        world, self.number = self.world, self.number + 1
        began_s = time.monotonic()
        if not is_mounted(world.mnt):
            world.mount()
        top = world.files / f"r{self.number}"
        starts = self._prepare(top)
        writers = [self._start(top / f"w{i}", i) for i in range(WRITERS)]
        time.sleep(self.rng.uniform(0.2, 3.0))
        self._kill(kind)
        for process in writers:
            # A mapping whose pages nobody can bring any more is a SIGBUS.
            assert process.wait(HANG_S) in (0, -signal.SIGBUS), f"a writer ended badly, see {self._journal(0).parent}"
        self._mount_again(kind)
        acknowledged = 0
        for i, start in enumerate(starts):
            trees, count = model.replay(start, self._journal(i))
            model.check(trees, top / f"w{i}")
            acknowledged += count
        self.acknowledged += acknowledged
        self.kept[top.name] = photograph(top)
        self._check_kept("after the mount")
        if self.rng.random() < 0.3:
            world.ok("evict", world.files)
            self._check_kept("from the remote")
        self._forget_old()
        world.umount()
        world.verify(*(["--remote"] if self.rng.random() < 0.3 else []))
        self.say(
            f"round {self.number}: killed {kind}; {acknowledged} operations acknowledged, all there; "
            f"verify clean; {time.monotonic() - began_s:.1f} s"
        )

    # -- parts -------------------------------------------------------------------------------------------------

    def _journal(self, writer: int) -> Path:
        return self.world.root / "journals" / f"r{self.number}-w{writer}.jsonl"

    def _prepare(self, top: Path) -> list[model.Tree]:
        """A directory a writer, with cold files in it."""
        starts = []
        top.mkdir()
        self._journal(0).parent.mkdir(exist_ok=True)
        for i in range(WRITERS):
            folder = top / f"w{i}"
            folder.mkdir()
            for k in range(COLD_FILES):
                data = content(self.rng.getrandbits(40), self.rng.choice((100, 50_000, 1_500_000, 2_500_000)))
                (folder / f"cold{k}").write_bytes(data)
            starts.append(model.load_tree(folder, cold=True))
        if self.rng.random() < 0.7:
            self.world.ok("evict", top)
        return starts

    def _start(self, folder: Path, i: int) -> subprocess.Popen[bytes]:
        seed = str(self.rng.getrandbits(32))
        command = [sys.executable, "-m", "tests.mount.load", str(folder), str(self._journal(i)), seed]
        return subprocess.Popen(command, cwd=PROJECT)

    def _kill(self, kind: str) -> None:
        world = self.world
        daemon, channel = world.daemon_pid(), world.channel_pid()
        if kind == "unmounting":
            with contextlib.suppress(subprocess.TimeoutExpired):
                # In use, so a plain umount would not start: SIGTERM lets go of the mount, whoever uses it.
                os.kill(daemon, 15)
                time.sleep(self.rng.uniform(0, 1.0))
            kill(daemon)
        elif kind == "channel":
            kill(channel)
            wait_for(lambda: not alive(daemon), "the daemon to end after its channel")
        elif kind == "both":
            os.kill(daemon, 9)
            kill(channel)
            kill(daemon)
        else:
            kill(daemon)
        wait_for(lambda: not alive(channel), "the channel to end after its daemon")
        # In this order: one that was let go of may leave between the two.
        if not refuses(world.mnt) and is_mounted(world.mnt):
            raise AssertionError(f"killed {kind}, and the mount answers: {says(world.mnt)}, then {says(world.mnt)}")

    def _mount_again(self, kind: str) -> None:
        if kind == "mounting":
            for _ in range(self.rng.randint(1, 3)):
                self._kill_while_mounting()
        self.world.mount()

    def _kill_while_mounting(self) -> None:
        process = subprocess.Popen(
            self.world.command("mount"), env=self.world.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(self.rng.uniform(0.2, 0.9))
        family = [process.pid, *children(process.pid)]
        for pid in list(family):
            family += [child for child in children(pid) if child not in family]
        if process.poll() is not None:  # it was quicker
            with contextlib.suppress(AssertionError, StopIteration):
                family.append(self.world.daemon_pid())
        for pid in family:
            if name_of(pid) in ("aof2", "aof2-channel"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        process.wait(HANG_S)

    def _check_kept(self, when: str) -> None:
        for name, was in self.kept.items():
            now = photograph(self.world.files / name)
            changed = [path for path in was.keys() | now.keys() if was.get(path) != now.get(path)]
            assert not changed, f"{when}, {name} changed: {[(p, was.get(p), now.get(p)) for p in changed[:5]]}"

    def _forget_old(self) -> None:
        while len(self.kept) > ROUNDS_KEPT:
            name = next(iter(self.kept))
            shutil.rmtree(self.world.files / name)
            del self.kept[name]
