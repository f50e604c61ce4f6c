"""Files with holes: they cost what is in them, here and in the remote, and stay what they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.posix.helpers import code, opened
from tests.support.mount import MountedVolume, mounted_volume, until

MIB = 1 << 20
TIB = 1 << 40
TENANTS = {"default": {"kind": "files", "compression": "none"}, "packed": {"kind": "files", "compression": "zstd"}}


@pytest.fixture(params=["passthrough", "ranged"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MountedVolume]:
    options = ["nopassthrough"] if request.param == "ranged" else []
    with mounted_volume(tmp_path, options=options, tenants=TENANTS) as volume:
        yield volume


@pytest.fixture
def one(tmp_path: Path) -> Iterator[MountedVolume]:
    """The same where the mode does not matter."""
    with mounted_volume(tmp_path, tenants=TENANTS, cache={"hot_bytes": "8GiB"}) as volume:
        yield volume


def taken(folder: Path) -> int:
    """What the disk has given for everything below."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def du(path: Path) -> int:
    return path.stat().st_blocks * 512


def write_at(path: Path, *pieces: tuple[int, bytes], size: int | None = None) -> None:
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        for offset, data in pieces:
            os.pwrite(fd, data, offset)
        if size is not None:
            os.ftruncate(fd, size)


def read_at(path: Path, offset: int, length: int) -> bytes:
    with opened(path, os.O_RDONLY) as fd:
        return os.pread(fd, length, offset)


def verify(volume: MountedVolume) -> None:
    ran = volume.aof2("verify", "--remote")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_hole_of_a_tebibyte_costs_nothing(own: MountedVolume) -> None:
    """Sealed, uploaded, evicted, written into, unmounted and brought back on an empty machine."""
    huge = own.path / "huge"
    write_at(huge, size=TIB)
    (own.path / "other").write_bytes(b"x" * 5000)
    own.done("wait", own.path / "other")
    own.done("wait", own.path)
    assert (du(huge), huge.stat().st_size) == (0, TIB)
    own.evict(own.path)
    assert read_at(huge, TIB // 3, 10) == bytes(10)
    where = 700 << 30
    write_at(huge, (where, b"there"))
    own.done("wait", huge)
    own.evict(huge)
    assert read_at(huge, where - 5, 15) == bytes(5) + b"there" + bytes(5)
    assert (du(huge), huge.stat().st_size) == (4096, TIB)
    with pytest.raises(OSError, match="No data"):
        os.getxattr(huge, "user.aof2.sha256")  # nobody waits ten minutes for a hash of zeros
    own.umount()
    assert taken(own.remote) < 4 * MIB
    verify(own)
    restored = own.root / "again"
    conf = own.conf.read_text().replace(str(own.state_dir), str(restored)).replace("mnt", "mnt2")
    (own.root / "again.conf").write_text(conf)
    own.done("restore", "--conf", own.root / "again.conf", "--from", f"file://{own.remote}")
    own.conf.write_text(conf.replace("mnt2", "mnt"))
    own.remount()
    assert (du(huge), huge.stat().st_size) == (4096, TIB)
    assert read_at(huge, where - 5, 15) == bytes(5) + b"there" + bytes(5)


def test_holes_between_bytes(own: MountedVolume) -> None:
    """Blocks that were never written are not stored; bytes, sizes and where the holes are stay."""
    path = own.mountpoint / ("packed" if own.options else "default") / "f"
    pieces = [(0, os.urandom(3000)), (10 * MIB, os.urandom(MIB)), (200 * MIB + 5, b"deep")]
    size = 300 * MIB + 17
    write_at(path, *pieces, size=size)
    before = du(path)
    assert before < 2 * MIB
    own.done("wait", path)
    assert taken(own.remote) < 6 * MIB
    assert du(path) == before
    own.evict(path)
    assert du(path) == before
    with opened(path, os.O_RDONLY) as fd:
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) <= MIB
        assert os.lseek(fd, 2 * MIB, os.SEEK_DATA) == 10 * MIB
        assert 200 * MIB <= os.lseek(fd, 12 * MIB, os.SEEK_DATA) <= 200 * MIB + 5
        assert code(os.lseek, fd, 250 * MIB, os.SEEK_DATA) == "ENXIO"
        for offset, data in pieces:
            assert os.pread(fd, len(data) + 10, offset) == data + bytes(10)
        assert os.pread(fd, MIB, 100 * MIB) == bytes(MIB)
        assert os.pread(fd, 100, size - 50) == bytes(50)
    assert taken(own.state_dir / "hot_cache") < 8 * MIB, "holes were filled"
    own.done("warm", path)
    assert taken(own.state_dir / "hot_cache") < 8 * MIB, "holes were filled"
    assert os.getxattr(path, "user.aof2.residency") == b"1.000"
    # Written to again while it is only partly here: old holes, new bytes, a new hole.
    own.evict(path)
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"new", 150 * MIB)
        os.ftruncate(fd, 400 * MIB)
    own.done("wait", path)
    own.evict(path)
    assert read_at(path, 150 * MIB, 5) == b"new\0\0"
    for offset, data in pieces:
        assert read_at(path, offset, len(data)) == data
    assert read_at(path, 399 * MIB, 2 * MIB) == bytes(MIB)
    own.umount()
    verify(own)


