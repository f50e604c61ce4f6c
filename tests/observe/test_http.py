"""The /metrics server, over a real socket."""

from __future__ import annotations

import http.client
import socket

import pytest

from aof2.engine.observe.http import ListenError, serving
from aof2.engine.observe.metrics import StorageMetrics


def ask(port: int, method: str, path: str, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def test_it_serves_metrics() -> None:
    metrics = StorageMetrics()
    metrics.thrash_total.inc(3)
    with serving(metrics.render, "127.0.0.1:0") as port:
        status, headers, body = ask(port, "GET", "/metrics")
        assert status == 200
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"\naof2_thrash_total 3.0\n" in body
        assert int(headers["content-length"]) == len(body)
        assert headers["server"].strip() == "aof2"
        assert ask(port, "GET", "/metrics?name[]=x")[0] == 200


def test_head_has_no_body() -> None:
    with serving(lambda: b"x 1\n", "127.0.0.1:0") as port:
        status, headers, body = ask(port, "HEAD", "/metrics")
        assert (status, headers["content-length"], body) == (200, "4", b"")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics/x", "/favicon.ico", "/../metrics"])
def test_nothing_else_is_there(path: str) -> None:
    with serving(lambda: b"x 1\n", "127.0.0.1:0") as port:
        assert ask(port, "GET", path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_allowed(method: str) -> None:
    with serving(lambda: b"x 1\n", "127.0.0.1:0") as port:
        status, headers, _ = ask(port, method, "/metrics")
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_a_port_in_use_is_said_clearly() -> None:
    with serving(lambda: b"", "127.0.0.1:0") as port:
        listen = f"127.0.0.1:{port}"
        with pytest.raises(ListenError) as caught, serving(lambda: b"", listen):
            pass
        assert str(caught.value) == (
            f'metrics.listen = "{listen}": address already in use; choose another host:port, or "" for none'
        )
    with serving(lambda: b"", listen):  # free again once closed
        pass


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_is_not_ours(listen: str) -> None:
    with pytest.raises(ListenError, match=f'metrics.listen = "{listen}": '), serving(lambda: b"", listen):
        pass


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(lambda: b"x 1\n", "[::1]:0") as port:
        assert ask(port, "GET", "/metrics", "::1")[2] == b"x 1\n"


@pytest.mark.expects_warnings
def test_what_cannot_be_rendered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bytes:
        raise RuntimeError("secret detail")

    with serving(broken, "127.0.0.1:0") as port:
        status, _, body = ask(port, "GET", "/metrics")
    assert (status, body) == (500, b"see the log\n")
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == ["metrics could not be rendered"]


def test_a_client_that_says_nothing_holds_up_nobody() -> None:
    with serving(lambda: b"x 1\n", "127.0.0.1:0") as port:
        clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2)]
        clients[1].sendall(b"GET /met")
        assert ask(port, "GET", "/metrics")[0] == 200
        for client in clients:
            client.close()


def test_it_ends_with_its_block_and_starts_again() -> None:
    for _ in range(2):
        with serving(lambda: b"x 1\n", "127.0.0.1:0") as port:
            assert ask(port, "GET", "/metrics")[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(port, "GET", "/metrics")


def test_no_address_is_served_nowhere() -> None:
    with serving(lambda: b"", "") as port:
        assert port == 0
