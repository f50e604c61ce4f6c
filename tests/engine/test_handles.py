"""Objects in use: which of their blocks may be read."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState
from aof2.engine.local.handles import ObjectHandle
from tests.engine.helpers import KIB

BLOCK = 16 * KIB
PER_CHUNK = 6


def handle_of(masks: list[int], trusted: list[int]) -> ObjectHandle:
    chunk_bytes = PER_CHUNK * BLOCK
    row = ObjectRow(2, 1, ObjectState.SEALED, size=len(masks) * chunk_bytes, chunk_bytes=chunk_bytes)
    chunks = [ChunkRow(n + 1, 2, 1, n, chunk_bytes) for n in range(len(masks))]
    handle = ObjectHandle((1, 2, 1), "t", Path("x"), row, chunks, masks, BLOCK)
    handle.trusted = trusted
    return handle


masks = st.integers(0, (1 << PER_CHUNK) - 1)


@given(st.lists(st.tuples(masks, masks), max_size=5))
def test_runs_and_suspects_are_what_each_block_says(pairs: list[tuple[int, int]]) -> None:
    handle = handle_of([mask for mask, _ in pairs], [ok for _, ok in pairs])
    blocks = range(handle.block_count)
    runs = list(handle.ready_runs())
    assert [b for first, n in runs for b in range(first, first + n)] == [b for b in blocks if handle.is_ready(b)]
    assert all(first + n < after for (first, n), (after, _) in itertools.pairwise(runs)), "runs that touch"
    assert handle.suspects() == [b for b in blocks if handle.is_resident(b) and not handle.is_ready(b)]