def test_reserved_space_reads_as_zeros_and_is_given_back(one: MountedVolume) -> None:
    own = one
    path = own.path / "f"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, 32 * MIB)
        os.pwrite(fd, b"x" * MIB, 8 * MIB)
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
    own.done("wait", path)
    assert path.stat().st_mtime_ns == 2_000_000_009
    assert du(path) <= 2 * MIB
    assert taken(own.state_dir / "hot_cache") <= 3 * MIB
    expected = bytes(8 * MIB) + b"x" * MIB + bytes(23 * MIB)
    assert path.read_bytes() == expected
    own.evict(path)
    assert path.read_bytes() == expected
    own.umount()
    verify(own)


def test_a_removed_file_is_left_off(one: MountedVolume) -> None:
    """`rm` of what takes long frees its place: the sealer, the upload and umount do not go on with it."""
    large = one.path / "large"
    with opened(large, os.O_RDWR | os.O_CREAT) as fd:
        for at in range(800):
            os.pwrite(fd, b"%07d\n" % at * (MIB // 8), at * MIB)
    (one.path / "small").write_bytes(b"small")
    one.done("wait", one.path / "small")
    large.unlink()
    one.umount()
    assert not [path for path in (one.state_dir / "hot_cache" / "default").iterdir() if path.stat().st_size > MIB]
    assert taken(one.remote) < 700 * MIB, "all of it was sent, though it was gone"
    verify(one)


def test_the_largest_file(one: MountedVolume) -> None:
    """Sixteen TiB, as on ext4."""
    own = one
    path = own.path / "f"
    path.write_bytes(b"x")
    assert code(os.truncate, path, 16 * TIB + 1) == "EFBIG"
    write_at(path, size=16 * TIB - 4096)
    own.done("wait", path)
    assert path.stat().st_size == 16 * TIB - 4096
    assert read_at(path, 16 * TIB - 4196, 200) == bytes(100)
    os.truncate(path, 1)
    assert path.read_bytes() == b"x"
    own.umount()
    verify(own)


def test_told_to_end_while_a_large_file_is_hashed(one: MountedVolume) -> None:
    """SIGTERM does not wait for what takes long; the next mount has it, and goes on."""
    path = one.path / "f"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        for at in range(300):
            os.pwrite(fd, b"%07d\n" % at * (MIB // 8), at * MIB)
    os.kill(one.daemon_pid(), signal.SIGTERM)
    until(lambda: not one.pids(), "it does not end")
    one.remount()
    assert read_at(path, 299 * MIB, 8) == b"%07d\n" % 299
    one.umount()
    verify(one)
