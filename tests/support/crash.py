"""A machine that can lose power: run a workload in a child, kill it at a named point, then drop unsynced pages.

`run_until_crash(workload, root, point, nth)` forks. The child runs `workload(env, acks)` with a CrashEnv whose files
remember, at each fsync, what the disk then held; at the nth hit of `point` it is killed with SIGKILL. `PowerLoss` then
builds what a disk may hold afterwards: every synced byte, any subset of the unsynced pages, and any prefix of the
directory operations not yet synced (a journalling filesystem keeps their order).

`nth=None` never kills: the workload runs to its end, and power is lost after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aof2.engine.env import Env, Files
from tests.support import LONG

PAGE = 4096


class ShadowFiles(Files):
    """Real file operations, plus a journal in `shadow` of what is durable: one image a synced inode, one line an op."""

    def __init__(self, root: Path, shadow: Path) -> None:
        self.root = root
        self.shadow = shadow
        shadow.mkdir(parents=True, exist_ok=True)
        self.journal_fd = os.open(shadow / "ops.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _outside(self, path: Path) -> bool:
        """What is not on the machine that loses power: a remote."""
        return not Path(path).is_relative_to(self.root)

    def _log(self, **fields: object) -> None:
        os.write(self.journal_fd, (json.dumps(fields) + "\n").encode())

    def _name(self, path: Path) -> str:
        return str(Path(path).relative_to(self.root))

    def _keep(self, path: Path) -> int:
        """Keeps the inode reachable for the reconstruction whatever happens to its name."""
        ino = os.stat(path).st_ino
        with contextlib.suppress(FileExistsError):
            os.link(path, self.shadow / f"inode-{ino}")
        return ino

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        super().mkdir(path, mode)
        if self._outside(path):
            return
        self._log(op="mkdir", name=self._name(path))

    def create(self, path: Path, mode: int = 0o600) -> int:
        fd = super().create(path, mode)
        if self._outside(path):
            return fd
        self._log(op="create", name=self._name(path), ino=self._keep(path))
        return fd

    def rename(self, old: Path, new: Path) -> None:
        if self._outside(old):
            super().rename(old, new)
            return
        ino = self._keep(old)
        super().rename(old, new)
        self._log(op="rename", name=self._name(old), to=self._name(new), ino=ino)

    def unlink(self, path: Path) -> None:
        if self._outside(path):
            super().unlink(path)
            return
        self._keep(path)
        super().unlink(path)
        self._log(op="unlink", name=self._name(path))

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}") or self._outside(Path(os.readlink(f"/proc/self/fd/{fd}"))):
            return
        with open(f"/proc/self/fd/{fd}", "rb") as source:
            data = source.read()
        ino = os.fstat(fd).st_ino
        temp = self.shadow / f"image-{ino}-{threading.get_ident()}.tmp"  # several threads sync at once
        temp.write_bytes(data)
        temp.rename(self.shadow / f"durable-{ino}")

    def fsync_all(self, fds: Sequence[int]) -> None:
        for fd in fds:
            self.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        if self._outside(path):
            return
        self._log(op="sync_dir", name="." if Path(path) == self.root else self._name(path))


class CrashEnv(Env):
    """An Env that counts the failpoints it passes and dies at one of them."""

    def __init__(
        self,
        files: Files,
        point: str | None,
        nth: int,
        seed: int = 0,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(files=files, seed=seed, now_ms=now_ms)
        self.point = point
        self.left = nth

    def failpoint(self, name: str) -> None:
        if name == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class CountingEnv(Env):
    """Records which failpoints were passed, how often."""

    def __init__(self, files: Files | None = None, seed: int = 0) -> None:
        super().__init__(files=files, seed=seed)
        self.hits: dict[str, int] = {}

    def failpoint(self, name: str) -> None:
        self.hits[name] = self.hits.get(name, 0) + 1


class Acks:
    """What the workload was promised, told line by line so that a kill loses none of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, value: object) -> None:
        with open(self.path, "a") as f:
            f.write(json.dumps(value) + "\n")

    def told(self) -> list[object]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclass(frozen=True)
class Crash:
    """What is left after the child ended: the live folder, the shadow journal, the acknowledgements."""

    root: Path
    shadow: Path
    acks: list[object]
    killed: bool


Workload = Callable[[Env, Acks], None]


