"""The daemon's end of the control socket: one task a client, one request each.

Invariants
- Only the owner of the daemon and root are heard (SO_PEERCRED), whatever the socket's mode says.
- Requests, clients and the time a client takes to ask or to listen are bounded.
- A client that goes away cancels what it asked for; a request that fails does not end the daemon.

Owner: a task of the daemon's nursery. A crash leaves the socket's name, which the next start replaces.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import trio

from aof2.engine.aio import open_nursery
from aof2.engine.errors import Aof2Error
from aof2.engine.fds import opened
from aof2.fs.control.durable import Uploaded
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import (
    ALIVE_EVERY_S,
    REQUEST_BYTES_MAX,
    ControlError,
    Progress,
    ProtocolError,
    decode,
    encode,
)
from aof2.fs.control.verbs import dispatch
from aof2.fs.wording import explain

log = logging.getLogger(__name__)

CLIENTS_MAX: Final = 512  # `wait` is asked for by many at once
ASK_MAX_S: Final = 10.0
LISTEN_MAX_S: Final = 30.0
PROGRESS_EVERY_S: Final = 0.1
_UCRED: Final = struct.Struct("=iII")


class ControlServer:
    """Answers on `path` for as long as `run` runs."""

    def __init__(self, path: Path, mounted: Mounted) -> None:
        self.path = path
        self._mounted = mounted
        self._clients = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with _listening(self.path) as listener:
            task_status.started()
            async with open_nursery() as nursery:
                while True:
                    try:
                        client, _ = await listener.accept()
                    except OSError as e:  # out of descriptors: those of clients that leave come back
                        log.warning("control: not accepted", extra={"error": str(e)})
                        await trio.sleep(1.0)
                        continue
                    nursery.start_soon(self._serve, client)

    async def _serve(self, client: trio.socket.SocketType) -> None:
        with client:
            self._clients += 1
            try:
                talk = _Talk(client)
                if not _may_ask(client):
                    await _refuse(talk, "only the user who mounted, and root, are answered")
                elif self._clients > CLIENTS_MAX:
                    await _refuse(talk, f"{CLIENTS_MAX} requests are under way; try again")
                else:
                    await self._answer(talk)
            except (OSError, trio.TooSlowError):
                pass  # the client is gone, or does not listen
            finally:
                self._clients -= 1

    async def _answer(self, talk: _Talk) -> None:
        try:
            with trio.fail_after(ASK_MAX_S):
                request = decode(await talk.line())
        except ProtocolError as e:
            await talk.say({"error": str(e), "exit": 2})
            return
        async with talk.cancelled_when_gone():
            answer = await self._do(request, talk)
            short = isinstance(answer.get("result"), Uploaded)
            await talk.send(encode(answer) if short else await trio.to_thread.run_sync(encode, answer))

    async def _do(self, request: dict[str, object], talk: _Talk) -> dict[str, object]:
        try:
            return {"result": await dispatch(self._mounted, request, talk.progress)}
        except ControlError as e:
            return {"error": str(e), "exit": e.code}
        except (Aof2Error, OSError) as e:
            return {"error": explain(e), "exit": 1}
        except Exception as e:
            log.exception("control: a verb failed", extra={"verb": str(request.get("verb"))})
            return {"error": f"internal error: {type(e).__name__}: {e}; see daemon.log", "exit": 1}


@contextlib.asynccontextmanager
async def _listening(path: Path) -> AsyncIterator[trio.socket.SocketType]:
    """A listening socket under the name, for its owner only; the name goes when the block ends."""
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with (
            opened(path.parent, os.O_PATH | os.O_DIRECTORY) as folder,
            trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            # Through the folder's descriptor: an address holds 107 bytes, a path more.
            await listener.bind(f"/proc/self/fd/{folder}/{temporary.name}")
            temporary.chmod(0o600)
            listener.listen(CLIENTS_MAX)
            temporary.replace(path)  # what was left of a daemon before
            yield listener
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _may_ask(client: trio.socket.SocketType) -> bool:
    _, uid, _ = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (0, os.geteuid())


class _Talk:
    """Lines to and from one client."""

    def __init__(self, client: trio.socket.SocketType) -> None:
        self._client = client
        self._lock = trio.Lock()
        self._next_progress_s = 0.0

    async def line(self) -> bytes:
        got = bytearray()
        while b"\n" not in got:
            part = await self._client.recv(64 << 10)
            if not part:
                raise ProtocolError("the request ends before its line does")
            got += part
            if len(got) > REQUEST_BYTES_MAX:
                raise ProtocolError(f"the request is over {REQUEST_BYTES_MAX} bytes; name fewer paths")
        return bytes(got[: got.index(b"\n")])

    async def say(self, message: object) -> None:
        await self.send(encode(message))

    async def send(self, line: bytes) -> None:
        data = memoryview(line)
        async with self._lock:
            while data:
                with trio.fail_after(LISTEN_MAX_S):
                    data = data[await self._client.send(data[: 1 << 20]) :]

    async def progress(self, progress: Progress) -> None:
        """Tells how far it is; more often than a user looks is left out."""
        now_s = trio.current_time()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_EVERY_S
            await self.say({"progress": progress})

    @contextlib.asynccontextmanager
    async def cancelled_when_gone(self) -> AsyncIterator[None]:
        """Cancels the block when the client closes its end; tells it meanwhile that the daemon lives."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._until_gone, nursery.cancel_scope)
            yield
            nursery.cancel_scope.cancel()

    async def _until_gone(self, scope: trio.CancelScope) -> None:
        with contextlib.suppress(OSError):
            more = b"one request a connection: what else comes is passed over"
            while more:
                with trio.move_on_after(ALIVE_EVERY_S) as waiting:
                    more = await self._client.recv(4096)
                if waiting.cancelled_caught:
                    await self.say({"alive": True})
        scope.cancel()


async def _refuse(talk: _Talk, why: str) -> None:
    """After the question came: hanging up on unread bytes would take the answer along."""
    with trio.move_on_after(ASK_MAX_S), contextlib.suppress(ProtocolError):
        await talk.line()
    await talk.say({"error": why, "exit": 1})
