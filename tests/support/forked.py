"""Commands by fork: a process that has loaded `aof2` forks for each, and what is forked runs the command's own entry.

To load the engine takes an interpreter half a second of processor, and the tests run thousands of commands. One that
was forked is a process as any other: its own pid, arguments, environment, folder, standard streams and exit code. Where
a test is about how the command starts, it runs the command itself.

The forking process has one thread and opens nothing; it ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TOP = Path(__file__).parents[2]
AOF2 = Path(sys.prefix) / "bin" / "aof2"
MESSAGE_MAX = 1 << 18
# What the interpreter, the loader or a runtime below reads when a process starts.
READ_AT_START = ("PYTHON", "LD_", "ASAN_", "TSAN_", "UBSAN_", "LSAN_", "MALLOC_", "GLIBC_")


class Forked:
    """A command that runs, or ran: `subprocess.Popen` as far as the tests need it."""

    def __init__(self, pid: int, ended: socket.socket, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._ended.settimeout(timeout)
            try:
                said = self._ended.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0) from None
            self._ended.close()
            self.returncode = int(said) if said else -signal.SIGKILL  # the forking process is gone
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of an `aof2` command: captured, as text, stdin empty, unchecked."""
    words = [str(word) for word in command]
    environ = dict(os.environ if env is None else env)
    if Path(words[0]) != AOF2 or not _same_start(environ):
        return subprocess.run(
            words,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    with open(os.devnull, "rb") as nothing, _memory("stdout") as out, _memory("stderr") as err:
        process = start(words, env=environ, cwd=cwd, streams=(nothing.fileno(), out.fileno(), err.fileno()))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        said = [os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode() for f in (out, err)]
    return subprocess.CompletedProcess(words, code, *said)


def start(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    streams: tuple[int, int, int],
    module: str = "",
) -> Forked:
    """Begins `aof2 WORDS…`, or `python -m module WORDS…`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        asked = {
            "module": module,
            "argv": list(words),
            "env": dict(env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "umask": _umask(),
        }
        message = json.dumps(asked).encode()
        assert len(message) < MESSAGE_MAX
        socket.send_fds(_forking(), [message], [theirs.fileno(), *streams])
    pid = int(ours.recv(64) or 0)
    assert pid, "the forking process is gone"
    return Forked(pid, ours, words)


def _same_start(env: Mapping[str, str]) -> bool:
    """Whether the environment has what this process was started with, as far as that is read only then."""
    return _at_start(env) == _at_start(os.environ) and env.get("PATH") is not None


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


def _umask() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1], 8) for line in f if line.startswith("Umask"))


def _memory(name: str) -> io.FileIO:
    return io.FileIO(os.memfd_create(name), "r+")


@functools.cache
def _started(pid: int) -> socket.socket:
    """The socket to this process's forking one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_MAX)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=TOP,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


_lock = threading.Lock()


def _forking() -> socket.socket:
    with _lock:
        return _started(os.getpid())


# -- the forking process -----------------------------------------------------------------------------------------------


def _load() -> None:
    """What commands import, but for what few of them need: Spark, charts, benches."""
    from aof2.fs.cli import VERBS

    for verb, (module, _) in VERBS.items():
        if verb not in ("bench", "report", "spark"):
            importlib.import_module(module)
    for module in ("aof2.fs.daemon", "aof2.fs.launch", "aof2.engine.volume", "aof2.engine.remote.s3"):
        importlib.import_module(module)


def _serve(control: socket.socket) -> None:
    """Forks for each message until the other end is gone."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _reap(running)
                    continue
                message, fds, _, _ = socket.recv_fds(control, MESSAGE_MAX, 4)
                if not message:
                    return
                told = socket.socket(fileno=fds[0])
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for one in (control, wake, woken, told, *running.values()):
                        one.close()
                    selector.close()
                    _become(json.loads(message), fds[1:])
                for fd in fds[1:]:
                    os.close(fd)
                told.send(b"%d" % pid)
                running[pid] = told


def _reap(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with running.pop(pid) as told, contextlib.suppress(OSError):
            told.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become(asked: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """The forked process: it is the command from here on."""
    code = 1
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.umask(asked["umask"])
        os.environ.clear()
        os.environ.update(asked["env"])
        time.tzset()
        os.chdir(asked["cwd"])
        sys.argv = asked["argv"]
        code = _call(asked["module"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(code)


def _call(module: str) -> int:
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        from aof2.fs.cli import main

        main()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path[0] = str(TOP)
    control_socket = socket.socket(fileno=int(sys.argv[1]))
    _load()
    gc.collect()
    gc.freeze()
    _serve(control_socket)
