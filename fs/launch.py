"""Starting the mount: the checks before it, the daemon behind it, and how it is told to end.

    mount:  checks → fork → child: setsid, log file, serve → ready → parent says so and ends
    -f:     checks → serve, with sd_notify, until unmounted or told to stop

Invariants
- Nothing of the engine is opened before the fork: locks, threads and LMDB do not survive one.
- The parent ends well only once the mount answers; else with the one line the child has written.
- SIGTERM and SIGINT unmount. Where the mount is still in use it is taken out of the tree, and what is behind it
  ends GRACE_S later; a second signal does not wait. Nothing that was written is lost: it is in state_dir.

Owner: the `aof2 mount` process and its child. A crash of the child leaves a dead mount, which the next mount clears.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NoReturn

import lmdb
import trio

from aof2.engine.aio import open_nursery
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.rows import is_live
from aof2.engine.observe.logs import configure_logging
from aof2.engine.settings import Settings
from aof2.fs.channel_wire import ChannelError
from aof2.fs.control.client import NO_DAEMON, ControlClient, see_to_the_end
from aof2.fs.control.protocol import ProtocolError, decode
from aof2.fs.mountpoint import FSTYPE, Answer, MountError, ask, detach, make_mountpoint, mounted_at, unmount
from aof2.fs.options import Options
from aof2.fs.wording import explain, one_line

log = logging.getLogger(__name__)

LOG_NAME: Final = "daemon.log"
LOG_BYTES_MAX: Final = 16 << 20
GRACE_S: Final = 5.0
LAST_MESSAGE_BYTES: Final = 64 << 10
# A daemon that was unmounted seals and sends the end of its log before it lets go of the volume.
CHANGING_MAX_S: Final = 20.0
SETTLE_EVERY_S: Final = 0.1
SWITCH_S: Final = 0.0005
GC_OBJECTS: Final = 50_000
OPEN_FILES_WANTED: Final = 1 << 20
OPEN_FILES_FEW: Final = 4096
MMAP_FROM_BYTES: Final = 4 << 20
ARENAS_MAX: Final = 2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
READY: Final = b"\x06"  # first byte on the pipe: the mount answers; anything else is an error line

# `fs.daemon.serve`: opens the volume, mounts, calls its last argument when the mount answers, runs until unmounted.
# Cancelled, it takes the mount away and closes the volume.
Serve = Callable[[Settings, Path, Options, Callable[[], None]], Awaitable[None]]


class LaunchError(Aof2Error):
    """The daemon did not come up; the message is its own line."""


# -- checks --------------------------------------------------------------------------------------------------------


def prepare(settings: Settings) -> bool:
    """Sees to it that the volume can be mounted at its mountpoint; False when it already is.

    A dead mount is cleared away, and a daemon that is coming up or ending is waited for. MountError or ControlError,
    before anything is opened, when the place is taken or not fit, or a daemon does not answer.
    """
    mountpoint, state_dir = settings.volume.mountpoint, settings.volume.state_dir
    elsewhere = where_mounted(settings)
    if elsewhere is not None:
        if elsewhere == mountpoint:
            return False
        raise MountError(f"{state_dir}: this volume is mounted at {elsewhere}; umount it first")
    live = _is_open(settings)
    entry = mounted_at(mountpoint)
    if entry is not None and entry.fstype != FSTYPE:
        what = f"{entry.fstype} of {entry.source}"
        raise MountError(f"{mountpoint}: something else is mounted there ({what}); umount it or mount elsewhere")
    if entry is not None:
        answer = ask(mountpoint)
        if answer is Answer.LIVE:
            raise MountError(f"{mountpoint}: another aof2 volume is mounted there; umount it or mount elsewhere")
        if live:
            raise MountError(f"{mountpoint}: its daemon does not answer; see {state_dir / LOG_NAME}")
        log.debug("clearing a dead mount", extra={"mountpoint": str(mountpoint), "answer": answer.value})
        detach(mountpoint)
    elif live:
        raise MountError(f"{state_dir}: another aof2 process has this volume open; stop it first")
    make_mountpoint(mountpoint)
    return True


def where_mounted(settings: Settings) -> Path | None:
    """Where the volume is mounted, once that can be told: not while a daemon comes up, nor while one ends."""
    deadline_s = time.monotonic() + CHANGING_MAX_S
    while True:
        where = serving(settings)
        between = where is None and _is_open(settings)
        ending = where is not None and mounted_at(where) is None
        if not (between or ending) or time.monotonic() > deadline_s:
            return where
        if ending:
            see_to_the_end(settings)
        time.sleep(SETTLE_EVERY_S)


def _is_open(settings: Settings) -> bool:
    state_dir = settings.volume.state_dir
    return state_dir.is_dir() and is_live(state_dir)


def serving(settings: Settings) -> Path | None:
    """Where a daemon of this volume says it has mounted it; None also of one that dies as it is asked. ControlError
    when it does not answer."""
    try:
        with ControlClient(settings) as client:
            return Path(client.call("ping")["mountpoint"])
    except NO_DAEMON:
        return None


# -- the daemon ----------------------------------------------------------------------------------------------------


def daemonise(settings: Settings, options: Options, serve: Serve | None = None) -> None:
    """Returns in the parent once the mount answers. LaunchError, with the child's line, when it does not come up."""
    state_dir = settings.volume.state_dir
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_fd = open_log(state_dir)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _run_child(settings, options, serve, writer, log_fd)
    os.close(writer)
    os.close(log_fd)
    try:
        with open(reader, "rb") as pipe:
            said = pipe.read()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    if said.startswith(READY):
        return
    os.waitpid(pid, 0)
    died = f"the daemon ended before the mount answered; see {state_dir / LOG_NAME}"
    raise LaunchError(said.decode(errors="replace").strip() or died)


