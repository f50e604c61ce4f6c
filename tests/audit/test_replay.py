"""Replay of whole, cut, flipped and lying logs: never a wrong record, never a silently shorter history."""

from __future__ import annotations

import hashlib
import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.audit.commit import BATCH_BYTES_MAX
from aof2.engine.audit.damage import Tail, find_valid
from aof2.engine.audit.format import ChainBrokenError, Payload, RecordType
from aof2.engine.audit.reader import Position, Replay
from aof2.engine.audit.source import Source
from aof2.engine.errors import CorruptError, UnsupportedError
from tests.audit.build import HEADER, log_bytes, payload_bytes, raw_records, records, sample
from tests.audit.test_format import PAYLOADS


def ends(data: list[bytes]) -> list[int]:
    """Offset behind the header and behind each record."""
    at, out = len(HEADER), [len(HEADER)]
    for record in data:
        at += len(record)
        out.append(at)
    return out


@given(st.lists(PAYLOADS, max_size=12))
def test_round_trip(payloads: list[Payload]) -> None:
    data = log_bytes(payloads)
    replay = Replay(data)
    got = list(replay)
    assert [r.payload for r in got] == payloads
    assert [r.logseq for r in got] == list(range(1, len(payloads) + 1))
    assert [(r.offset, r.end) for r in got] == list(pairwise(ends(records(payloads))))
    assert replay.outcome.tail is Tail.CLEAN
    assert replay.outcome.position == Position(len(payloads) + 1, data[-32:] if payloads else bytes(32), len(data))
    assert replay.outcome.dropped_bytes == 0


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "1.asl"
    path.write_bytes(log_bytes(sample(20)))
    assert [r.payload for r in Replay(path)] == sample(20)
    path.write_bytes(b"ASLLOG")
    with pytest.raises(CorruptError, match=r"1\.asl"):
        Replay(path).run()


def test_cut_at_every_byte() -> None:
    payloads = sample(9)
    data, at = log_bytes(payloads), ends(records(payloads))
    for cut in range(len(data) + 1):
        if cut < len(HEADER):
            with pytest.raises(CorruptError):
                Replay(data[:cut]).run()
            continue
        replay = Replay(data[:cut])
        got = [r.payload for r in replay]
        whole = sum(1 for e in at[1:] if e <= cut)
        assert got == payloads[:whole]
        assert replay.outcome.position.offset == at[whole]
        assert replay.outcome.tail is (Tail.CLEAN if cut == at[whole] else Tail.TORN)
        assert replay.outcome.dropped_bytes == cut - at[whole]


def outcome_of_damage(data: bytes, payloads: list[Payload]) -> str:
    """What a replay of damaged bytes did; fails on a wrong record or on history lost beyond the last record."""
    replay = Replay(data)
    got = []
    try:
        got.extend(r.payload for r in replay)
    except ChainBrokenError as e:
        assert e.logseq == len(got) + 1
        assert got == payloads[: len(got)]
        return "broken"
    except (CorruptError, UnsupportedError):
        assert got == payloads[: len(got)]
        return "corrupt"
    assert got == payloads[: len(got)], "a wrong record"
    if len(got) == len(payloads):
        assert replay.outcome.tail is Tail.UNCOMMITTED
        return "mended"
    assert replay.outcome.tail is Tail.TORN
    assert len(got) == len(payloads) - 1, f"{len(payloads) - len(got)} records dropped"
    return "trimmed"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_flip_of_every_bit(count: int) -> None:
    payloads = sample(count)
    data = log_bytes(payloads)
    last_start = ends(records(payloads))[-2]
    seen: dict[str, int] = {}
    for i in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            what = outcome_of_damage(bytes(flipped), payloads)
            seen[what] = seen.get(what, 0) + 1
            if i < len(HEADER):
                assert what == "corrupt" or (12 <= i < 16 and what == "broken"), i
            elif what == "trimmed":
                assert i >= last_start
    assert seen["trimmed"] > 0
    # A logseq that a single flip turns to zero is mended: the chain proves what it was.
    assert seen["mended"] == sum(1 for n in range(1, count + 1) if n & (n - 1) == 0)
    assert count == 1 or seen["broken"] > 0


