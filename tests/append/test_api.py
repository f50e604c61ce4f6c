"""open_stream: a program appends, reads and follows a stream without a mount."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from aof2.engine.append.api import OpenStream, open_stream, stream_of_volume
from aof2.engine.settings import Settings
from aof2.engine.volume import open_volume
from tests.append.helpers import stream_settings


async def read_all(stream: OpenStream, from_offset: int = 0) -> list[bytes]:
    return [record.payload async for record in stream.read(from_offset)]


def test_records_are_read_from_any_offset(tmp_path: Path) -> None:
    settings = stream_settings(tmp_path)
    records = [b"%d:" % n + bytes([n % 256]) * (n % 300) for n in range(900)]

    async def main(settings: Settings) -> None:
        async with open_stream(settings, "events/a/b") as stream:
            assert await stream.append(records[:500], ext_id=7) == 0
            await stream.append(records[500:])
            await stream.commit()
            assert await read_all(stream) == records
        async with open_stream(settings, "events/a/b") as stream:
            await stream.seal()
            assert await read_all(stream) == records
            at = 0
            for n, record in enumerate(records):
                if n % 97 == 0:
                    assert await read_all(stream, at) == records[n:]
                    assert await read_all(stream, at + 1) == records[n:]
                at += len(record)
            assert stream.end_offset == at
            assert await read_all(stream, at) == []
            found = [record async for record in stream.read()]
            assert {record.ext_id for record in found[:500]} == {7}
            assert {record.ext_id for record in found[500:]} == {0}

    trio.run(main, settings)


def test_a_tail_tells_each_record_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_volume(stream_settings(tmp_path)) as volume, stream_of_volume(volume, "events/a") as stream:
            seen: list[bytes] = []
            records = [b"%d " % n * 50 for n in range(300)]

            async def follow() -> None:
                async for record in stream.tail(0):
                    seen.append(record.payload)

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(follow)
                    for n, record in enumerate(records):
                        await stream.append([record])
                        if n % 60 == 0:
                            await stream.seal()
                    while len(seen) < len(records):
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
            assert seen == records

    trio.run(main)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_stream(stream_settings(tmp_path), "events/a") as stream:
            for records, code in (([b"x", b""], errno.EINVAL), ([b"x", b"y" * 17_000], errno.EMSGSIZE)):
                with pytest.raises(OSError) as e:
                    await stream.append(records)
                assert e.value.errno == code
            assert stream.end_offset == 0
        for path in ("default/a", "events", "nothing/a"):
            with pytest.raises(BaseException) as error:
                async with open_stream(stream_settings(tmp_path), path):
                    pass
            assert "No such file" in repr(error.value)

    trio.run(main)
