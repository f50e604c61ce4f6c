"""A real mount for tests: a conf in a folder, `aof2 mount` as a user would call it, and an end that always comes.

    with mounted_volume(tmp_path, options=["nopassthrough"], cache={"hot_bytes": "64MiB"}) as volume:
        (volume.path / "file").write_bytes(b"…")
        volume.evict(volume.path / "file")
        volume.kill()
        volume.remount()

A request to a mount that hangs cannot be interrupted, not even by a signal handler, and a page fault on one holds the
interpreter. So a process beside the test (`_guard`, this file as its program) holds the deadline: it kills daemon and
channel, upon which every request fails, and takes the mount away. It does the same when the test process is gone.

Owner: the test that made it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.forked import AOF2

COMMAND_MAX_S = 60.0
TEST_MAX_S = 100.0
END_MAX_S = 20.0
CHANNEL = "aof2-channel"

Section = Mapping[str, Any]


def why_not() -> str:
    """Why nothing can be mounted here; "" when it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that this user may open"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "mounting takes root, or fusermount3"
    return ""


def skip_where_impossible() -> None:
    import pytest  # not in the guard

    if reason := why_not():
        pytest.skip(reason)


def until(what: Callable[[], bool], message: str = "it does not happen", timeout_s: float = 30.0) -> None:
    """Looks until it is so."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, message
        time.sleep(0.02)


def conf_text(root: Path, tenants: Mapping[str, Section], sections: Mapping[str, Section]) -> str:
    """A conf with everything below `root`; `sections` replace single keys."""
    text: dict[str, dict[str, Any]] = {
        "volume": {"mountpoint": str(root / "mnt"), "state_dir": str(root / "state")},
        "remote": {"url": f"file://{root / 'remote'}", "timeout": "5s"},
        "cache": {"hot_bytes": "1GiB", "warm_bytes": "0", "page_cache_bytes": "16MiB", "min_free": "1MiB"},
        "metrics": {"listen": ""},
    }
    for name, keys in sections.items():
        text.setdefault(name, {}).update(keys)
    text |= {f"tenants.{name}": dict(keys) for name, keys in tenants.items()}
    lines = []
    for name, keys in text.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


class MountedVolume:
    """A volume in a folder. `path` is the directory of its first tenant."""

    def __init__(self, root: Path, options: Sequence[str], tenants: Mapping[str, Section]) -> None:
        self.root = root
        self.options = list(options)
        self.mountpoint = root / "mnt"
        self.state_dir = root / "state"
        self.remote = root / "remote"
        self.conf = root / "mount.conf"
        self.tenant = next(iter(tenants))
        self.path = self.mountpoint / self.tenant
        self._guard: forked.Forked | None = None
        self._deadlines = -1  # the guard's stdin

    # -- the command -------------------------------------------------------------------------------------------

    def environ(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"} | {"AOF2_CONF": str(self.conf)}

    def aof2(self, *args: object, timeout_s: float = COMMAND_MAX_S) -> subprocess.CompletedProcess[str]:
        """`aof2 ARGS…` with this conf, whatever it answers."""
        return forked.run([AOF2, *args], cwd=self.root, env=self.environ(), timeout=timeout_s)

    def done(self, *args: object) -> str:
        """`aof2 ARGS…`, which must go well; what it prints."""
        ran = self.aof2(*args)
        assert ran.returncode == 0, f"aof2 {args}: exit {ran.returncode}: {ran.stdout}{ran.stderr}\n{self.log_tail()}"
        return ran.stdout

    def json(self, *args: object) -> Any:
        return json.loads(self.done(*args, "--json"))

    def ask(self, verb: str, **args: Any) -> Any:
        """What a verb's command would ask the daemon, without a process for it."""
        from aof2.engine.settings.loader import load_settings
        from aof2.fs.control.client import ControlClient

        with ControlClient(load_settings(self.conf)) as client:
            return client.call(verb, **args)

    def evict(self, *paths: Path) -> None:
        """`aof2 evict`: drops every local copy. A file that was just closed may count as open for a moment."""
        names = [str(path.relative_to(self.mountpoint)) for path in paths]
        deadline_s = time.monotonic() + COMMAND_MAX_S
        while (moved := self.ask("evict", paths=names))["skipped_files"]:
            assert time.monotonic() < deadline_s, f"not evicted: {moved['skipped']}"
            time.sleep(0.05)

    # -- its life ----------------------------------------------------------------------------------------------

    def mount(self) -> None:
        self.done("mount", *self._options())

    def mounting(self) -> subprocess.Popen[bytes]:
        """A mount that has begun."""
        command = [AOF2, "mount", *self._options()]
        return subprocess.Popen(
            command, cwd=self.root, env=self.environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _options(self) -> list[str]:
        return [part for option in self.options for part in ("-o", option)]

    def umount(self) -> None:
        """As a user would: what is left is uploaded first."""
        self.done("umount")

    def kill(self) -> None:
        """SIGKILL to the daemon. The channel goes with it, and the mount answers ENOTCONN."""
        _kill([pid for pid in _processes(self.root) if not _is_channel(pid)])
        until(lambda: not _processes(self.root), "the channel outlives the daemon", END_MAX_S)

    def remount(self) -> None:
        """After `kill` or `umount`."""
        self.mount()

    def pids(self) -> list[int]:
        """Of the daemon and its channel."""
        return _processes(self.root)

    def daemon_pid(self) -> int:
        return next(pid for pid in _processes(self.root) if not _is_channel(pid))

    def channel_pid(self) -> int:
        return next(pid for pid in _processes(self.root) if _is_channel(pid))

    def log(self) -> list[dict[str, Any]]:
        """The daemon's log; what is not JSON shows as {"level": "RAW", …}."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.state_dir / "daemon.log").read_text(errors="replace").splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    lines.append({"level": "RAW", "message": line})
        return lines

    def complaints(self) -> list[dict[str, Any]]:
        """What the log says that nobody should have to read: warnings and worse, tracebacks, sanitizers."""
        expected = "passthrough is off"
        return [x for x in self.log() if x["level"] not in ("DEBUG", "INFO") and expected not in x.get("message", "")]

    def log_tail(self) -> str:
        return "\n".join(json.dumps(line) for line in self.log()[-5:])

    # -- deadlines ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deadline(self, timeout_s: float = TEST_MAX_S) -> Iterator[None]:
        """Past it every request to the mount fails, and the test with it."""
        self._tell(f"{timeout_s}\n")
        try:
            yield
        finally:
            self._tell("0\n")

    def _tell(self, line: str) -> None:
        assert self._guard is not None, "mounted_volume() makes one"
        os.write(self._deadlines, line.encode())

    def _start_guard(self) -> None:
        lines, self._deadlines = os.pipe()
        self._guard = forked.start(
            ["guard", str(self.root)], env=os.environ, cwd="/", streams=(lines, 1, 2), module="tests.support.mount"
        )
        os.close(lines)

    def _end(self) -> None:
        """The mount, the daemon and the channel are gone after this, whatever happened."""
        if self._guard is None:
            return
        os.close(self._deadlines)
        self._guard.wait()
        assert not _processes(self.root), "the guard let something live"


@contextlib.contextmanager
def mounted_volume(
    root: Path,
    *,
    options: Sequence[str] = (),
    tenants: Mapping[str, Section] | None = None,
    timeout_s: float = TEST_MAX_S,
    mount: bool = True,
    **sections: Section,
) -> Iterator[MountedVolume]:
    """A volume of its own in `root`, mounted at root/mnt. Keywords are sections of the conf: `cache={…}`.

    `timeout_s` is the deadline of the block; a mount that several tests share calls `deadline()` for each instead.
    """
    skip_where_impossible()
    tenants = {"default": {"kind": "files"}, "other": {"kind": "files"}} if tenants is None else tenants
    root.mkdir(parents=True, exist_ok=True)
    root = root.resolve()
    volume = MountedVolume(root, options, tenants)
    volume.remote.mkdir(exist_ok=True)
    volume.conf.write_text(conf_text(root, tenants, sections))
    volume._start_guard()
    try:
        with volume.deadline(timeout_s) if timeout_s else contextlib.nullcontext():
            if mount:
                volume.mount()
            yield volume
    finally:
        volume._end()


# -- processes -----------------------------------------------------------------------------------------------------


def _processes(root: Path) -> list[int]:
    """The daemon, which logs to root/state, and the channel, which mounts root/mnt; those that have not ended."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                is_ours = os.readlink(process / "fd" / "2") == str(root / "state" / "daemon.log")
                if is_ours or f"--mountpoint={root / 'mnt'}".encode() in (process / "cmdline").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(process.name))
    return found


def _is_channel(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == CHANNEL
    return False


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _guard(root: Path) -> None:
    """Lines on stdin: seconds from now until everything is to end, 0: not now. The end of stdin: now."""
    ends_s: float | None = None
    while True:
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        ready, _, _ = select.select([0], [], [], left_s)
        text = os.read(0, 4096) if ready else b""
        if not text:
            _clear(root)
        if ready and not text:
            return
        ends_s = None
        for line in text.split():
            ends_s = time.monotonic() + float(line) if float(line) else None


def _clear(root: Path) -> None:
    mountpoint = root / "mnt"
    deadline_s = time.monotonic() + END_MAX_S
    while time.monotonic() < deadline_s:
        _kill(_processes(root))
        mounted = f" {mountpoint} " in Path("/proc/self/mountinfo").read_text()
        if mounted:
            tool = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz", "--"]
            subprocess.run([*tool, mountpoint], capture_output=True, timeout=END_MAX_S, check=False)
        elif not _processes(root):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    os.setsid()  # what interrupts the tests is no end of it
    _guard(Path(sys.argv[1]))
