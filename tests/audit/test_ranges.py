"""The log cut behind its anchors, stored in pieces, joined and verified again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.audit.format import ArtifactPublish, ChainBrokenError, Payload, SnapshotAnchor
from aof2.engine.audit.ranges import LogRange, cut_points, replay_ranges
from aof2.engine.audit.reader import Replay
from aof2.engine.errors import CorruptError
from tests.audit.build import HEADER, log_bytes, payload_bytes, raw_records, ref, sample


def parts_of(data: bytes) -> list[tuple[int, bytes]]:
    return [(r.first_logseq, data[r.start : r.end]) for r in cut_points(data)]


@given(st.lists(st.booleans(), max_size=20))
def test_ranges_join_to_the_log(kinds: list[bool]) -> None:
    payloads: list[Payload] = [
        SnapshotAnchor(i, bytes(32)) if anchor else ArtifactPublish(ref(i)) for i, anchor in enumerate(kinds)
    ]
    data = log_bytes(payloads)
    ranges = list(cut_points(data))
    assert len(ranges) == sum(kinds)
    parts = parts_of(data)
    joined = b"".join(part for _, part in parts)
    assert data.startswith(joined)
    assert len(data) - len(joined) == len(log_bytes(payloads)) - (ranges[-1].end if ranges else 0)
    whole = [r for r in Replay(data) if ranges and r.end <= ranges[-1].end]
    assert list(replay_ranges(parts)) == whole
    # Going on from any range gives the same ranges as from the start.
    for k, done in enumerate(ranges):
        assert list(cut_points(data, start=done.after)) == ranges[k + 1 :]
        assert list(replay_ranges(parts[k + 1 :], start=done.after)) == [r for r in whole if r.offset >= done.end]


def test_what_a_range_tells() -> None:
    data = log_bytes(sample(14))  # anchors at 5 and 12
    first, second = cut_points(data)
    assert (first.first_logseq, first.start) == (1, 0)
    assert (second.first_logseq, second.start) == (6, first.end)
    assert first.after.prev_hash == data[first.end - 32 : first.end]
    assert isinstance(second, LogRange)


def test_from_files(tmp_path: Path) -> None:
    data = log_bytes(sample(14))
    files = []
    for first, part in parts_of(data):
        path = tmp_path / f"{first}.asl"
        path.write_bytes(part)
        files.append((first, path))
    assert [r.payload for r in replay_ranges(files)] == sample(12)


def test_unknown_records_lie_in_ranges_too() -> None:
    anchor = payload_bytes(SnapshotAnchor(1, bytes(32)))
    data = HEADER + b"".join(raw_records([(0x99, b"a"), anchor, (0x99, b"bb"), anchor, (0x99, b"")]))
    assert [r.first_logseq for r in cut_points(data)] == [1, 3]
    assert [r.logseq for r in replay_ranges(parts_of(data))] == [2, 4]


def test_ranges_that_do_not_join() -> None:
    data = log_bytes(sample(21))  # anchors at 5, 12, 19
    one, two, three = parts_of(data)
    for wrong in ([two], [one, three], [two, one, three], [one, one], [one, (13, two[1])]):
        with pytest.raises(ChainBrokenError):
            list(replay_ranges(wrong))
    with pytest.raises(ChainBrokenError):
        list(replay_ranges([one, (6, three[1])]))
    other = log_bytes([ArtifactPublish(ref(3)), *sample(21)[1:]])
    with pytest.raises(CorruptError):
        list(replay_ranges([one, parts_of(other)[1]]))


def test_every_cut_and_flip_of_a_stored_range_is_found() -> None:
    data = log_bytes(sample(14))
    one, two = parts_of(data)
    for cut in range(len(two[1])):
        with pytest.raises(CorruptError):
            list(replay_ranges([one, (two[0], two[1][:cut])]))
    for i in range(len(two[1])):
        bad = bytearray(two[1])
        bad[i] ^= 1 << (i % 8)
        with pytest.raises(CorruptError):
            list(replay_ranges([one, (two[0], bytes(bad))]))
    with pytest.raises(CorruptError):
        list(replay_ranges([one, (two[0], two[1] + data[len(one[1]) + len(two[1]) :])]))
