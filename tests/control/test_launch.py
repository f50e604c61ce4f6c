"""The daemon's start and end, with everything but the mount itself. Each runs in a process of its own: it forks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from aof2.engine.inspect.rows import is_live
from aof2.engine.settings import Settings
from aof2.fs import launch
from aof2.fs.control.client import ControlClient, NotMountedError
from aof2.fs.launch import last_message
from tests.engine.helpers import small_settings

TOP = Path(__file__).parents[2]

# What a command that waits for a daemon's end tells its user.
CLOSING = ("taking snapshots of the log", "sending the end of the log", "closing the volume")


def start(tmp_path: Path, body: str, **env: str) -> subprocess.Popen[str]:
    script = f"""
    import os, sys
    from pathlib import Path
    from aof2.fs.launch import *
    from aof2.fs.options import Options
    from tests.control.helpers import *
    from tests.engine.helpers import small_settings
    root = Path({str(tmp_path)!r})
    settings = small_settings(root)
    settings.volume.mountpoint.mkdir(exist_ok=True)
    {textwrap.indent(textwrap.dedent(body), "    ").strip()}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 30) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def until_gone(settings: Settings, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while is_live(settings.volume.state_dir):
        assert time.monotonic() < deadline, "the daemon does not end"
        time.sleep(0.02)


def log_lines(settings: Settings) -> list[dict[str, object]]:
    return [json.loads(line) for line in (settings.volume.state_dir / "daemon.log").read_text().splitlines()]


def test_the_parent_ends_when_the_mount_answers(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    code, out, err = finish(start(tmp_path, 'daemonise(settings, Options(), ending_when(root / "end")); print("up")'))
    assert (code, out, err) == (0, "up\n", "")
    try:
        with ControlClient(settings) as client:
            client.watch_daemon()
            pid = client.call("ping")["pid"]
            assert os.getsid(pid) == pid
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
            assert os.readlink(f"/proc/{pid}/fd/2") == str(settings.volume.state_dir / "daemon.log")
            assert not client.wait_ended(0)
            (tmp_path / "end").touch()
            assert client.wait_ended(20)
    finally:
        (tmp_path / "end").touch()
    until_gone(settings)
    assert (settings.volume.state_dir / "daemon.log").stat().st_mode & 0o777 == 0o600
    assert [line["message"] for line in log_lines(settings)] == ["mounted", *CLOSING, "unmounted"]
    with pytest.raises(NotMountedError):
        ControlClient(settings)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("LaunchError('no\\nroom')", "LaunchError: no\\nroom"),
        ("OSError(28, 'No space left', '/x')", "LaunchError: /x: no space left; make room on that disk"),
        ("ZeroDivisionError('oops')", "LaunchError: internal error: ZeroDivisionError: oops; see "),
    ],
)
def test_the_parent_says_why_it_did_not_come_up(tmp_path: Path, raised: str, says: str) -> None:
    body = f"""
    async def serve(settings, mountpoint, options, ready):
        raise {raised}
    daemonise(settings, Options(), serve)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 1
    assert says in err.splitlines()[-1]


def test_a_child_that_dies_silently(tmp_path: Path) -> None:
    body = """
    async def serve(settings, mountpoint, options, ready):
        os._exit(7)
    daemonise(settings, Options(), serve)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 1
    assert "the daemon ended before the mount answered; see" in err.splitlines()[-1]


def test_a_long_log_moves_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LOG_BYTES_MAX", 10)
    for _ in range(2):
        fd = launch.open_log(tmp_path)
        os.write(fd, b"eleven byte")
        os.close(fd)
    fd = launch.open_log(tmp_path)
    os.close(fd)
    assert (tmp_path / "daemon.log").stat().st_size == 0
    assert (tmp_path / "daemon.log.1").read_bytes() == b"eleven byte"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_foreground_tells_systemd_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    settings = small_settings(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(20)
        process = start(
            tmp_path,
            """
            import aof2.fs.launch as launch
            launch.unmount = lambda _: (root / "end").touch()
            foreground(settings, Options(), ending_when(root / "end"))
            """,
            NOTIFY_SOCKET=str(tmp_path / "notify"),
        )
        try:
            assert told.recv(4096).splitlines()[0] == b"READY=1"
            process.send_signal(number)
            assert told.recv(4096) == b"STOPPING=1\nSTATUS=unmounting"
            assert told.recv(4096) == b"STOPPING=1"
        finally:
            code, _, err = finish(process)
    assert code == 0, err
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["mounted", "stopping", *CLOSING, "unmounted"]
    until_gone(settings)


def test_a_busy_mount_is_let_go_of(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import aof2.fs.launch as launch
        from aof2.fs.mountpoint import BusyError
        def busy(path):
            raise BusyError("in use")
        launch.unmount, launch.detach, launch.GRACE_S = busy, lambda path: print("detached"), 0.1
        foreground(settings, Options(), serve_without_a_mount)
        """,
    )
    settings = small_settings(tmp_path)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            ControlClient(settings).close()
            break
        except NotMountedError:
            time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, out) == (0, "detached\n"), err


def test_notify_without_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("", "relative", str(tmp_path / "nobody")):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        launch.notify("READY=1")


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    assert last_message(log) == "its log says nothing"
    log.write_text('{"message": "sealing"}\n{"message": "sending the log"}\n{"event": "checkpoint.staged"}\nFatal\n')
    assert last_message(log) == "sending the log"
