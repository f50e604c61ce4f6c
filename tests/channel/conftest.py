"""A daemon behind a channel for each test; skipped where nothing can be mounted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.channel.appending import Appending
from tests.channel.support import Daemon


@pytest.fixture(params=["read", "io_uring"])
def transport(request: pytest.FixtureRequest) -> str:
    """How requests are to come."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting takes root and /dev/fuse")
    if request.param == "io_uring" and not os.path.exists("/sys/module/fuse/parameters/enable_uring"):
        pytest.skip("this kernel does not speak FUSE over io_uring")
    return str(request.param)


@pytest.fixture
def start(tmp_path: Path, transport: str) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons; what they mounted is unmounted afterwards, whatever happened."""
    started: list[Daemon] = []

    def one(**options: Any) -> Daemon:
        folder = tmp_path / f"d{len(started)}"
        folder.mkdir()
        started.append(Daemon(folder, **{"uring": transport == "io_uring", **options}))
        assert started[-1].info["transport"].startswith(transport)
        return started[-1]

    yield one
    for daemon in started:
        daemon.close()


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start()


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder that other users can get to: pytest keeps its own to itself."""
    folder = Path(tempfile.mkdtemp(prefix="aof2-channel-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def append(start: Callable[..., Daemon]) -> Iterator[Callable[..., Appending]]:
    made: list[Appending] = []

    def one(**options: Any) -> Appending:
        started = start(**options.pop("daemon", {}))
        made.append(Appending(started, **options))
        return made[-1]

    yield one
    for appending in made:
        for fd in list(appending.opened):
            appending.close(fd)
