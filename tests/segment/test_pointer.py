"""The current.sealed pointer: stored whole, never back, never an exception for what it holds."""

from __future__ import annotations

from pathlib import Path

from aof2.engine.env import Env
from aof2.engine.segment.format import Pointer
from aof2.engine.segment.model import POINTER_NAME, parse_segment_name
from aof2.engine.segment.pointer import CRASH_POINTS, NoPointer, load_pointer, publish, store_pointer
from tests.segment.support import sealed
from tests.support.crash import CountingEnv


def test_store_and_load(tmp_path: Path) -> None:
    assert load_pointer(tmp_path) is NoPointer.MISSING
    env = CountingEnv()
    for pointer in (Pointer(1, 2, 3), Pointer(2**64 - 1, 0, 2**64 - 1)):
        store_pointer(env, tmp_path, pointer)
        assert load_pointer(tmp_path) == pointer
    assert env.hits == dict.fromkeys(CRASH_POINTS, 2)
    assert [p.name for p in tmp_path.iterdir()] == [POINTER_NAME]


def test_publish_never_moves_back(tmp_path: Path) -> None:
    older, newer = sealed(tmp_path, segment_id=3)[0], sealed(tmp_path, segment_id=12)[0]
    assert publish(Env(), tmp_path, newer)
    assert not publish(Env(), tmp_path, older) and not publish(Env(), tmp_path, newer)
    assert load_pointer(tmp_path) == Pointer(12, 41, newer.durable_bytes)


def test_publish_over_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / POINTER_NAME).write_bytes(b"?" * 48)
    (tmp_path / f"{POINTER_NAME}.tmp").write_bytes(b"left over")
    assert publish(Env(), tmp_path, sealed(tmp_path)[0])
    assert isinstance(load_pointer(tmp_path), Pointer)


def test_publish_v2_takes_the_watermark(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path, 2)
    assert publish(Env(), tmp_path, segment, coordinator_watermark=99)
    assert load_pointer(tmp_path) == Pointer(7, 99, segment.durable_bytes)


def test_names() -> None:
    assert parse_segment_name("0.seg") == 0 and parse_segment_name("18446744073709551615.seg") == 2**64 - 1
    for name in ("01.seg", "-1.seg", "x.seg", ".seg", "1.seg.tmp", "1.seg.torn", "18446744073709551616.seg", "١.seg"):
        assert parse_segment_name(name) is None
