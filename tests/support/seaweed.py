"""Bad weather before a real S3 server: a proxy that passes requests through, or does to them what the test asked for.

Delay, error answers, cut or flipped bodies, refused connections. The server itself (`Seaweed`, `running_seaweed`) is
the one the benchmarks use.

Owner: the fixture that made it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aof2.fs.bench.seaweed import Seaweed, free_ports, running_seaweed, weed_binary

__all__ = ["Fault", "FaultProxy", "Seaweed", "Seen", "free_ports", "of", "running_seaweed", "weed_binary"]


@dataclass
class Seen:
    """One request as the proxy got it."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Fault:
    """What to do with requests that match; `times` of them (None: all), one by one."""

    matches: Callable[[Seen], bool] = lambda seen: True
    times: int | None = 1
    status: int = 0
    """Answer this, with S3's XML and `code`, without asking the server."""
    code: str = ""
    cut_at: int | None = None
    """Send so many bytes of the answer's body, then hang up."""
    flip_at: int | None = None
    """Invert this byte of the answer's body."""
    flip_request_at: int | None = None
    """Invert this byte of the request's body on its way to the server."""
    drop: bool = False
    """Hang up before asking the server."""
    drop_after: bool = False
    """Ask the server, then hang up: done, but nobody told."""
    hold: threading.Event | None = None
    """Wait for this before going on."""
    call: Callable[[], None] | None = None
    """Run this first: stop the server, change the rules."""
    used: int = field(default=0)


def of(method: str, part: str = "") -> Callable[[Seen], bool]:
    """Requests of this method whose path and query contain `part`."""
    return lambda seen: seen.method == method and part in seen.path


class FaultProxy:
    """An HTTP/1.1 proxy on loopback before one server."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._sockets: set[socket.socket] = set()
        self.port = 0
        self.up()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self.faults.clear()
            self.seen.clear()

    def count(self, method: str, part: str = "") -> int:
        with self._lock:
            return sum(of(method, part)(seen) for seen in self.seen)

    def up(self) -> None:
        """Listens (again, on the same port)."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                """Connections cut on purpose are no news."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def down(self) -> None:
        """Refuses connections, and cuts those there are."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None
        with self._lock:
            open_sockets = list(self._sockets)
        for s in open_sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def take(self, seen: Seen) -> Fault | None:
        """Notes the request; the first fault that wants it."""
        with self._lock:
            self.seen.append(seen)
            for fault in self.faults:
                if (fault.times is None or fault.used < fault.times) and fault.matches(seen):
                    fault.used += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def setup(self) -> None:
        super().setup()
        with self.owner._lock:
            self.owner._sockets.add(self.connection)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _handle(self) -> None:
        body = bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        fault = self.owner.take(Seen(self.command, self.path, dict(self.headers.items()))) or Fault()
        if fault.call:
            fault.call()
        if fault.hold:
            fault.hold.wait(30)
        if fault.drop:
            self._hang_up()
            return
        if fault.status:
            xml = (
                f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>by the test</Message></Error>".encode()
            )
            self._answer(fault.status, [("Content-Type", "application/xml")], xml)
            return
        if fault.flip_request_at is not None:
            body[fault.flip_request_at] ^= 0xFF
        try:
            status, headers, answer = self._ask(bytes(body))
        except OSError:
            self._hang_up()
            return
        if fault.drop_after:
            self._hang_up()
            return
        if fault.flip_at is not None and answer:
            answer[fault.flip_at] ^= 0xFF
        self._answer(status, headers, answer, fault.cut_at)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytearray]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.upstream_port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            try:
                response = upstream.getresponse()
                return response.status, response.getheaders(), bytearray(response.read())
            except http.client.HTTPException as e:
                raise ConnectionError(str(e)) from e
        finally:
            upstream.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes | bytearray, cut_at: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = next((v for k, v in headers if k.lower() == "content-length"), str(len(body)))
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut_at is None else body[:cut_at])
        if cut_at is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
