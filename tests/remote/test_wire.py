"""Ranges straight from the connection: heads, kept connections, and going on where one was cut."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from aof2.engine.env import Files
from aof2.engine.errors import CorruptError, LandingError
from aof2.engine.remote.errors import RemoteMissingError, RemoteUnavailableError
from aof2.engine.remote.s3_wire import REFUSALS_MAX, Head, parse_head
from aof2.engine.remote.source import FileTarget
from aof2.engine.remote.store import RemoteStore
from aof2.native import crc64
from tests.remote.conftest import OpenStore
from tests.remote.helpers import MIB, data_of, put
from tests.support.seaweed import Fault, FaultProxy, Seaweed, of

PIECE = MIB // 4


class Landed:
    """A file that takes a range, and what it was told."""

    def __init__(self, path: Path, files: Files | None = None, offset: int = 100) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.told: list[tuple[int, int]] = []
        self.target = FileTarget(files or Files(), self.fd, offset, PIECE, self._note)

    def _note(self, piece: int, crc64s: Sequence[int]) -> None:
        self.told += enumerate(crc64s, piece)

    def content(self) -> bytes:
        return os.pread(self.fd, 1 << 30, self.target.offset)


def told_of(data: bytes) -> list[tuple[int, int]]:
    return [(at // PIECE, crc64(data[at : at + PIECE])) for at in range(0, len(data), PIECE)]


@pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 9 * MIB + 7])
def test_pieces_land_in_order(store: RemoteStore, tmp_path: Path, length: int) -> None:
    data = data_of(9 * MIB + 20)
    put(store, "k", data)
    landed = Landed(tmp_path / "f")
    store.receive_range("k", 13, length, landed.target)
    assert landed.content() == data[13 : 13 + length]
    assert landed.told == told_of(data[13 : 13 + length])


def test_what_is_not_there(store: RemoteStore, tmp_path: Path) -> None:
    landed = Landed(tmp_path / "f")
    with pytest.raises(RemoteMissingError):
        store.receive_range("no", 0, 1, landed.target)
    put(store, "k", b"four")
    with pytest.raises(CorruptError):
        store.receive_range("k", 0, 5, landed.target)
    with pytest.raises(CorruptError):
        store.receive_range("k", 9, 1, landed.target)
    assert landed.told == []


class FullFiles(Files):
    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    def receive(self, *args: object, **kwargs: object) -> list[int]:
        raise LandingError(OSError(28, "No space left on device"))


def test_a_full_disk_is_not_the_remotes_fault(store: RemoteStore, tmp_path: Path) -> None:
    put(store, "k", data_of(MIB))
    with pytest.raises(LandingError) as e:
        store.receive_range("k", 0, MIB, Landed(tmp_path / "f", FullFiles()).target)
    assert e.value.error.errno == 28
    assert store.stats().unavailable == 0
    assert store.get_range("k", 0, 5) == data_of(MIB)[:5]


def test_a_cut_connection_costs_no_piece_that_landed(open_s3: OpenStore, proxy: FaultProxy, tmp_path: Path) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    data = data_of(3 * MIB)
    put(store, "k", data)
    proxy.seen.clear()
    landed = Landed(tmp_path / "f")
    proxy.add(Fault(of("GET"), cut_at=MIB + 5))
    store.receive_range("k", 0, len(data), landed.target)
    assert landed.content() == data
    assert landed.told == told_of(data)
    assert [seen.headers["Range"] for seen in proxy.seen] == ["bytes=0-3145727", "bytes=1048576-3145727"]


def test_what_the_target_refuses_ends_it(store: RemoteStore, tmp_path: Path) -> None:
    put(store, "k", data_of(MIB))
    landed = Landed(tmp_path / "f")

    def refuse(piece: int, crc64s: Sequence[int]) -> None:
        raise CorruptError("not what was sealed")

    with pytest.raises(CorruptError, match="sealed"):
        store.receive_range("k", 0, MIB, landed.target._replace(landed=refuse))
    assert store.get_range("k", 3, 4) == data_of(MIB)[3:7]  # its connection is not used again


def test_connections_are_kept_and_replaced(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "k", b"0123456789")
    for at in range(5):
        assert store.get_range("k", at, 2) == b"0123456789"[at : at + 2]
    urls = {seen.path for seen in proxy.seen if seen.method == "GET"}
    assert len(urls) == 1  # signed once
    proxy.down()
    with pytest.raises(RemoteUnavailableError):
        store.get_range("k", 0, 1)
    proxy.up()
    assert store.get_range("k", 2, 3) == b"234"
    assert store.stats().unavailable > 0


def test_a_server_that_refuses_signed_urls_is_asked_by_the_sdk(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "k", b"0123456789")
    proxy.add(Fault(of("GET", "X-Amz-Signature"), times=None, status=403, code="AccessDenied"))
    for _ in range(REFUSALS_MAX + 3):
        assert store.get_range("k", 4, 2) == b"45"
    refused = [seen for seen in proxy.seen if "X-Amz-Signature" in seen.path]
    assert len(refused) == REFUSALS_MAX


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/50", Head(206, 5, 50, True)),
        ("HTTP/1.1 200 OK\r\ncontent-length:7", Head(200, 7, 7, True)),
        ("HTTP/1.0 200 OK\r\nContent-Length: 7", Head(200, 7, 7, False)),
        ("HTTP/1.1 206 P\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/*", Head(206, 5, None, True)),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", Head(200, None, None, True)),
        ("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 7", Head(200, None, None, True)),
        ("HTTP/1.1 200 OK\r\nContent-Length: -7\r\nConnection: Close", Head(200, None, None, False)),
        ("HTTP/2 200", Head(505, None, None, False)),
        ("", Head(505, None, None, False)),
        ("HTTP/1.1 abc", Head(505, None, None, False)),
    ],
)
def test_heads(text: str, head: Head) -> None:
    assert parse_head(text.encode()) == head


def test_a_glance_needs_a_connection_and_then_no_thread(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    data = data_of(300_000)
    other = open_s3(endpoint_url=proxy.endpoint_url)
    put(other, "a", data)
    put(other, "b", data[::-1])

    async def body() -> None:
        assert await store.glance("a", 5, 100_000) is None  # no connection was there yet
        assert store.get_range("a", 0, 1) == data[:1]
        before = threading.active_count()
        assert await store.glance("a", 5, 100_000) == data[5:100_005]
        assert await store.glance("b", 299_999, 1) == data[:1]
        assert await store.glance("a", 299_999, 2) is None
        assert threading.active_count() <= before
        assert store.get_range("a", 0, 1) == data[:1]
        for fault in (
            Fault(of("GET"), cut_at=500),
            Fault(of("GET"), drop=True),
            Fault(of("GET"), status=503, code="SlowDown"),
            Fault(of("GET"), status=404, code="NoSuchKey"),
        ):
            proxy.add(fault)
            assert await store.glance("a", 0, 1000) is None  # anything unusual is the other way's business
            assert store.get_range("a", 0, 1000) == data[:1000]
        assert await store.glance("a", 7, 1000) == data[7:1007]

    trio.run(body)


def test_urls_of_other_keys_are_signed_like_the_first(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    names = ["a", "b/c", "d~e", "f-g_h.i"]
    for name in names:
        put(store, name, name.encode())
    for name in names:
        assert store.get_range(name, 0, len(name)) == name.encode()
    seen = [s for s in proxy.seen if s.method == "GET"]
    assert len(seen) == len(names)
    assert all("X-Amz-Signature" in s.path for s in seen)


class TlsProxy:
    """TLS in front of a plain server, with a certificate of its own making."""

    def __init__(self, folder: Path, upstream_port: int) -> None:
        self.certificate, key = folder / "cert.pem", folder / "key.pem"
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
        subprocess.run([*command, "-keyout", key, "-out", self.certificate], check=True, capture_output=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as client:
            self.accepted += 1
            with socket.create_connection(("127.0.0.1", self._upstream_port)) as server:
                threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
                self._pump(client, server)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def tls(seaweed: Seaweed, tmp_path: Path) -> Iterator[TlsProxy]:
    proxy = TlsProxy(tmp_path, seaweed.port)
    yield proxy
    proxy.close()


def test_the_same_over_tls(open_s3: OpenStore, tls: TlsProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls.certificate))
    store = open_s3(endpoint_url=tls.url)
    data = data_of(3 * MIB + 5)
    put(store, "k", data)
    landed = Landed(tmp_path / "f")
    store.receive_range("k", 7, 3 * MIB - 9, landed.target)
    assert landed.content() == data[7 : 3 * MIB - 2]
    assert landed.told == told_of(data[7 : 3 * MIB - 2])
    assert store.get_range("k", MIB, 100) == data[MIB : MIB + 100]
    before = tls.accepted
    for at in range(5):
        assert trio.run(store.glance, "k", at, 200_000) == data[at : at + 200_000]
    assert tls.accepted == before  # connections are kept
    assert store.stats().unavailable == 0


def test_a_stranger_is_not_trusted(open_s3: OpenStore, tls: TlsProxy) -> None:
    store = open_s3(endpoint_url=tls.url, timeout_s=2.0, retries=0)
    with pytest.raises(RemoteUnavailableError, match="TLS"):
        store.get_range("k", 0, 1)
