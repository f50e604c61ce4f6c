"""Between trio and the threads: waiting for a Future, running what blocks.

Owner: stateless; called on the trio thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import TypeVar

import trio

T = TypeVar("T")


async def result_of(future: Future[T]) -> T:
    """The future's result, without blocking the loop. Cancelling stops the waiting, not what was submitted."""
    if not future.done():
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()
        future.add_done_callback(lambda _: _wake(token, done))
        await done.wait()
    return future.result()


def _wake(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
        token.run_sync_soon(done.set)


@contextlib.asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose block raises the first real error itself, as callers of one operation expect, not a group."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf; an error before a cancellation."""
    leaves = list(_leaves(group))
    errors = [e for e in leaves if not isinstance(e, trio.Cancelled)]
    return (errors or leaves)[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from _leaves(e)
        else:
            yield e
