"""A daemon behind a channel for each test; skipped where nothing can be mounted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.channel.support import Daemon


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons; what they mounted is unmounted afterwards, whatever happened."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting takes root and /dev/fuse")
    started: list[Daemon] = []

    def one(**options: Any) -> Daemon:
        folder = tmp_path / f"d{len(started)}"
        folder.mkdir()
        started.append(Daemon(folder, **options))
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