@settings(max_examples=150)
@given(st.data())
def test_random_damage(data: st.DataObject) -> None:
    """Any overwritten span inside history, away from its last record, is found and named."""
    payloads = sample(30)
    log = bytearray(log_bytes(payloads))
    at = ends(records(payloads))
    start = data.draw(st.integers(24, at[-4] - 1))
    span = data.draw(st.binary(min_size=1, max_size=min(200, at[-4] - start)))
    if bytes(log[start : start + len(span)]) == span:
        return
    log[start : start + len(span)] = span
    first = next(i for i, e in enumerate(at[1:]) if e > start)
    replay = Replay(bytes(log))
    got = []
    try:
        got.extend(r.payload for r in replay)
    except ChainBrokenError as e:
        assert first <= len(got) == e.logseq - 1
        return
    # Zeros over a logseq are what an uncommitted batch leaves; within one batch nothing can tell the two apart.
    field = bytes(log[at[len(got)] : at[len(got)] + 8])
    assert replay.outcome.tail is Tail.UNCOMMITTED or field == bytes(8)
    assert got == payloads[: len(got)]


def test_a_lying_length_in_the_middle_is_not_a_torn_tail() -> None:
    payloads = sample(12)
    data, at = bytearray(log_bytes(payloads)), ends(records(payloads))
    for lie in (0, 1, 41, 10_000, 2**31, 2**32 - 1):
        bad = bytearray(data)
        struct.pack_into("<I", bad, at[4] + 12, lie)
        with pytest.raises(ChainBrokenError, match="valid records follow") as e:
            Replay(bytes(bad)).run()
        assert (e.value.logseq, e.value.offset) == (5, at[4])


def test_a_damaged_stored_hash_of_the_record_before_the_last() -> None:
    payloads = sample(5)
    data, at = bytearray(log_bytes(payloads)), ends(records(payloads))
    data[at[4] - 1] ^= 1
    with pytest.raises(ChainBrokenError, match="stored hash") as e:
        Replay(bytes(data)).run()
    assert e.value.logseq == 4


