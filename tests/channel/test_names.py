"""Names as upcalls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.channel.support import Daemon, in_time, until


@pytest.fixture
def naming(start: Callable[..., Daemon]) -> Daemon:
    daemon = start(names=True)
    for name in "abcdef":
        daemon.file(name, b"abc")
    return daemon


def asked(daemon: Daemon) -> list[str]:
    """Names that the daemon was asked for as upcalls."""
    return [op[1] for op in daemon.ops("upcall")]


def size(daemon: Daemon, name: str) -> int:
    return int(in_time(lambda: os.stat(daemon.mount / name).st_size))


def test_look_ups_come_past_libfuse(naming: Daemon) -> None:
    assert size(naming, "a") == 3
    with pytest.raises(OSError) as error:
        size(naming, "missing")
    assert error.value.errno == errno.ENOENT
    assert asked(naming) == ["a", "missing"]


def test_where_there_is_no_room_for_upcalls_libfuse_asks(start: Callable[..., Daemon]) -> None:
    daemon = start(names=True, arguments=["--pending-max=1"])
    path, _ = daemon.file("a", b"abc"), daemon.file("b", b"abc")
    fd = in_time(lambda: os.open(path, os.O_RDONLY))
    try:
        daemon.call("hold", name="a")
        reading = ThreadPoolExecutor().submit(os.pread, fd, 3, 0)
        assert until(lambda: bool(daemon.ops("read")))
        assert size(daemon, "b") == 3
        assert asked(daemon) == []
        daemon.call("unhold", name="a")
        assert reading.result(20) == b"abc"
    finally:
        in_time(lambda: os.close(fd))
