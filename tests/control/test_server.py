"""The control socket under clients that misbehave: each gets a line or nothing, and the daemon goes on."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from aof2.fs.control import server, verbs
from aof2.fs.control.client import ControlClient, NotMountedError
from aof2.fs.control.durable import Tell
from aof2.fs.control.protocol import REQUEST_BYTES_MAX, ControlError, Progress
from tests.control.helpers import FakeMounted, run_mounted
from tests.engine.helpers import small_settings


def path_of(mounted: FakeMounted) -> str:
    return str(mounted.volume.state_dir / "control.sock")


async def raw(mounted: FakeMounted, sent: bytes, *, shut: bool = True) -> bytes:
    """What comes back for these bytes."""
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        await sock.connect(path_of(mounted))
        stream = trio.SocketStream(sock)
        try:
            await stream.send_all(sent)
            if shut:
                await stream.send_eof()
            return b"".join([part async for part in stream])
        except trio.BrokenResourceError:
            return b""


def test_the_socket_is_the_owners(tmp_path: Path) -> None:
    async def body(mounted: FakeMounted) -> None:
        mode = os.stat(path_of(mounted)).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600

    settings = small_settings(tmp_path)
    run_mounted(settings, body)
    assert not (settings.volume.state_dir / "control.sock").exists()
    run_mounted(settings, body)


def test_a_name_left_behind_is_replaced(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    settings.volume.state_dir.mkdir()
    (settings.volume.state_dir / "control.sock").touch()

    async def body(mounted: FakeMounted) -> None:
        assert (await mounted.call("ping"))["pid"] == os.getpid()

    run_mounted(settings, body)


def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    settings = small_settings(tmp_path / ("x" * 120))

    async def body(mounted: FakeMounted) -> None:
        assert (await mounted.call("ping"))["pid"] == os.getpid()

    run_mounted(settings, body)


def test_strangers_are_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        monkeypatch.setattr(server, "_may_ask", lambda _: False)
        with pytest.raises(ControlError, match="only the user who mounted"):
            await mounted.call("ping")

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"hello\n", "not a line of JSON"),
        (b"[]\n", "not a JSON object"),
        (b"[" * 100_000 + b"\n", "JSON"),
        (b'{"verb": "ping"', "ends before its line"),
        (b"\xff\xfe\n", "not a line of JSON"),
        (b'{"verb": 7}\n', "no such verb"),
        (b"x" * (REQUEST_BYTES_MAX + 1), "name fewer paths"),
    ],
)
def test_bytes_that_are_no_request(tmp_path: Path, sent: bytes, says: str) -> None:
    async def body(mounted: FakeMounted) -> None:
        got = await raw(mounted, sent)
        if got:  # a client that sends on after the answer may lose it
            answer = json.loads(got)
            assert says in answer["error"]
            assert answer["exit"] == 2
        assert (await mounted.call("ping"))["pid"] == os.getpid()

    run_mounted(small_settings(tmp_path), body)


def test_a_client_that_goes_away_cancels_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        started, cancelled = trio.Event(), trio.Event()

        async def forever(_: object, __: object, ___: Tell) -> object:
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        monkeypatch.setitem(verbs.VERBS, "ping", (verbs.Args, forever))
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            await sock.connect(path_of(mounted))
            await sock.send(b'{"verb": "ping"}\n')
            await started.wait()
        with trio.fail_after(5):
            await cancelled.wait()

    run_mounted(small_settings(tmp_path), body)


def test_too_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        monkeypatch.setattr(server, "CLIENTS_MAX", 2)
        held = []
        for _ in range(2):
            sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            await sock.connect(path_of(mounted))
            held.append(sock)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ControlError, match="2 requests are under way"):
            await mounted.call("ping")
        for sock in held:
            sock.close()
        while True:
            try:
                assert await mounted.call("ping")
                break
            except ControlError:  # they have not been noticed yet
                await trio.sleep(0.01)

    run_mounted(small_settings(tmp_path), body)


def test_a_client_that_never_asks_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        monkeypatch.setattr(server, "ASK_MAX_S", 0.05)
        assert await raw(mounted, b"", shut=False) == b""

    run_mounted(small_settings(tmp_path), body)


def test_progress_and_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        async def slow(_: object, __: object, tell: Tell) -> object:
            for i in range(100):
                await tell(Progress("work", i, 100))
            await trio.sleep(0.2)
            return {"done": True}

        monkeypatch.setattr(server, "ALIVE_EVERY_S", 0.02)
        monkeypatch.setitem(verbs.VERBS, "ping", (verbs.Args, slow))
        told: list[Progress] = []
        assert await mounted.call("ping", on_progress=told.append) == {"done": True}
        assert told[0] == Progress("work", 0, 100)
        assert len(told) < 10  # nobody looks more often than that
        lines = (await raw(mounted, b'{"verb": "ping"}\n', shut=False)).splitlines()
        assert json.loads(lines[-1]) == {"result": {"done": True}}
        assert {"alive": True} in [json.loads(line) for line in lines]

    run_mounted(small_settings(tmp_path), body)


@pytest.mark.expects_warnings
def test_a_bug_in_a_verb_ends_the_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(mounted: FakeMounted) -> None:
        async def broken(*_: object) -> object:
            raise ZeroDivisionError("oops")

        with monkeypatch.context() as patch:
            patch.setitem(verbs.VERBS, "ping", (verbs.Args, broken))
            with pytest.raises(ControlError, match="internal error: ZeroDivisionError: oops"):
                await mounted.call("ping")
        assert await mounted.call("ping")

    run_mounted(small_settings(tmp_path), body)


def test_a_socket_nobody_listens_on(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    settings.volume.state_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(settings.volume.state_dir / "control.sock"))
    with pytest.raises(NotMountedError):
        ControlClient(settings)
