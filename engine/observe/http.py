"""`GET /metrics` over HTTP, for Prometheus.

Invariants
- Only /metrics answers, only to GET and HEAD; nothing a client sends changes anything.
- A client that stalls holds a thread of its own for CLIENT_TIMEOUT_S at most, and never the engine.

Owner: `serving` has a thread that ends with its block; the thread only calls `render`. Enter it after daemonising:
threads do not survive a fork. Crash: nothing is left but the port, which is free again at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from aof2.engine.errors import Aof2Error
from aof2.engine.observe.exposition import CONTENT_TYPE
from aof2.engine.settings.keys import split_listen

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1  # how long the end may take


class ListenError(Aof2Error):
    """The address of `metrics.listen` cannot be had. The user picks another, or turns it off; the volume is fine."""


@contextlib.contextmanager
def serving(render: Callable[[], bytes], listen: str) -> Iterator[int]:
    """Answers with what `render` returns while the block runs, on `listen` (host:port; port 0 is any free one; "" is
    nowhere); the port. ListenError when the address is taken, or not this machine's."""
    if not listen:
        yield 0
        return
    host, port = split_listen(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = _Server(address, family, render)
    except (OSError, UnicodeError) as e:
        why = (getattr(e, "strerror", None) or str(e)).lower()
        raise ListenError(f'metrics.listen = "{listen}": {why}; choose another host:port, or "" for none') from None
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics-http", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[object, ...], family: int, render: Callable[[], bytes]) -> None:
        self.address_family = family
        self.render = render
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which can hang for as long as a resolver does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a metrics client went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_S
    server_version = "aof2"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.split("?", 1)[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"only /metrics is here\n", "text/plain; charset=utf-8")
            return
        try:
            body = self.server.render()
        except Exception:
            log.exception("metrics could not be rendered")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log\n", "text/plain; charset=utf-8")
            return
        self._answer(HTTPStatus.OK, body, CONTENT_TYPE)

    do_HEAD = do_GET  # noqa: N815 (http.server's names)

    def _refuse(self) -> None:
        self.close_connection = True
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET and HEAD only\n", "text/plain; charset=utf-8")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name in the base class)
        log.debug("metrics request", extra={"request": format % args})
