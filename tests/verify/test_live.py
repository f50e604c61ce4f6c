"""A volume that another process has open: looked at without disturbing it, never repaired."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.errors import ReadOnlyError
from aof2.engine.inspect.paths import resolve
from aof2.engine.inspect.rows import is_live, open_rows
from aof2.engine.inspect.status import object_status
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from tests.verify.build import backing, flip, kinds

DAEMON = """
import sys
from pathlib import Path
import trio
from tests.engine.helpers import put_object, run_volume, small_settings

async def body(v):
    await put_object(v, "default", b"while mounted", b"x" * 1000)
    print("ready", flush=True)
    busy = 0
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            async def wait():
                await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
                scope.cancel()
            nursery.start_soon(wait)
            while True:
                key = await put_object(v, "default", b"busy%d" % busy, b"y" * 50_000)
                await v.checkpoint("default")
                await v.evict([key])
                busy += 1
                await trio.sleep(0.01)

run_volume(small_settings(Path(sys.argv[1])), body)
"""


@pytest.fixture
def daemon(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    root = settings.volume.state_dir.parent
    top = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=top
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.communicate("stop\n", timeout=30)
    assert child.returncode == 0


def test_looking_at_a_busy_volume(settings: Settings, daemon: subprocess.Popen[str]) -> None:
    assert is_live(settings.volume.state_dir)
    for deep in (False, True):
        report = verify(settings, deep_remote=deep)
        assert (report.exit_code, kinds(report), report.live) == (0, [], True), report.findings
    with pytest.raises(ReadOnlyError, match="the volume is mounted; stop the daemon"):
        verify(settings, repair=True)
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        place = resolve(view, settings.volume.mountpoint, "default/while mounted")
        assert place is not None
        assert object_status(view, settings, place).size == 1000


def test_files_made_ahead_are_no_orphans(settings: Settings, daemon: subprocess.Popen[str]) -> None:
    folder = backing(settings, "here").parent
    for name, data in (("1099511999999.1", b""), ("1099511999998.1", b"not empty")):
        (folder / name).write_bytes(data)
        os.utime(folder / name, (0, 0))
    strays = [found.path for found in verify(settings).findings if found.kind is Kind.LOCAL_ORPHAN]
    assert strays == [str(folder / "1099511999998.1")]


def test_damage_in_a_busy_volume(settings: Settings, daemon: subprocess.Popen[str]) -> None:
    flip(backing(settings, "here"), 5)
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.LOCAL_DAMAGED])
