"""The saved order: what was written is read, everything else is no order."""

from __future__ import annotations

from array import array
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.env import Env
from aof2.engine.recency import saved
from aof2.engine.recency.segmented import Image

IMAGE = Image(
    (2, 1, 1), array("Q", [1 << 40, (1 << 40) + 1, 7, (1 << 64) - 1]), array("I", [1, 0, 4096, (1 << 32) - 1])
)


@given(st.lists(st.lists(st.integers(0, (1 << 64) - 1)), min_size=3, max_size=3), st.booleans())
def test_what_was_written_is_read(lists: list[list[int]], closed: bool) -> None:
    seen: set[int] = set()
    lists = [[key for key in keys if not (key in seen or seen.add(key))] for keys in lists]
    keys = array("Q", [key for one in lists for key in one])
    image = Image((len(lists[0]), len(lists[1]), len(lists[2])), keys, array("I", [key % 1000 for key in keys]))
    assert saved.decode(b"".join(saved.encode(image, 5, closed=closed))) == (image, closed)


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    whole = b"".join(saved.encode(IMAGE, 1_700_000_000_000, closed=True))
    for at in range(len(whole)):
        assert saved.decode(whole[:at]) is None
        for bit in range(8):
            bad = bytearray(whole)
            bad[at] ^= 1 << bit
            assert saved.decode(bytes(bad)) is None
    assert saved.decode(whole + b"\0") is None


def test_closed_is_taken_back_in_place(tmp_path: Path) -> None:
    path = tmp_path / "recency" / "hot.lru"
    saved.write(Env(), path, IMAGE, closed=True)
    assert saved.read(path) == (IMAGE, True)
    saved.take_back_closed(Env(), path)
    assert saved.read(path) == (IMAGE, False)
    assert saved.read(path.with_name("none")) is None
