"""GETs of ranges with nothing between them and the socket: what a cold read is made of.

The SDK spends a millisecond of Python on a request and copies its body twice; here a request is one `send`, and a body
goes from the socket into the caller's memory or, checksummed in C, into a file. The SDK still does what it is good at:
it makes the URLs and signs them (`s3_url`).

Only what is surely understood is taken: HTTP/1.1 200 or 206 with a length. An answer that may be about this way of
asking (redirects, refused signatures) is None, and the SDK is asked; errors of the object or the server are raised as
the SDK would raise them. Behind a proxy this is not used at all.

Invariants
- A connection goes back to the pool only when its answer was read to the end.
- One that was kept and is found closed is no error: the request is sent again, on a new one.
- No call outlasts its deadline by more than one silence of the socket, nor `close`.

Owner: any thread; a lock guards the pool. `glance` is the trio thread's. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

import trio
from botocore.httpsession import get_cert_path

from aof2.engine.errors import LandingError
from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.remote.resilience import Deadline, closed
from aof2.engine.remote.s3_client import answered
from aof2.engine.remote.s3_url import UrlSigner
from aof2.engine.remote.source import FileTarget
from aof2.native import crc64 as crc64_of_bytes

HEAD_BYTES_MAX: Final = 64 << 10
HEAD_READ_BYTES: Final = 2 << 10  # most of the body stays in the socket, for C to take
ERROR_BYTES_MAX: Final = 64 << 10
SCRATCH_BYTES: Final = 256 << 10
SEND_BYTES: Final = 1 << 20  # within one silence of the socket
REFUSALS_MAX: Final = 3

_CODE: Final = re.compile(rb"<Code>(\w{1,64})</Code>")


# Runs what knows no deadline (resolving a name) so that its caller does.
Bounded = Callable[[Callable[[], socket.socket], Deadline], socket.socket]


class _OtherWayError(Exception):
    """Not by this way; the SDK may know another."""


class _StaleError(Exception):
    """A kept connection had been closed meanwhile."""


class Stream(NamedTuple):
    """A body that is sent as it is made; `pieces` starts it anew."""

    size: int
    pieces: Callable[[], Iterable[bytes | bytearray | memoryview]]


class Head(NamedTuple):
    """What an answer says of itself."""

    status: int
    length: int | None
    total: int | None  # of the whole object
    keep: bool
    etag: str = ""
    crc64: str = ""  # of what it took, by its own reckoning, as S3 writes it


class Body:
    """An answer's bytes, read in order."""

    def __init__(self, sock: socket.socket, prefix: bytes, head: Head, timeout_s: float, deadline: Deadline) -> None:
        self.head = head
        self.left = head.length or 0
        self._sock = sock
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._deadline = deadline

    def _patience_s(self) -> float:
        left_s = self._deadline.left_s()
        if left_s <= 0:
            raise TimeoutError
        return min(self._timeout_s, left_s)

    def read_into(self, view: memoryview) -> None:
        """The next bytes, as many as fit there."""
        taken, self._prefix = self._prefix[: len(view)], self._prefix[len(view) :]
        at = len(taken)
        view[:at] = taken
        while at < len(view):
            self._sock.settimeout(self._patience_s())
            got = self._sock.recv_into(view[at:])
            if not got:
                raise ConnectionResetError("the answer ended early")
            at += got
        self.left -= len(view)

    def land(self, target: FileTarget, piece: int, length: int, scratch: bytearray) -> list[int]:
        """The next bytes into a file, from the start of a piece on; the crc64 of each piece."""
        if isinstance(self._sock, ssl.SSLSocket):
            return self._land_decrypted(target, piece, length)
        at = target.at(piece)
        begun, self._prefix = self._prefix[:length], self._prefix[length:]
        with _landing():
            target.files.pwrite(target.fd, begun, at)
        whole = len(begun) // target.piece_bytes * target.piece_bytes  # a head comes with little, but with tiny pieces
        crcs = [crc64_of_bytes(begun[i : i + target.piece_bytes]) for i in range(0, whole, target.piece_bytes)]
        if whole < length:
            crcs += target.files.receive(
                self._sock.fileno(),
                target.fd,
                at + len(begun),
                length - len(begun),
                scratch,
                timeout_s=self._patience_s(),
                piece_bytes=target.piece_bytes,
                begun=begun[whole:],
            )
        self.left -= length
        return crcs

    def _land_decrypted(self, target: FileTarget, piece: int, length: int) -> list[int]:
        data = memoryview(bytearray(length))
        self.read_into(data)
        with _landing():
            target.files.pwrite(target.fd, data, target.at(piece))
        return [crc64_of_bytes(data[i : i + target.piece_bytes]) for i in range(0, length, target.piece_bytes)]


@contextmanager
def _landing() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise LandingError(e) from None


