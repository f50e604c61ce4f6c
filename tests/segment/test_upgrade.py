"""The version policy, and `rewrite`, the only way from one version to another."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, LimitError, UnsupportedError
from aof2.engine.segment.pointer import publish
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.upgrade import rewrite
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import create, read_all, sealed, unsealed


def test_policy(tmp_path: Path) -> None:
    for version in (2, 3):
        assert read_all(sealed(tmp_path, version, segment_id=version)[0].path)
    with pytest.raises(UnsupportedError):
        create(tmp_path, 4)
    with pytest.raises(CorruptError):
        create(tmp_path, 1)
    data = bytearray((tmp_path / "3.seg").read_bytes())
    for number, error in ((4, UnsupportedError), (2**32 - 1, UnsupportedError), (1, CorruptError), (0, CorruptError)):
        data[8:12] = struct.pack("<I", number)
        (tmp_path / "future").write_bytes(data)
        with pytest.raises(error):
            SegmentReader(Env(), tmp_path / "future")


def test_v2_becomes_v3(tmp_path: Path) -> None:
    segment, records = sealed(tmp_path, 2)
    before = segment.path.read_bytes()
    (tmp_path / "new").mkdir()
    target = tmp_path / "new" / "7.seg"
    (tmp_path / "new" / "7.seg.tmp").write_bytes(b"left over")
    copy = rewrite(Env(), segment.path, target, base_record_count=10, coordinator_watermark=20)
    assert segment.path.read_bytes() == before
    assert read_all(target) == records
    assert (copy.header.version, copy.header.base_record_count, copy.header.base_offset) == (3, 10, 1000)
    assert (copy.footer.coordinator_watermark, copy.footer.flags, copy.footer.ext_id) == (20, 5, 9)
    with SegmentReader(Env(), target) as reader:
        reader.verify()
        assert reader.sealed_segment() == copy
    state = recover_only(tmp_path / "new")
    assert state.total_record_count == 15


def recover_only(directory: Path):

    with SegmentReader(Env(), directory / "7.seg") as reader:
        publish(Env(), directory, reader.sealed_segment())
    return recover_stream(Env(), directory)


def test_in_place_is_a_rename(tmp_path: Path) -> None:
    segment, records = sealed(tmp_path, 2)
    inode = segment.path.stat().st_ino
    rewrite(Env(), segment.path, segment.path)
    assert segment.path.stat().st_ino != inode
    assert read_all(segment.path) == records
    assert [p.name for p in tmp_path.iterdir()] == ["7.seg"]


def test_v3_to_v2_only_if_it_fits(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path, 3)
    with pytest.raises(LimitError):
        rewrite(Env(), segment.path, tmp_path / "8.seg", version=2)
    writer = SegmentWriter.create(Env(), tmp_path, stream_id=1, segment_id=9, capacity=8192)
    writer.append(b"plain", timestamp_ms=4)
    writer.seal(1)
    rewrite(Env(), writer.path, tmp_path / "9.v2", version=2)
    assert read_all(tmp_path / "9.v2") == read_all(writer.path)


def test_only_sealed_and_whole_segments(tmp_path: Path) -> None:
    path, _ = unsealed(tmp_path, 2)
    with pytest.raises(CorruptError, match="not sealed"):
        rewrite(Env(), path, tmp_path / "8.seg")
    segment, _ = sealed(tmp_path, 3, segment_id=9)
    segment.path.chmod(0o600)
    data = bytearray(segment.path.read_bytes())
    data[150] ^= 1
    segment.path.write_bytes(data)
    with pytest.raises(CorruptError):
        rewrite(Env(), segment.path, tmp_path / "8.seg")
    assert not (tmp_path / "8.seg").exists()