def test_records_swapped_repeated_or_left_out() -> None:
    made = records(sample(6))
    for order in ([0, 2, 1, 3, 4, 5], [0, 1, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [1, 2, 3, 4, 5]):
        with pytest.raises(ChainBrokenError):
            Replay(HEADER + b"".join(made[i] for i in order)).run()
    # A record taken from another log of the same shape fits no chain either.
    other = raw_records([payload_bytes(p) for p in reversed(sample(6))])
    with pytest.raises(ChainBrokenError):
        Replay(HEADER + b"".join([*made[:2], other[2], *made[3:]])).run()


def test_unknown_types_are_skipped_counted_and_chained() -> None:
    known = sample(4)
    items = [payload_bytes(p) for p in known]
    mixed = [items[0], (0x7777, b""), items[1], (2**32 - 1, bytes(3_000_000)), items[2], items[3], (0, b"x")]
    data = HEADER + b"".join(raw_records(mixed))
    replay = Replay(data)
    got = list(replay)
    assert [r.payload for r in got] == known
    assert [r.logseq for r in got] == [1, 3, 5, 6]
    assert (replay.outcome.records, replay.outcome.unknown) == (7, 2 + 1)
    assert replay.outcome.tail is Tail.CLEAN
    damaged = bytearray(data)
    damaged[len(HEADER) + len(raw_records(mixed)[0]) + 10] ^= 1
    with pytest.raises(ChainBrokenError):
        Replay(bytes(damaged)).run()


@pytest.mark.parametrize("kind", list(RecordType))
def test_a_malformed_payload_under_a_valid_hash(kind: RecordType) -> None:
    for payload in (b"", bytes(7), bytes(100), bytes(70_000)):
        data = HEADER + b"".join(raw_records([payload_bytes(sample(1)[0]), (kind, payload)]))
        with pytest.raises(CorruptError, match="record 2") as e:
            Replay(data).run()
        assert not isinstance(e.value, ChainBrokenError)


def test_start_from_a_known_position() -> None:
    payloads = sample(10)
    data = log_bytes(payloads)
    got = list(Replay(data))
    for k in range(len(got)):
        start = Position(got[k].logseq + 1, got[k].record_hash, got[k].end)
        replay = Replay(data, start=start)
        assert list(replay) == got[k + 1 :]
        assert replay.outcome.records == len(got) - k - 1
    with pytest.raises(ChainBrokenError):
        Replay(data, start=Position(4, bytes(32), got[2].end)).run()
    with pytest.raises(CorruptError):
        Replay(data, start=Position(4, bytes(32), len(data) + 1)).run()


def test_outcome_only_after_the_end() -> None:
    replay = Replay(log_bytes(sample(2)))
    next(iter(replay))
    with pytest.raises(RuntimeError):
        _ = replay.outcome


def test_a_header_size_over_records_hides_none() -> None:
    payloads = sample(12)
    data = bytearray(log_bytes(payloads))
    for size in range(25, len(data) + 1):
        struct.pack_into("<I", data, 12, size)
        with pytest.raises(CorruptError):
            Replay(bytes(data)).run()


def test_windows_do_not_matter() -> None:
    """Reads come in windows: a log read a little at a time replays the same."""
    payloads = sample(40)
    data = log_bytes(payloads)
    rng = random.Random(7)
    source = Source(lambda length, offset: data[offset : offset + rng.randint(1, max(1, length))], len(data))
    assert [r.payload for r in Replay(source)] == payloads
    short = Source(lambda length, offset: data[:100][offset : offset + length], len(data), "x.asl")
    with pytest.raises(CorruptError, match="shorter"):
        Replay(short).run()


def test_no_read_is_larger_than_a_window_whatever_lengths_say() -> None:
    asked: list[int] = []
    big = raw_records([(0x9999, bytes(5 << 20)), payload_bytes(sample(1)[0])])
    data = HEADER + b"".join(big)

    def pread(length: int, offset: int) -> bytes:
        asked.append(length)
        return data[offset : offset + length]

    assert len(list(Replay(Source(pread, len(data))))) == 1
    assert max(asked) <= 1 << 20


def test_the_search_gives_up_on_the_safe_side() -> None:
    """Bytes made to look like endless long records: bounded work, and broken rather than trimmed."""
    fake = struct.pack("<QII", 2, 1, 40_000)
    noise = fake * 40_000
    data = HEADER + struct.pack("<QII", 1, 1, 8) + noise
    with pytest.raises(ChainBrokenError, match="too much"):
        Replay(data).run()


def test_the_search_finds_across_windows() -> None:
    rng = random.Random(3)
    lost = HEADER + b"\xff" * 8 + rng.randbytes((1 << 20) - 60)
    record = raw_records([payload_bytes(sample(1)[0])], first=900, prev=rng.randbytes(32))
    for shift in range(0, 60, 7):
        prev = rng.randbytes(32)
        body = record[0][:-32]
        data = lost + bytes(shift) + prev + body + hashlib.sha256(prev + body).digest()
        found = find_valid(Source.of_bytes(data), 25, 1, 24)
        assert found == len(data) - len(record[0])


def test_zeros_behind_the_log_are_a_torn_tail() -> None:
    payloads = sample(3)
    data = log_bytes(payloads)
    for zeros in (1, 7, 8, 47, 48, 600, 5000):
        replay = Replay(data + bytes(zeros))
        assert [r.payload for r in replay] == payloads
        assert replay.outcome.tail is Tail.TORN
        assert replay.outcome.position.offset == len(data)


def test_a_missing_logseq_further_back_than_a_batch_is_damage() -> None:
    """An uncommitted batch reaches at most BATCH_BYTES_MAX back: behind that, nothing is trimmed or mended."""
    filler = raw_records([payload_bytes(sample(1)[0]), (0x9999, bytes(BATCH_BYTES_MAX))])
    tail = raw_records([payload_bytes(p) for p in sample(3)], first=3, prev=filler[-1][-32:])
    data = bytearray(HEADER + b"".join(filler + tail))
    data[24:32] = bytes(8)
    with pytest.raises(ChainBrokenError, match="more than one batch"):
        Replay(bytes(data)).run()
    data[40:50] = bytes(10)
    with pytest.raises(ChainBrokenError, match="more than one batch"):
        Replay(bytes(data)).run()
