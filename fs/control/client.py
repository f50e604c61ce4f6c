"""The command's end of the control socket. Blocking: a verb has nothing else to do.

A daemon that works on a request says so every few seconds: one that is silent for SILENCE_MAX_S hangs, and the
command gives up on it. Closing the client cancels what it asked for.

Owner: the calling thread. A crash closes the socket, which the daemon notices.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from aof2.engine.errors import Aof2Error
from aof2.engine.fds import opened
from aof2.engine.settings import Settings
from aof2.fs.control import protocol

SILENCE_MAX_S: Final = 30.0
_SUN_PATH_MAX: Final = 107
_UCRED: Final = struct.Struct("=iII")


class NotMountedError(Aof2Error):
    """No daemon answers for this volume. Mount it."""


class WentAwayError(protocol.ControlError):
    """The daemon ended before it answered."""


NO_DAEMON: Final = (NotMountedError, WentAwayError)
"""What a command that can read the rows on this disk goes on without."""


def see_to_the_end(settings: Settings) -> None:
    """After an unmount: the daemon ends, by itself or, where copies of the mount in other mount namespaces keep the
    kernel from telling it, because it is asked to. ControlError says why it goes on."""
    with contextlib.suppress(NotMountedError, WentAwayError), ControlClient(settings) as client:
        client.call("end")


class ControlClient:
    """One connection to the volume's daemon, one request. `with` it. NotMountedError when there is no daemon."""

    def __init__(self, settings: Settings) -> None:
        self._path = protocol.socket_path(settings)
        self._pidfd = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SILENCE_MAX_S)
        try:
            connect(self._socket, str(self._path))
        except OSError as e:
            self._socket.close()
            if isinstance(e, PermissionError):
                raise NotMountedError(f"{self._path}: another user's; run as the one who mounted, or as root") from None
            raise NotMountedError("not mounted; run aof2 mount") from None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def call(self, verb: str, on_progress: Callable[[protocol.Progress], None] | None = None, **args: object) -> Any:
        """The answer, as plain JSON values. ControlError with the daemon's own line."""
        try:
            self._socket.sendall(protocol.encode({"verb": verb, **args}))
            with self._socket.makefile("rb") as answers:
                while line := answers.readline(protocol.ANSWER_BYTES_MAX):
                    if not line.endswith(b"\n"):
                        break
                    message = protocol.decode(line)
                    if "result" in message:
                        return message["result"]
                    if "error" in message:
                        raise protocol.ControlError(str(message["error"]), int(message.get("exit", 1)))
                    if on_progress is not None and "progress" in message:
                        on_progress(msgspec.convert(message["progress"], protocol.Progress))
        except msgspec.ValidationError as e:
            raise protocol.ProtocolError(f"{self._path}: {e}; the daemon is another version, remount") from None
        except TimeoutError:
            raise protocol.ControlError(f"{self._path}: the daemon does not answer; see daemon.log beside it") from None
        except ConnectionError:
            pass
        raise WentAwayError(f"{self._path}: the daemon went away before it was done; see daemon.log beside it")

    # -- the daemon's end ------------------------------------------------------------------------------------------

    def watch_daemon(self) -> None:
        """From now on `wait_ended` knows the daemon, whatever process gets its number later."""
        pid = _UCRED.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = -1  # another namespace, or gone: nothing to wait for

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the daemon has ended, waiting so long for it."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))


def connect(sock: socket.socket, path: str) -> None:
    """Also where the path is longer than a socket's address may be: through the folder's descriptor."""
    if len(os.fsencode(path)) <= _SUN_PATH_MAX:
        sock.connect(path)
        return
    with opened(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY) as folder:  # noqa: PTH120
        sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")  # noqa: PTH119
