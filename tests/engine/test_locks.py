"""The order of locks: what is taken against it raises, under tests, before it can hang."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from aof2.engine import locks
from aof2.engine.aio import open_nursery
from aof2.engine.locks import Maker, Rank, task_lock, thread_lock, waits_for
from tests.lockorder import LockOrderError

PAGE = Path(locks.__file__).parent / "CONCURRENCY.md"


def refused(body: Callable[[], Awaitable[None]]) -> bool:
    async def main() -> None:
        await body()

    try:
        trio.run(main)
    except LockOrderError:
        return True
    return False


def test_only_later_ones_are_taken() -> None:
    async def body() -> None:
        for first, second in itertools.product(Rank, Rank):
            async with task_lock(first):
                with pytest.raises(LockOrderError) if second <= first else contextlib.nullcontext():
                    async with task_lock(second):
                        pass

    assert not refused(body)


def test_what_was_let_go_does_not_count() -> None:
    async def body() -> None:
        for rank in reversed(Rank):
            async with task_lock(rank):
                pass

    assert not refused(body)


def test_a_second_one_of_a_rank_is_taken_only_without_waiting() -> None:
    async def body(wait: bool) -> None:
        async with task_lock(Rank.FILE):
            other = task_lock(Rank.FILE)
            if wait:
                async with other:
                    pass
            else:
                other.acquire_nowait()
                other.release()

    assert refused(lambda: body(True))
    assert not refused(lambda: body(False))


def test_each_task_holds_its_own() -> None:
    """Two tasks side by side, in a nursery that was opened under no lock: neither waits for the other."""

    async def body() -> None:
        async def one(rank: Rank) -> None:
            async with task_lock(rank):
                await trio.sleep(0)

        async with open_nursery() as nursery:
            nursery.start_soon(one, Rank.FILE_IO)
            nursery.start_soon(one, Rank.FILE)
            async with task_lock(Rank.EVICTION):  # inside: the nursery does not end under it
                await trio.sleep(0)

    assert not refused(body)


def test_a_nursery_under_a_lock_is_waited_for_under_it() -> None:
    async def body() -> None:
        async def one() -> None:
            async with task_lock(Rank.FILE):
                pass

        async with task_lock(Rank.FILE_IO), open_nursery() as nursery:
            nursery.start_soon(one)

    assert refused(body)


def test_who_waits_for_the_work_of_others_says_so() -> None:
    async def body(held: Rank) -> None:
        async with task_lock(held):
            waits_for(Rank.FILE_IO)

    assert refused(lambda: body(Rank.FILE_IO))
    assert not refused(lambda: body(Rank.FILE))


def test_under_a_threads_lock_none_is_taken() -> None:
    def thread() -> None:
        with thread_lock(), pytest.raises(LockOrderError), thread_lock():
            pass
        with thread_lock():
            pass

    one = threading.Thread(target=thread)
    one.start()
    one.join()

    async def body() -> None:
        with thread_lock():
            async with task_lock(Rank.FILE):
                pass

    assert refused(body)


def test_otherwise_they_are_the_librarys_own() -> None:
    assert isinstance(Maker().task_lock(Rank.FILE), trio.Lock)
    assert isinstance(Maker().thread_lock(Rank.BRIEF), type(threading.Lock()))


def test_the_page_has_them_in_this_order() -> None:
    text = PAGE.read_text().split("## Lock order")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert [(int(n), name) for n, name in rows] == [(rank.value, rank.name) for rank in Rank]
