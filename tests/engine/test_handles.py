"""Objects in use: which of their blocks may be read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState
from aof2.engine.local.handles import HandleTable, ObjectHandle
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


def in_table(table: HandleTable, ino: int) -> ObjectHandle:
    """As the hydrator opens one: used, and with a descriptor."""
    row = ObjectRow(ino, 1, ObjectState.SEALED, size=0, chunk_bytes=PER_CHUNK * BLOCK)
    handle = ObjectHandle((1, ino, 1), "t", Path("x"), row, [], [], BLOCK)
    table.use(handle)
    table.put(handle)
    handle.fd = os.open(os.devnull, os.O_RDONLY)
    return handle


def test_each_handle_in_use_is_in_the_table_and_unused_ones_are_bounded() -> None:
    table = HandleTable(idle_max=4)
    handles = [in_table(table, ino) for ino in range(2, 22)]
    assert all(table.peek(h.key) is h for h in handles), "a handle in use was given up"
    for handle in handles:
        table.done(handle)
    assert [ino for ino in range(30) if (1, ino, 1) in table] == [18, 19, 20, 21]
    assert [h.fd >= 0 for h in handles] == [False] * 16 + [True] * 4, "a descriptor without an owner"
    table.close_all()
    assert not any(h.fd >= 0 for h in handles)


def test_a_handle_that_left_the_table_is_closed_by_its_last_user() -> None:
    table = HandleTable(idle_max=4)
    handle = in_table(table, 2)
    with table.using(handle):
        table.forget(handle.key)
        handle.fd = os.open(os.devnull, os.O_RDONLY)  # a user that goes on opens it again
        table.done(handle)
        assert handle.fd >= 0
    assert handle.fd < 0
