"""Every truncation and every flipped bit of small files: a typed error or a trimmed tail, never a wrong record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment.model import POINTER_NAME
from aof2.engine.segment.pointer import NoPointer, load_pointer, publish
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.recovery import recover_stream
from aof2.engine.segment.writer import SegmentWriter
from tests.segment.support import Rec, plain, sealed, unsealed

VERSIONS = [2, 3]


def check(path: Path, original: list[Rec], *, payloads_only: bool = False) -> str:
    """Reads a damaged file: what is returned is a prefix of what was written."""
    got: list[Rec] = []
    try:
        with SegmentReader(Env(), path) as reader:
            for record in reader.records():
                got.append(plain(record))
            outcome = "sealed" if reader.sealed else "torn" if reader.tail.torn else "clean"
    except (CorruptError, UnsupportedError):
        outcome = "error"
    want = original[: len(got)]
    if payloads_only:
        assert [r.payload for r in got] == [r.payload for r in want]
    else:
        assert got == want
    return outcome


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seal", [True, False])
def test_truncated_anywhere(tmp_path: Path, version: int, seal: bool) -> None:
    if seal:
        segment, records = sealed(tmp_path, version)
        data = segment.path.read_bytes()
    else:
        path, records = unsealed(tmp_path, version)
        data = path.read_bytes()
    target = tmp_path / "cut"
    for length in range(len(data)):
        target.write_bytes(data[:length])
        assert check(target, records) != "sealed"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seal", [True, False])
def test_flipped_anywhere(tmp_path: Path, version: int, seal: bool) -> None:
    """An unsealed v2 record's offset, timestamp and flags are covered by no checksum: only payloads are compared."""
    if seal:
        segment, records = sealed(tmp_path, version)
        data, end = segment.path.read_bytes(), segment.durable_bytes
    else:
        path, records = unsealed(tmp_path, version)
        data = path.read_bytes()
        end = len(data)
    target = tmp_path / "flipped"
    for offset in range(len(data)):
        for bit in (0, 3, 7):
            bad = bytearray(data)
            bad[offset] ^= 1 << bit
            target.write_bytes(bad)
            outcome = check(target, records, payloads_only=version == 2 and not seal)
            if seal and offset < end:
                assert outcome == "error", (offset, bit)
            if seal and version == 3:
                assert outcome != "sealed", (offset, bit)


@pytest.mark.parametrize("version", VERSIONS)
def test_zeroed_sectors(tmp_path: Path, version: int) -> None:
    """Any run of zeros in an unsealed file leaves a prefix."""
    path, records = unsealed(tmp_path, version)
    data = path.read_bytes()
    target = tmp_path / "holes"
    for start in range(0, len(data), 7):
        for length in (1, 16, 64):
            target.write_bytes(data[:start] + bytes(length) + data[start + length :])
            check(target, records, payloads_only=version == 2)


def test_pointer_truncated_or_flipped_anywhere(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path)
    publish(Env(), tmp_path, segment)
    path = tmp_path / POINTER_NAME
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert load_pointer(tmp_path) == NoPointer.DAMAGED
    for offset in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[offset] ^= 1 << bit
            path.write_bytes(bad)
            assert load_pointer(tmp_path) in (NoPointer.DAMAGED, NoPointer.UNSUPPORTED)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_recovery_of_any_damage(tmp_path: Path, version: int, seal: bool, kind: str) -> None:
    """Recovery never fails, never makes records up, and what it offers can be appended to and sealed."""
    home = tmp_path / "home"
    home.mkdir()
    if seal:
        segment, records = sealed(home, version)
        path = segment.path
    else:
        path, records = unsealed(home, version)
    data = path.read_bytes()
    stream = tmp_path / "stream"
    for offset in range(len(data)):
        shutil.rmtree(stream, ignore_errors=True)
        stream.mkdir()
        bad = bytearray(data[:offset]) if kind == "cut" else bytearray(data)
        if kind == "flip":
            bad[offset] ^= 1 << offset % 8
        (stream / "7.seg").write_bytes(bad)
        state = recover_stream(Env(), stream, stream_id=77)
        weak = version == 2 and (not seal or kind == "flip")
        if state.damaged:
            assert (stream / "7.seg").read_bytes() == bad and not state.appendable
        if state.sealed:
            assert check(stream / "7.seg", records, payloads_only=weak) == "sealed"
            assert load_pointer(stream) == state.sealed[0].pointer
        if state.active:
            assert check(stream / "7.seg", records, payloads_only=weak) == "clean"
            writer = SegmentWriter.reopen(Env(), state.active)
            writer.append(b"more")
            writer.seal(1)
            with SegmentReader(Env(), writer.path) as reader:
                assert reader.verify().record_count == state.active.record_count + 1
        if not (state.damaged or state.sealed or state.active):
            assert not (stream / "7.seg").exists()