def open_log(state_dir: Path) -> int:
    """The daemon's log to append to; a long one moves to `.1` first."""
    path = state_dir / LOG_NAME
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(f"{LOG_NAME}.1"))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _run_child(settings: Settings, options: Options, serve: Serve | None, pipe: int, log_fd: int) -> NoReturn:
    """The rest of the child's life. Never returns into the parent's code."""
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log_fd)

        def ready() -> None:
            nonlocal pipe
            if pipe >= 0:
                os.write(pipe, READY)
                os.close(pipe)
                pipe = -1

        line = run(settings, options, serve, ready)
        if line and pipe >= 0:
            os.write(pipe, one_line(line).encode(errors="replace"))
        code = 1 if line else 0
    except BaseException:  # noqa: BLE001 (the last frame of the process)
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code)


def foreground(settings: Settings, options: Options, serve: Serve | None = None) -> None:
    """Serves until unmounted, in this process. LaunchError with the reason when it ends otherwise."""
    line = run(settings, options, serve, lambda: None)
    if line:
        raise LaunchError(line)


def run(settings: Settings, options: Options, serve: Serve | None, ready: Callable[[], None]) -> str:
    """Serves until unmounted; "" when that went well, else the line that says why not."""
    os.umask(0o077)
    configure_logging(sys.stderr)
    _tune_process()
    if serve is None:
        from aof2.fs.daemon import serve as real_serve  # pyfuse3, and everything of the engine

        serve = real_serve
    mountpoint = settings.volume.mountpoint

    def on_ready() -> None:
        notify("READY=1", f"STATUS=mounted at {mountpoint}")
        log.info("mounted", extra={"mountpoint": str(mountpoint), "pid": os.getpid()})
        ready()

    try:
        trio.run(_serve_until_told, serve, settings, options, on_ready)
    except (Aof2Error, ChannelError) as e:
        log.error("ended", extra={"error": str(e)})  # noqa: TRY400 (expected, and said in one line)
        return str(e)
    except (OSError, lmdb.Error) as e:
        log.exception("ended")
        return explain(e, settings.volume.state_dir)
    except Exception as e:
        log.exception("ended by a bug")
        return f"internal error: {type(e).__name__}: {e}; see {settings.volume.state_dir / LOG_NAME}"
    log.info("unmounted", extra={"mountpoint": str(mountpoint)})
    return ""


def _tune_process() -> None:
    """Before there are threads. Large buffers go back to the system when they are freed, and leave no holes in a
    heap of each thread; a thread that only hands something on does not wait long for one that computes. What no line
    of the log shows is not looked up for it: that takes longer than the line. Garbage in cycles is rare here, and rows
    in hand are many: it is looked for seldom."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_OBJECTS, 20, 20)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    files = _raise_open_files()
    if files < OPEN_FILES_FEW:
        log.warning("few files can be open at once: raise the limit (ulimit -n)", extra={"limit": files})
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        libc.mallopt(_M_ARENA_MAX, ARENAS_MAX)


def _raise_open_files() -> int:
    """A descriptor a file in use, and as root no other limit than the kernel's; how many there may be now. Without one
    more, an open is EMFILE, and what is open goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, OPEN_FILES_WANTED), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            continue
        return wanted
    return soft


def last_message(log_path: Path) -> str:
    """What a daemon's log said last in words; events are for machines."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError), open(log_path, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - LAST_MESSAGE_BYTES))
        lines = f.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ProtocolError):
            if message := decode(line).get("message"):
                return str(message)
    return "its log says nothing"


async def _serve_until_told(serve: Serve, settings: Settings, options: Options, on_ready: Callable[[], None]) -> None:
    is_up = trio.Event()

    def ready() -> None:
        is_up.set()
        on_ready()

    async with open_nursery() as nursery:
        await nursery.start(_stop_on_signal, settings, is_up, nursery.cancel_scope)
        await serve(settings, settings.volume.mountpoint, options, ready)
        notify("STOPPING=1")
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    settings: Settings,
    is_up: trio.Event,
    scope: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The first signal unmounts, or lets go of what cannot be unmounted; the second ends it at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async with open_nursery() as nursery:
            async for number in signals:
                log.info("stopping", extra={"signal": signal.Signals(number).name})
                if nursery.child_tasks or not is_up.is_set():
                    scope.cancel()
                    return
                notify("STOPPING=1", "STATUS=unmounting")
                nursery.start_soon(_unmount, settings, scope)


async def _unmount(settings: Settings, scope: trio.CancelScope) -> None:
    mountpoint = settings.volume.mountpoint
    try:
        await trio.to_thread.run_sync(unmount, mountpoint, abandon_on_cancel=True)
        await trio.to_thread.run_sync(see_to_the_end, settings, abandon_on_cancel=True)
    except Aof2Error as e:
        log.info("let go of, not unmounted", extra={"error": str(e)})
        with contextlib.suppress(Aof2Error):
            await trio.to_thread.run_sync(detach, mountpoint, abandon_on_cancel=True)
        await trio.sleep(GRACE_S)
        scope.cancel()
    await trio.sleep_forever()  # serve ends by itself now; a second signal finds this task and does not wait for it


# -- systemd -------------------------------------------------------------------------------------------------------


def notify(*lines: str) -> None:
    """Tells systemd, if it started us and wants to know (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(1.0)
        sock.sendto("\n".join(lines).encode(), "\0" + address[1:] if address[0] == "@" else address)
