"""Between trio and the threads: waiting for a Future, running what blocks; and tasks that a caller does not wait for.

Owner: the trio thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import trio

T = TypeVar("T")


async def result_of(future: Future[T]) -> T:
    """The future's result, without blocking the loop. Cancelling stops the waiting, not what was submitted. What its
    thread gave the loop to do before is done before this returns, also where the future is done already."""
    token = trio.lowlevel.current_trio_token()
    done = trio.Event()
    future.add_done_callback(lambda _: soon(token, done.set))
    await done.wait()
    return future.result()


def soon(token: trio.lowlevel.TrioToken, call: Callable[[], object]) -> None:
    """From any thread: the loop does it, unless it has ended, and who waits there with it."""
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(call)


@contextlib.asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose block raises the first real error itself, as callers of one operation expect, not a group."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        raise _first(group) from None


def beside(work: Callable[[], T]) -> Callable[[], T]:
    """Not on the trio thread: begins it on a thread of its own; the answer waits for what came of it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001 (raised where it is waited for)
            future.set_exception(e)

    threading.Thread(target=run, name="aof2-beside", daemon=True).start()
    return future.result


class Tasks:
    """What is begun by one task and done by others, while the component that it is part of runs."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around what the component's `run` does; waits for what was begun."""
        async with open_nursery() as nursery:
            self._nursery = nursery
            try:
                yield
            finally:
                self._nursery = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Of a component that does nothing else by itself."""
        async with self.running():
            task_status.started()
            await trio.sleep_forever()

    def begin(self, work: Callable[..., Awaitable[object]], *args: object) -> bool:
        """Whether it was: not before `running`, nor at its end."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work, *args)
        return True


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
