"""Records that come by the inbox: behind what is there or instead of it, each whole, at an offset of their own."""

from __future__ import annotations

from pathlib import Path

from tests.inbox.helpers import Arena, lines, run, settings_of, troubles


def test_records_come_behind_what_is_there(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    mine, theirs, more = lines("mine", 100), lines("theirs", 900), lines("more", 50)

    async def body(a: Arena) -> None:
        w = a.world
        await w.mkdir(b"clicks")
        await w.put(*mine)
        done = await a.deliver_records("job", "clicks", theirs)
        assert done is not None and done.records == 900
        assert (done.first_offset, done.next_offset) == (sum(map(len, mine)), sum(map(len, mine + theirs)))
        await w.put(*more)
        await w.kind.seal()
        assert await w.sealed() == b"".join(mine + theirs + more)
        assert await w.raw_payloads(tmp_path) == mine + theirs + more
        again = await a.deliver_records("job", "clicks", theirs)
        assert again is not None and (again.first_offset, again.time_ms) == (done.first_offset, done.time_ms)
        assert await w.sealed() == b"".join(mine + theirs + more)

    run(settings, body)
    assert troubles(settings) == []


def test_a_stream_that_is_not_there_is_made_and_one_that_is_may_be_replaced(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    first, second = lines("first", 300), lines("second", 200)

    async def body(a: Arena) -> None:
        w = a.world
        await a.deliver_records("one", "made", first)
        assert await w.sealed("made") == b"".join(first)
        done = await a.deliver_records("two", "made", second, mode="overwrite")
        assert done is not None and done.first_offset == sum(map(len, first))
        names = [n for n in w.ls("made") if n[0].isdigit()]
        assert b"".join([await w.read(f"made/{n}") for n in names]) == b"".join(second)

    run(settings, body)
    assert troubles(settings) == []
