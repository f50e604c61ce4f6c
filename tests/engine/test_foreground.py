"""Who is waiting goes first."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from aof2.engine.foreground import Foreground


@pytest.mark.parametrize(
    ("hurry", "removing", "waited_s"), [(False, False, 2.0), (True, False, 0.0), (True, True, 2.0), (False, True, 2.0)]
)
def test_a_hurry_does_not_hold_up_those_who_remove(hurry: bool, removing: bool, waited_s: float) -> None:
    """While somebody asks all the time; in a hurry the background does not wait for them, unless they remove."""

    async def main() -> None:
        foreground = Foreground()

        async def ask() -> None:
            while True:
                foreground.asked()
                if removing:
                    foreground.removed()
                await trio.sleep(0.01)

        with foreground.hurried_by(lambda: hurry):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(0.05)
                before_s = trio.current_time()
                await foreground.let_pass(2.0)
                assert trio.current_time() - before_s == pytest.approx(waited_s, abs=0.02)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
