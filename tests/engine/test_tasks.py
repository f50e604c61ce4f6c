"""Tasks that their caller does not wait for: begun only while their component runs, and ended with it."""

from __future__ import annotations

import pytest
import trio

from aof2.engine.aio import Tasks


def test_begun_only_while_it_runs() -> None:
    async def main() -> None:
        tasks, done = Tasks(), trio.Event()

        async def work() -> None:
            await trio.sleep(0)
            done.set()

        assert not tasks.begin(work)
        async with tasks.running():
            assert tasks.begin(work)
        assert done.is_set()
        assert not tasks.begin(work)

    trio.run(main)


def test_what_fails_ends_it_with_its_own_error() -> None:
    async def fails() -> None:
        raise ValueError("as it was raised")

    async def main() -> None:
        tasks = Tasks()
        with pytest.raises(ValueError, match="as it was raised"):
            async with tasks.running():
                tasks.begin(fails)
                await trio.sleep_forever()
        assert not tasks.begin(fails)

    trio.run(main)
