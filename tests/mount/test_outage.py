"""The remote goes away for a while: what is here works, what is not answers EIO, and no byte is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.load import content
from tests.mount.outage import BlinkingLoad, comes_back, everything_is_there, s3_world
from tests.mount.world import World, is_mounted
from tests.support.seaweed import Seaweed, running_seaweed

SIZE = 1_300_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def w(tmp_path: Path, server: Seaweed) -> Iterator[World]:
    server.start()
    with s3_world(tmp_path / "w", server, prefix=tmp_path.name) as made:
        made.mount()
        yield made


def fails_with(code: int, call: object) -> None:
    assert callable(call)
    with pytest.raises(OSError) as e:
        call()
    assert e.value.errno == code, e.value


def test_the_remote_is_away_and_comes_back(w: World, server: Seaweed) -> None:
    files = {name: content(n, SIZE) for n, name in enumerate(("here", "kept", "cold", "cold-too", "cold-three"))}
    for name, data in files.items():
        (w.files / name).write_bytes(data)
    w.ok("wait", w.files)
    w.ok("evict", *(w.files / name for name in files if name.startswith("cold")))

    server.stop()
    # what is here
    assert (w.files / "here").read_bytes() == files["here"]
    assert sorted(os.listdir(w.files)) == sorted(files)
    assert (w.files / "cold").stat().st_size == SIZE
    # what is not
    fails_with(errno.EIO, (w.files / "cold").read_bytes)
    with open(w.files / "cold", "rb") as f:
        fails_with(errno.EIO, lambda: os.pread(f.fileno(), 10, 1_200_000))
    # writing goes on
    files["new"] = content(10, SIZE)
    with open(w.files / "new", "wb") as f:
        f.write(files["new"])
        f.flush()
        os.fsync(f.fileno())
    files["here"] = files["here"][:5] + b"changed" + files["here"][12:]
    with open(w.files / "here", "r+b") as f:
        os.pwrite(f.fileno(), b"changed", 5)
        os.fsync(f.fileno())
    files["cold-too"] = b"overwritten whole"
    (w.files / "cold-too").write_bytes(files["cold-too"])
    os.rename(w.files / "cold-three", w.files / "renamed")
    files["renamed"] = files.pop("cold-three")
    with open(w.files / "renamed", "r+b") as f:  # a part of a block that is not here
        fails_with(errno.EIO, lambda: os.pwrite(f.fileno(), b"x", 10))
    for name in ("new", "here", "cold-too"):
        assert (w.files / name).read_bytes() == files[name]
    # commands say so, and come back
    done = w.run("wait", w.files / "new")
    assert done.code == 1 and "does not answer" in done.err and "Traceback" not in done.err
    done = w.run("umount")
    assert done.code == 1 and "does not answer" in done.err and is_mounted(w.mnt)
    w.ok("status")

    server.start()
    comes_back((w.files / "cold").read_bytes)
    assert (w.files / "cold").read_bytes() == files["cold"]
    with open(w.files / "renamed", "r+b") as f:
        os.pwrite(f.fileno(), b"x", 10)
    files["renamed"] = files["renamed"][:10] + b"x" + files["renamed"][11:]
    everything_is_there(w, files)


def test_unmounted_while_the_remote_is_away(w: World, server: Seaweed) -> None:
    files = {f"f{n}": content(n, SIZE) for n in range(8)}
    (w.files / "f0").write_bytes(files["f0"])
    w.ok("wait", w.files)
    server.stop()
    for name, data in files.items():
        (w.files / name).write_bytes(data)
    w.umount("--no-wait")
    assert not is_mounted(w.mnt)
    server.start()
    w.mount()
    everything_is_there(w, files)


def test_the_remote_blinks_under_load(w: World, server: Seaweed) -> None:
    """Writers and readers go on through outages; what a reader gets is right, or EIO."""
    load = BlinkingLoad(w, files_max=300)
    with load.running():
        for _ in range(2):
            w.run("evict", w.files)
            server.stop()
            w.run("evict", w.files)
            server.start()
    assert load.wrong == []
    everything_is_there(w, load.files)
