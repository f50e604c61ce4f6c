"""Names as upcalls, and names told ahead: the channel answers for those, until anything may have changed."""

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


def told_ahead(daemon: Daemon, *names: str) -> None:
    """As after a look-up of "a"; they were told to have 1,000 bytes, so it shows who answers."""
    daemon.call("ahead", names=names)
    assert size(daemon, "a") == 3
    daemon.call("settled")
    assert asked(daemon) == ["a"]


def test_look_ups_come_past_libfuse(naming: Daemon) -> None:
    assert size(naming, "a") == 3
    with pytest.raises(OSError) as error:
        size(naming, "missing")
    assert error.value.errno == errno.ENOENT
    assert asked(naming) == ["a", "missing"]


def test_what_was_told_ahead_is_answered_by_the_channel(naming: Daemon) -> None:
    told_ahead(naming, "b", "c", "d")
    assert [size(naming, name) for name in "bcdbd"] == [1000] * 5
    assert asked(naming) == []
    assert size(naming, "e") == 3
    assert asked(naming) == ["e"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: os.chmod(d.mount / "f", 0o600),
        lambda d: os.truncate(d.mount / "f", 1),
        lambda d: os.unlink(d.mount / "f"),
        lambda d: (d.mount / "f").read_bytes(),
        lambda d: (d.mount / "new").write_bytes(b"x"),
        lambda d: d.call("invalidate_attr", name="f"),
        lambda d: d.call("invalidate_inode", name="f"),
        lambda d: d.call("invalidate_entry", name="f"),
    ],
    ids=["chmod", "truncate", "unlink", "open", "create", "invalidate_attr", "invalidate_inode", "invalidate_entry"],
)
def test_it_is_forgotten_where_anything_may_have_changed(naming: Daemon, change: Callable[[Daemon], object]) -> None:
    told_ahead(naming, "b")
    assert size(naming, "b") == 1000
    in_time(lambda: change(naming))
    assert until(lambda: size(naming, "b") == 3)


def test_it_is_forgotten_after_a_while(naming: Daemon) -> None:
    told_ahead(naming, "b")
    assert size(naming, "b") == 1000
    assert until(lambda: size(naming, "b") == 3)


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