@dataclass(eq=False)
class Wire:
    """Connections to one bucket's endpoint."""

    signer: UrlSigner
    ca_bundle: str | None
    connect_timeout_s: float
    read_timeout_s: float
    idle_max: int
    bounded: Bounded

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[socket.socket]] = {}
        self._busy: set[socket.socket] = set()
        self._refusals = 0
        self._closed = False
        self._tls: ssl.SSLContext | None = None
        self._proxied: dict[str, bool] = {}

    @property
    def usable(self) -> bool:
        return self._refusals < REFUSALS_MAX and not self._closed

    def outdone(self) -> None:
        """The SDK got what was refused here. Now and then that is an expired key; again and again, this is no use."""
        self._refusals += 1

    def trust_again(self) -> None:
        """There are other keys: what was refused may be let in."""
        self._refusals = 0

    @contextmanager
    def get(self, name: str, offset: int, length: int, deadline: Deadline) -> Iterator[Body | None]:
        """The range's answer; None when the SDK should be asked instead."""
        place, request = self._request(name, offset, length)
        if not request:
            yield None
            return
        try:
            sock, body = self._ask(place, request, deadline)
        except _OtherWayError:
            yield None
            return
        reusable = False
        try:
            if body.head.status in (200, 206) and body.head.length is not None:
                self._refusals = 0
                yield body
                reusable = body.head.keep and body.left == 0
            else:
                self._refused(name, body)
                yield None
        finally:
            self._put_back(place, sock, reusable=reusable)

    def _request(self, name: str, offset: int, length: int) -> tuple[tuple[str, str], bytes]:
        """Whom to ask, and what; nothing to ask behind a proxy."""
        url = urlsplit(self.signer.url(name))
        place = (url.scheme, url.netloc)
        if self._behind_proxy(url.scheme, url.hostname or ""):
            self._refusals = REFUSALS_MAX
            return place, b""
        target = f"{url.path}?{url.query}" if url.query else url.path
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {url.netloc}\r\nRange: bytes={offset}-{offset + length - 1}\r\n"
            "Accept-Encoding: identity\r\nUser-Agent: aof2\r\n\r\n"
        )
        return place, request.encode("ascii")

    def put(
        self, url: SplitResult, headers: Mapping[str, str], body: bytes | Stream, deadline: Deadline
    ) -> tuple[Head, str] | None:
        """Sends a signed PUT; its answer's head and S3's error code, or None where this way is of no use."""
        place = (url.scheme, url.netloc)
        if self._behind_proxy(url.scheme, url.hostname or ""):
            return None
        stream = body if isinstance(body, Stream) else None
        size = stream.size if stream is not None else len(body)
        lines = [f"PUT {url.path} HTTP/1.1", f"Host: {url.netloc}", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        try:
            request = "\r\n".join([*lines, "", ""]).encode("ascii") + (b"" if isinstance(body, Stream) else body)
            sock, answer = self._ask(place, request, deadline, stream)
        except (_OtherWayError, UnicodeEncodeError):
            return None
        code = ""
        try:
            if answer.head.length:
                code = _error_code(answer)
        finally:
            self._put_back(
                place, sock, reusable=answer.head.keep and answer.head.length is not None and not answer.left
            )
        return answer.head, code

    async def glance(self, name: str, offset: int, length: int) -> bytes | None:
        """A short range without a thread, over a kept connection; None when there is none, or anything is unusual.

        Handing a request to a thread and back takes as long as a third of its way to a server nearby.
        """
        if not self.signer.is_quick:
            return None
        place, request = self._request(name, offset, length)
        sock = self._kept(place) if request else None
        if sock is None:
            return None
        data: bytes | None = None
        try:
            with trio.move_on_after(self.read_timeout_s):
                data = await _ask_at_once(sock, request, offset, length)
        except OSError:
            data = None
        finally:
            self._put_back(place, sock, reusable=data is not None)
        return data

    def _refused(self, name: str, body: Body) -> None:
        """Returns when the SDK may fare better; else raises what it would."""
        status = body.head.status
        if status < 400 or status in (400, 401, 403, 411, 501, 505):
            self.signer.forget(name)
            return
        raise answered(status, _error_code(body), "GetObject")

    # -- connections -------------------------------------------------------------------------------------------

    def _ask(
        self, place: tuple[str, str], request: bytes, deadline: Deadline, stream: Stream | None = None
    ) -> tuple[socket.socket, Body]:
        while (kept := self._kept(place)) is not None:
            with contextlib.suppress(_StaleError):
                return self._sent(place, kept, request, deadline, stream, kept=True)
        fresh = self.bounded(lambda: self._connect(place, deadline), deadline)
        return self._sent(place, fresh, request, deadline, stream, kept=False)

    def _sent(
        self,
        place: tuple[str, str],
        sock: socket.socket,
        request: bytes,
        deadline: Deadline,
        stream: Stream | None,
        *,
        kept: bool,
    ) -> tuple[socket.socket, Body]:
        try:
            sock.settimeout(min(self.read_timeout_s, max(0.001, deadline.left_s())))
            sock.sendall(request)
            for piece in stream.pieces() if stream is not None else ():
                with memoryview(piece) as view:
                    for at in range(0, len(view), SEND_BYTES):
                        sock.settimeout(min(self.read_timeout_s, max(0.001, deadline.left_s())))
                        sock.sendall(view[at : at + SEND_BYTES])
            head, prefix = _read_head(sock)
            return sock, Body(sock, prefix, head, self.read_timeout_s, deadline)
        except (ConnectionError, ssl.SSLEOFError) as e:
            self._put_back(place, sock, reusable=False)
            if kept:
                raise _StaleError from e
            raise
        except BaseException:
            self._put_back(place, sock, reusable=False)
            raise

    def _kept(self, place: tuple[str, str]) -> socket.socket | None:
        with self._lock:
            if self._closed:
                raise closed("get")
            idle = self._idle.get(place)
            if not idle:
                return None
            sock = idle.pop()
            self._busy.add(sock)
            return sock

    def _connect(self, place: tuple[str, str], deadline: Deadline) -> socket.socket:
        scheme, netloc = place
        url = urlsplit(f"{scheme}://{netloc}")
        host, port = url.hostname or "", url.port or (443 if scheme == "https" else 80)
        timeout_s = min(self.connect_timeout_s, max(0.001, deadline.left_s()))
        sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if scheme == "https":
                sock = self._context().wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as e:
            sock.close()
            raise _OtherWayError from e
        except BaseException:
            sock.close()
            raise
        with self._lock:
            if self._closed:
                sock.close()
                raise closed("get")
            self._busy.add(sock)
        return sock

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self.ca_bundle or get_cert_path(True))
        return self._tls

    def _put_back(self, place: tuple[str, str], sock: socket.socket, *, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(sock)
            idle = self._idle.setdefault(place, [])
            if reusable and not self._closed and len(idle) < self.idle_max:
                idle.append(sock)
                return
        sock.close()

    def _behind_proxy(self, scheme: str, host: str) -> bool:
        if host not in self._proxied:
            self._proxied[host] = scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
        return self._proxied[host]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [sock for socks in self._idle.values() for sock in socks]
            self._idle.clear()
            for sock in self._busy:  # wakes the thread that reads there, which closes it
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for sock in idle:
            sock.close()


def _error_code(body: Body) -> str:
    """What S3 calls the error, if its answer says so."""
    text = bytearray(min(body.left, ERROR_BYTES_MAX))
    with contextlib.suppress(OSError):
        body.read_into(memoryview(text))
    code = _CODE.search(text)
    return code[1].decode() if code else ""


async def _ask_at_once(sock: socket.socket, request: bytes, offset: int, length: int) -> bytes | None:
    """Exactly these bytes of an answer that is as it should be, in one piece with its head."""
    sock.setblocking(False)
    if sock.send(request) != len(request):
        return None
    data = bytearray(HEAD_BYTES_MAX + length)
    view, got, end = memoryview(data), 0, -1
    wanted = len(data)
    while got < wanted:
        count = await _receive_some(sock, view[got:wanted])
        if not count:
            return None
        got += count
        if end < 0 and (end := data.find(b"\r\n\r\n", 0, got)) >= 0:
            head = parse_head(bytes(view[:end]))
            if head.status != 206 or not head.keep or head.length != length or (head.total or 0) < offset + length:
                return None
            wanted = end + 4 + length
        elif end < 0 and got > HEAD_BYTES_MAX:
            return None
    return bytes(view[end + 4 : wanted])


async def _receive_some(sock: socket.socket, view: memoryview) -> int:
    while True:
        try:
            return sock.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError):
            await trio.lowlevel.wait_readable(sock)


def _read_head(sock: socket.socket) -> tuple[Head, bytes]:
    """The answer's head, and what came of its body with it."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > HEAD_BYTES_MAX:
            raise RemoteUnavailableError("get: an answer without an end to its head")
        got = sock.recv(HEAD_READ_BYTES)
        if not got:
            raise ConnectionResetError("no answer")
        data += got
    return parse_head(data[:end]), data[end + 4 :]


def parse_head(data: bytes) -> Head:
    """Status and the few fields that matter. An answer that makes no sense has status 505."""
    lines = data.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit():
        return Head(505, None, None, keep=False)
    fields: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    length = fields.get(b"content-length", b"")
    whole = fields.get(b"content-range", b"").rpartition(b"/")[2]
    encoded = b"transfer-encoding" in fields or fields.get(b"content-encoding", b"identity") != b"identity"
    known = int(length) if length.isdigit() and not encoded else None
    total = int(whole) if whole.isdigit() else (known if status == b"200" else None)
    keep = version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
    etag, crc64 = (fields.get(name, b"").decode("latin-1") for name in (b"etag", b"x-amz-checksum-crc64nvme"))
    return Head(int(status), known, total, keep, etag, crc64)
