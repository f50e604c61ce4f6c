"""Many small files in one call: hashed as hashlib does, left where they may change, packed as Python does."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
from pathlib import Path

import pytest

from aof2 import native
from aof2.engine.blob import pack
from aof2.engine.blob.writer import LEVEL, SAVED_SHIFT, BlobWriter, compress_all
from aof2.engine.env import Files
from aof2.native import small
from aof2.native.small import SmallStatus

SIZES = [0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 1000, 4096, 65_536, 100_001]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def written(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def hash_all(paths: list[str], size_max: int = 1 << 20) -> list[small.SmallFile]:
    found = small.hash_small(paths, size_max=size_max, loose_max=64 << 10)
    small.close_all([one.fd for one in found if one.fd >= 0])
    return found


def test_hashes_and_stamps(tmp_path: Path) -> None:
    data = [content(i, size) for i, size in enumerate(SIZES)]
    paths = [written(tmp_path, f"f{i}", piece) for i, piece in enumerate(data)]
    before = [os.stat(path) for path in paths]
    for one, piece, st in zip(hash_all(paths), data, before, strict=True):
        assert one.status == SmallStatus.READ
        assert (one.size, one.inode) == (len(piece), st.st_ino)
        assert (one.mtime_ns, one.ctime_ns, one.atime_ns) == (st.st_mtime_ns, st.st_ctime_ns, st.st_atime_ns)
        assert (one.crc64, one.sha256) == (native.crc64(piece), hashlib.sha256(piece).digest())


@pytest.mark.parametrize("size_max", [100_001, 1 << 20])
def test_checksums_of_pieces(tmp_path: Path, size_max: int) -> None:
    """Also where scratch is for fewer files than there are."""
    data = [content(i, SIZES[i % len(SIZES)]) for i in range(90)]
    paths = [written(tmp_path, f"f{i}", piece) for i, piece in enumerate(data)]
    found = small.hash_small(paths, size_max=size_max, loose_max=64 << 10, piece_bytes=1000)
    small.close_all([one.fd for one in found])
    for one, piece in zip(found, data, strict=True):
        assert (one.crc64, one.sha256) == (native.crc64(piece), hashlib.sha256(piece).digest())
        crcs = [native.crc64(piece[at : at + 1000]).to_bytes(8, "little") for at in range(0, len(piece), 1000)]
        assert one.piece_crcs == b"".join(crcs)


def test_hundreds_are_read_and_compared(tmp_path: Path) -> None:
    data = [content(i, 1 + i % 700) for i in range(600)]
    paths = [written(tmp_path, f"f{i}", piece) for i, piece in enumerate(data)]
    crcs, shas = [native.crc64(piece) for piece in data], [hashlib.sha256(piece).digest() for piece in data]
    wrong = {3, 255, 256, 599}
    for i in wrong:
        shas[i] = shas[i - 1]
    out, statuses = small.read_small(paths, list(map(len, data)), crcs, b"".join(shas))
    assert bytes(out) == b"".join(data)
    assert {i for i, status in enumerate(statuses) if status} == wrong
    assert {statuses[i] for i in wrong} == {SmallStatus.CHANGED}
    landed = land(tmp_path, data[:300])
    assert [one.status for one in landed] == [SmallStatus.READ] * 300
    assert [one.sha256 for one in landed] == [hashlib.sha256(piece).digest() for piece in data[:300]]


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    paths = [written(tmp_path, f"f{i}", b"x") for i in range(20)] + [str(tmp_path / "none")]
    before = len(os.listdir("/proc/self/fd"))
    hash_all(paths)
    small.read_small(paths, [1] * 21, [native.crc64(b"x")] * 21, hashlib.sha256(b"x").digest() * 21)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_hashed(tmp_path: Path) -> None:
    paths = [written(tmp_path, name, content(3, 9000)) for name in ("open", "mapped", "large", "fine")]
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as f:
        f.truncate(1 << 20)
        f.seek(900_000)
        f.write(b"end")
    loose = tmp_path / "loose"
    with loose.open("wb") as f:
        Files().allocate_ahead(f.fileno(), 0, 300_000)
        f.write(b"x")
    paths += [str(sparse), str(loose), str(tmp_path / "none")]
    written(tmp_path, "large", content(4, 70_000))
    fd = os.open(paths[1], os.O_RDWR)
    with open(paths[0], "ab"), mmap.mmap(fd, 9000) as mapped:
        os.close(fd)
        found = [one.status for one in hash_all(paths, size_max=65_536)]
        del mapped
    busy, other = SmallStatus.BUSY, SmallStatus.OTHER
    assert found == [busy, busy, other, SmallStatus.READ, other, other, -errno.ENOENT]


def test_only_what_was_sealed_is_read(tmp_path: Path) -> None:
    data = [content(i, 50 + i) for i in range(6)]
    paths = [written(tmp_path, f"f{i}", piece) for i, piece in enumerate(data)]
    crcs, shas = [native.crc64(piece) for piece in data], [hashlib.sha256(piece).digest() for piece in data]
    crcs[1] ^= 1
    shas[2] = shas[3]
    written(tmp_path, "f4", data[4][:-1])
    (tmp_path / "f5").unlink()
    out, statuses = small.read_small(paths, list(map(len, data)), crcs, b"".join(shas))
    changed = SmallStatus.CHANGED
    assert statuses == [SmallStatus.READ, changed, changed, SmallStatus.READ, changed, -errno.ENOENT]
    assert out[:50] == data[0]
    assert out[50 + 51 + 52 :][:53] == data[3]


@pytest.mark.parametrize("level", [0, LEVEL])
def test_a_pack_as_python_makes_it(level: int) -> None:
    data = [content(i, size) if i % 2 else bytes([i]) * size for i, size in enumerate(SIZES) if size]
    expected, members = bytearray(7), []
    for i, piece in enumerate(data):
        at = len(expected)
        writer = BlobWriter(expected.extend, chunk_id=i + 9, generation=i, block_bytes=1 << 20, level=level)
        writer.add_block(piece)
        members.append(pack.member_of(writer.finish(), at))
    raw = bytearray(b"".join(data))
    packed, packed_lengths = compress_all(raw, list(map(len, data))) if level else (b"", [])
    blobs, entries = small.encode_pack(
        raw,
        list(map(len, data)),
        chunk_ids=[i + 9 for i in range(len(data))],
        generations=list(range(len(data))),
        crc64s=[native.crc64(piece) for piece in data],
        sha256s=b"".join(hashlib.sha256(piece).digest() for piece in data),
        block_bytes=1 << 20,
        base=7,
        packed=packed,
        packed_lengths=packed_lengths,
        saved_shift=SAVED_SHIFT,
    )
    assert blobs == expected[7:]
    assert list(pack.entries_of(entries)) == members
    assert bytes(entries) == b"".join(map(pack.encode_entry, members))


def test_lengths_that_lie() -> None:
    columns = {
        "chunk_ids": [1],
        "generations": [1],
        "crc64s": [0],
        "sha256s": bytes(32),
        "block_bytes": 4096,
        "base": 0,
    }
    for lengths in ([0], [4097], [9000]):
        with pytest.raises(ValueError, match="bytes"):
            small.encode_pack(bytearray(8192), lengths, **columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frames"):
        small.encode_pack(bytearray(10), [10], **columns, packed=b"x", packed_lengths=[2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="column"):
        small.encode_pack(bytearray(10), [5, 5], **columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero byte"):
        small.hash_small(["a\0b"], size_max=1, loose_max=0)


# -- files out of a pack ---------------------------------------------------------------------------------------------


def land(folder: Path, pieces: list[bytes], *, data: bytes | None = None) -> list[small.SmallFile]:
    joined = b"".join(pieces)
    offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    found, _ = small.land_small(
        [str(folder / f"n{i}") for i in range(len(pieces))],
        joined if data is None else data,
        offsets,
        [len(piece) for piece in pieces],
        [native.crc64(piece) for piece in pieces],
        b"".join(hashlib.sha256(piece).digest() for piece in pieces),
    )
    small.close_all([one.fd for one in found if one.fd >= 0])
    return found


def test_landed_files_are_what_was_asked_for(tmp_path: Path) -> None:
    pieces = [content(i, size) for i, size in enumerate(SIZES)]
    (tmp_path / "n3").write_bytes(b"left by a crash, and longer than what comes" * 10)
    before = len(os.listdir("/proc/self/fd"))
    for i, (one, piece) in enumerate(zip(land(tmp_path, pieces), pieces, strict=True)):
        st = os.stat(tmp_path / f"n{i}")
        assert one.status == SmallStatus.READ
        assert (tmp_path / f"n{i}").read_bytes() == piece
        assert (one.inode, one.size, one.mtime_ns) == (st.st_ino, st.st_size, st.st_mtime_ns)
        assert st.st_mode & 0o777 == 0o600
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_damaged_or_cut_short_does_not_land(tmp_path: Path) -> None:
    pieces = [content(i, 500) for i in range(4)]
    data = bytearray(b"".join(pieces))
    data[700] ^= 4
    found = land(tmp_path, pieces, data=bytes(data[:-1]))
    assert [one.status for one in found] == [
        SmallStatus.READ, SmallStatus.CHANGED, SmallStatus.READ, SmallStatus.CHANGED,
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["n0", "n2"]


def test_both_checksums_must_hold(tmp_path: Path) -> None:
    piece, other = content(1, 100), content(2, 100)
    for crc, sha in ((piece, other), (other, piece)):
        (one,), _ = small.land_small(
            [str(tmp_path / "n")], piece, [0], [100], [native.crc64(crc)], hashlib.sha256(sha).digest()
        )
        assert (one.status, one.fd) == (SmallStatus.CHANGED, -1)
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (one,) = land(tmp_path / "none", [b"x"])
    assert (one.status, one.fd) == (-errno.ENOENT, -1)


def test_spares_become_files_in_their_order(tmp_path: Path) -> None:
    pieces = [content(i, 100) for i in range(4)]
    spares = [written(tmp_path, f"spare{i}", b"") for i in range(6)]
    os.unlink(spares[1])
    inodes = [os.stat(path).st_ino for path in spares if os.path.exists(path)]
    (tmp_path / "n0").write_bytes(b"left by a crash")
    crcs = [native.crc64(piece) for piece in pieces]
    crcs[2] ^= 1
    found, taken = small.land_small(
        [str(tmp_path / f"n{i}") for i in range(4)],
        b"".join(pieces),
        [0, 100, 200, 300],
        [100] * 4,
        crcs,
        b"".join(hashlib.sha256(piece).digest() for piece in pieces),
        spares,
    )
    small.close_all([one.fd for one in found if one.fd >= 0])
    assert taken == 4  # one was not there, one piece is not right
    assert [one.inode for one in found if not one.status] == inodes[:3]
    assert [(tmp_path / f"n{i}").read_bytes() for i in (0, 1, 3)] == [pieces[i] for i in (0, 1, 3)]
    assert sorted(os.listdir(tmp_path)) == ["n0", "n1", "n3", "spare4", "spare5"]