def is_killed(work: Callable[[], object], point: str | None) -> bool:
    """Runs it in a child that dies at `point`; False when it came to its end before. To fail is neither."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child failed before {point}: wait status {status}"
    return killed


def run_until_crash(workload: Workload, base: Path, point: str | None, nth: int = 1) -> Crash:
    """Runs `workload` on `base/live` in a child that dies at the nth `point` (None: runs to its end)."""
    root, shadow = base / "live", base / "shadow"
    root.mkdir(parents=True)
    acks = Acks(base / "acks")
    killed = is_killed(lambda: workload(CrashEnv(ShadowFiles(root, shadow), point, nth), acks), point)
    return Crash(root, shadow, acks.told(), killed)


class PowerLoss:
    """Disks that could be found after `crash`, one a call of `disk`."""

    def __init__(self, crash: Crash, unit: int = PAGE) -> None:
        self.crash = crash
        self.unit = unit
        journal = crash.shadow / "ops.jsonl"
        # A kill can cut the journal's last line; an operation without its line simply did not happen yet.
        self.ops: list[dict[str, object]] = []
        for line in journal.read_text().splitlines() if journal.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                self.ops.append(json.loads(line))

    def disk(self, target: Path, rng: random.Random) -> Path:
        """Builds one in `target`, chosen by `rng`."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        journaled = {str(op["name"]) for op in self.ops if op["op"] == "mkdir"}
        names, folders = self._names(rng)
        for folder in sorted(p for p in self.crash.root.rglob("*") if p.is_dir()):
            name = str(folder.relative_to(self.crash.root))
            # Folders made behind our back were there before; those we saw being made may be lost with what is in them.
            if name not in journaled or name in folders:
                (target / name).mkdir(parents=True, exist_ok=True)
        for name, ino in names.items():
            if (target / name).parent.is_dir():
                (target / name).write_bytes(self._content(ino, rng))
        return target

    def _names(self, rng: random.Random) -> tuple[dict[str, int], set[str]]:
        """Files and folders whose names made it to the disk."""
        synced_through: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            if op["op"] == "sync_dir":
                synced_through[str(op["name"])] = i
        cut: dict[str, int] = {}
        names: dict[str, int] = {}
        folders: set[str] = set()
        for i, op in enumerate(self.ops):
            if op["op"] == "sync_dir":
                continue
            folder = str(Path(str(op["name"])).parent)
            if folder not in cut:
                cut[folder] = rng.randint(synced_through.get(folder, -1), len(self.ops))
            if i > cut[folder]:
                continue
            if op["op"] == "mkdir":
                folders.add(str(op["name"]))
            elif op["op"] == "create":
                names[str(op["name"])] = int(str(op["ino"]))
            elif op["op"] == "rename":
                names.pop(str(op["name"]), None)
                names[str(op["to"])] = int(str(op["ino"]))
            else:
                names.pop(str(op["name"]), None)
        return names, folders

    def _content(self, ino: int, rng: random.Random) -> bytes:
        live = (self.crash.shadow / f"inode-{ino}").read_bytes()
        image = self.crash.shadow / f"durable-{ino}"
        durable = image.read_bytes() if image.exists() else b""
        # The length is metadata: either the synced one or the newest.
        length = len(durable) if rng.random() < 0.3 else len(live)
        chance = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        out = bytearray(length)
        for start in range(0, length, self.unit):
            end = min(start + self.unit, length)
            source = live if rng.random() < chance else durable
            piece = source[start:end]
            out[start : start + len(piece)] = piece
        return bytes(out)


def hits_of(workload: Workload, base: Path) -> dict[str, int]:
    """How often an undisturbed run passes each failpoint: the axis of a crash matrix."""
    root = base / "count"
    root.mkdir(parents=True)
    files = ShadowFiles(root, base / "count-shadow")
    env = CountingEnv(files)
    workload(env, Acks(base / "count-acks"))
    os.close(files.journal_fd)
    return env.hits


def crash_cases(hits: dict[str, int], points: tuple[str, ...], per_point_max: int = 3) -> Iterator[tuple[str, int]]:
    """(point, nth) for every named point, from its first pass to its last; in a long run four times as many. A point
    that is never passed is a hole in the matrix and an error."""
    missing = [p for p in points if p not in hits]
    assert not missing, f"the workload never passes {missing}"
    for point in points:
        last, most = hits[point] - 1, per_point_max * 4 if LONG else per_point_max
        for nth in sorted({1 + last * i // max(1, most - 1) for i in range(most)}):
            yield point, nth
