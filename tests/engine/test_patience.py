"""Readers and a remote that is away."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from aof2.engine.remote.errors import RemoteUnavailableError
from aof2.engine.tiering.patience import Patience

PATIENCE_S = 10.0


class Remote:
    """Answers outside its outages, in no time."""

    def __init__(self, *outages: tuple[float, float], refuses: bool = True) -> None:
        self.outages = outages
        self.asked = 0
        self.refuses = refuses
        self.again_in_s = 0.0

    async def get(self) -> str:
        self.asked += 1
        if any(start <= trio.current_time() < end for start, end in self.outages):
            await trio.sleep(0 if self.refuses else PATIENCE_S)
            raise RemoteUnavailableError("away", again_in_s=self.again_in_s)
        return "data"


def patience() -> Patience:
    return Patience(random.Random(1), PATIENCE_S)


def run(main: object) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))  # type: ignore[arg-type]


def test_a_short_outage_is_nobodys_error() -> None:
    async def main() -> None:
        now, readers, remote = trio.current_time(), patience(), Remote((0, trio.current_time() + 7))
        remote.again_in_s = 1.0
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(readers.insist, remote.get)
        assert 7 <= trio.current_time() - now < 9
        assert remote.asked < 5 * 10

    run(main)


@pytest.mark.parametrize("refuses", [True, False])
def test_in_a_long_one_nobody_waits_longer_than_the_deadline(refuses: bool) -> None:
    async def main() -> None:
        now, readers = trio.current_time(), patience()
        remote = Remote((0, now + 1000), refuses=refuses)
        for waits_s in (PATIENCE_S, 0 if refuses else PATIENCE_S):
            began_s = trio.current_time()
            with pytest.raises(RemoteUnavailableError):
                await readers.insist(remote.get)
            assert waits_s * 0.9 <= trio.current_time() - began_s <= waits_s * 1.3

    run(main)


def test_the_next_outage_is_another_one() -> None:
    async def main() -> None:
        now, readers = trio.current_time(), patience()
        remote = Remote((0, now + 30), (now + 100, now + 105))
        with pytest.raises(RemoteUnavailableError):
            await readers.insist(remote.get)
        await trio.sleep_until(now + 101)
        assert await readers.insist(remote.get) == "data"

    run(main)


def test_nobody_is_told_before_the_remote_was_asked_again() -> None:
    async def main() -> None:
        now, readers, remote = trio.current_time(), patience(), Remote((0, trio.current_time() + 31))
        with pytest.raises(RemoteUnavailableError):
            await readers.insist(remote.get)
        await trio.sleep_until(now + 12)
        remote.again_in_s = 1.0
        with pytest.raises(RemoteUnavailableError):
            await readers.insist(remote.get)
        assert trio.current_time() - now < 12 + 8
        for at_s in (20, 28):  # not long ago, that is
            await trio.sleep_until(now + at_s)
            if at_s == 20:
                with pytest.raises(RemoteUnavailableError):
                    await readers.insist(remote.get)
            else:
                assert await readers.insist(remote.get) == "data"

    run(main)
