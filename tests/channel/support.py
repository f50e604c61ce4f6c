"""Starting `tests/channel/daemon.py` on a mount that is always taken away again, and talking to it with time limits."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

PASSTHROUGH, RANGED = 1, 2
ALL_PRESENT, SUID, STILL = 1, 2, 4
MIB = 1 << 20
TOP = Path(__file__).resolve().parents[2]
CORE = [TOP / "native" / f"{name}.c" for name in ("crc", "crc_x86", "lines", "segment")]  # as setup.py has it
ANSWER_MAX_S = 20


def unmount(path: Path) -> None:
    """Lazily, without looking at the filesystem; nothing where nothing is mounted."""
    ctypes.CDLL(None).umount2(os.fsencode(path), 2)


def mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def in_time(work: Callable[[], Any], seconds: float = ANSWER_MAX_S) -> Any:
    """The result of something that may hang: it runs in a thread that is left behind when it does."""
    done: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def run() -> None:
        try:
            done.put((True, work()))
        except BaseException as e:
            done.put((False, e))

    threading.Thread(target=run, daemon=True).start()
    try:
        ok, value = done.get(timeout=seconds)
    except queue.Empty:
        raise AssertionError(f"no result in {seconds} s") from None
    if not ok:
        raise value
    return value


def run(*command: object, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds)


_built: dict[tuple[tuple[Path, ...], str, tuple[str, ...]], Path] = {}


def compiled(target: Path, sources: list[Path], sanitizer: str, *flags: str) -> Path:
    """C sources built by gcc with a sanitizer, or a skip where that cannot be. A warning is an error. What was built
    before is copied."""
    before = _built.get(key := (tuple(sources), sanitizer, flags))
    if before is not None and before.exists():
        shutil.copy2(before, target)
        return target
    if not shutil.which("gcc"):
        pytest.skip("no gcc here to build with")
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    probe = target.with_suffix(".probe.c")
    probe.write_text("int main(void) { return 0; }\n")
    if run("gcc", *sanitize, probe, "-o", target).returncode:
        pytest.skip(f"this gcc cannot link {sanitizer}")
    common = ["-g", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread"]
    built = run("gcc", *common, *flags, *sanitize, *sources, *CORE, "-o", target, "-llmdb")
    assert built.returncode == 0, built.stderr
    _built[key] = target
    return target


class Daemon:
    """The daemon and its mount. Calls are the methods `do_*` of daemon.Commands."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.mount, self.root = folder / "mnt", folder / "root"
        self.mount.mkdir(exist_ok=True)
        self.root.mkdir(exist_ok=True)
        self._stderr = open(folder / "stderr", "w+")
        lines, asked = os.pipe()
        answered, said = os.pipe()
        self._stdin, self._stdout = open(asked, "w"), open(answered)
        with open(lines), open(said):
            self.process = forked.start(
                ["daemon", str(self.mount), str(self.root), json.dumps(options)],
                env=os.environ,
                cwd=TOP,
                streams=(lines, said, self._stderr.fileno()),
                module="tests.channel.daemon",
            )
        self._answers: dict[int, queue.Queue[Any]] = {0: queue.Queue()}
        self._tag = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait(0)
            self.info = self.call("info")
        except BaseException:
            self.close()
            raise
        self.channel_pid: int = self.info["pid"]

    def _read(self) -> None:
        for line in self._stdout:
            message = json.loads(line)
            self._answers[message["tag"]].put(message)
        for waiting in list(self._answers.values()):
            waiting.put({"error": "the daemon ended"})

    def _wait(self, tag: int) -> Any:
        try:
            message = self._answers[tag].get(timeout=ANSWER_MAX_S)
        except queue.Empty:
            raise AssertionError(f"no answer from the daemon; stderr: {self.stderr()}") from None
        finally:
            del self._answers[tag]
        if "error" in message:
            raise AssertionError(f"{message['error']}; stderr: {self.stderr()}")
        return message["ok"]

    def start(self, cmd: str, **arguments: Any) -> Callable[[], Any]:
        """Asks; what comes back waits for the answer."""
        self._tag += 1
        tag = self._tag
        self._answers[tag] = queue.Queue()
        self._stdin.write(json.dumps({"tag": tag, "cmd": cmd, **arguments}) + "\n")
        self._stdin.flush()
        return lambda: self._wait(tag)

    def call(self, cmd: str, **arguments: Any) -> Any:
        return self.start(cmd, **arguments)()

    def ops(self, *kinds: str) -> list[Any]:
        return [op for op in self.call("ops") if not kinds or op[0] in kinds]

    def file(self, name: str, data: bytes) -> Path:
        """A file in the folder below; returns its path in the mount."""
        (self.root / name).write_bytes(data)
        return self.mount / name

    def stderr(self) -> str:
        self._stderr.flush()
        return (self.mount.parent / "stderr").read_text()

    def channel_files(self) -> list[str]:
        """What the channel has open."""
        found = []
        for fd in Path(f"/proc/{self.channel_pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(fd))
        return found

    def channel_alive(self) -> bool:
        """Whether a thread of it still runs: one that hangs in the kernel keeps the mount alive."""
        try:
            tasks = list(Path(f"/proc/{self.channel_pid}/task").iterdir())
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return any(state not in "ZX" for state in states)

    def close(self) -> None:
        unmount(self.mount)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._reader.join(5)
        self._stderr.close()
        unmount(self.mount)
