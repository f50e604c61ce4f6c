"""A stream's life without a mount: written, committed, rotated, sealed, read, removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.kinds.kind import AttributeChange
from tests.append.helpers import ROOT, World, run_streams, stream_settings
from tests.engine.weather import until


def lines(first: int, count: int, width: int = 40) -> list[bytes]:
    return [b"%d " % n + b"x" * (width - 2) + b"\n" for n in range(first, first + count)]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        assert w.ls("clicks") == [".segments", "_append", "_tail.jsonl"]
        await w.put(b"one\ntwo\n", b"three\n")
        assert await w.read("clicks/_tail.jsonl") in (b"", b"one\ntwo\nthree\n")
        await w.stream().commit()
        assert await w.read("clicks/_tail.jsonl") == b"one\ntwo\nthree\n"
        assert w.kind.row(w.ino("clicks/_tail.jsonl")).size == 14
        assert await w.stream().seal() == 1
        assert w.ls("clicks") == [".segments", "00000000000000000000.jsonl", "_append", "_tail.jsonl"]
        assert await w.read("clicks/00000000000000000000.jsonl") == b"one\ntwo\nthree\n"
        assert await w.raw_payloads(tmp_path) == [b"one\n", b"two\n", b"three\n"]
        assert await w.read("clicks/_tail.jsonl") == b""

    run_streams(stream_settings(tmp_path), body)


def test_segments_rotate_by_size_without_a_gap(tmp_path: Path) -> None:
    written = lines(0, 2000)

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        for at in range(0, len(written), 7):
            await w.write(fh, b"".join(written[at : at + 7]))
        assert await w.everything() == b"".join(written)
        await w.close(fh)
        await w.stream().seal()
        assert len(w.ls("clicks/.segments")) > 10
        assert await w.sealed() == b"".join(written)
        assert await w.raw_payloads(tmp_path) == written
        assert not list(w.stream().folder.glob("*.seg"))

    run_streams(stream_settings(tmp_path), body)


def test_a_fast_writer_gets_room_before_it_has_to_ask(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        for n in range(0, 40_000, 1000):
            await w.write(fh, b"".join(lines(n, 1000)))
            await until(lambda: not w.stream().is_short)
        assert w.stream().active is not None and w.kernel.by_itself == 39  # the first opens it
        await w.close(fh)

    run_streams(stream_settings(tmp_path, segment_bytes=4 << 20), body)


def test_a_segment_seals_by_age(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        await w.put(b"old\n")
        while not await w.sealed():
            await trio.sleep(0.01)
        assert await w.sealed() == b"old\n"

    run_streams(stream_settings(tmp_path, seal_after_s=0.05), body)


def test_a_part_of_a_line_waits_for_its_rest_in_its_handle(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        a, b = await w.open_append(), await w.open_append()
        await w.write(a, b"a1 ")
        await w.write(b, b"b1\n")
        await w.write(a, b"a2\na3")
        await w.write(b, b"b2")
        await w.close(b)
        await w.close(a)
        assert await w.everything() == b"b1\na1 a2\nb2\na3\n"
        await w.stream().seal()
        assert await w.raw_payloads(tmp_path) == [b"b1\n", b"a1 a2\n", b"b2\n", b"a3\n"]

    run_streams(stream_settings(tmp_path), body)


def test_a_record_is_what_one_write_brought(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        await w.put(b"no\nline", b"\0\xff", b"x" * 5000)
        with pytest.raises(OSError) as e:
            await w.put(b"x" * 17_000)
        assert e.value.errno == errno.EMSGSIZE
        await w.stream().seal()
        assert await w.raw_payloads(tmp_path) == [b"no\nline", b"\0\xff", b"x" * 5000]

    run_streams(stream_settings(tmp_path, framing="record"), body)


def test_lines_that_are_too_long_are_cut_and_binary_passes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 300  # newlines every 256 bytes, and a few stretches without
    long = b"y" * 50_000

    async def body(w: World) -> None:
        await w.mkdir()
        await w.put(data, long[:20_000], long[20_000:], b"\n", b"z" * 40_000)
        assert await w.everything() == data + long + b"\n" + b"z" * 40_000 + b"\n"
        await w.stream().seal()
        records = await w.raw_payloads(tmp_path)
        assert b"".join(records) == data + long + b"\n" + b"z" * 40_000 + b"\n"
        assert max(map(len, records)) == w.stream().record_max

    run_streams(stream_settings(tmp_path), body)


def test_many_long_lines_at_once_are_cut_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun waits in memory: not without a bound."""
    monkeypatch.setattr("aof2.engine.append.stream.SHORT_BYTES", 1000)
    monkeypatch.setattr("aof2.engine.append.stream.BEGUN_BYTES_MAX", 20_000)

    async def body(w: World) -> None:
        w.kind.streams.native = False
        await w.mkdir()
        handles = [await w.open_append() for _ in range(10)]
        for _ in range(8):
            for fh in handles:
                await w.write(fh, b"y" * 900)
            assert w.kind.streams.begun_bytes() <= 30_000
        for fh in handles:
            await w.close(fh)
        found = await w.everything()
        assert len(found) == found.count(b"y") + 10 == 10 * 8 * 900 + 10

    run_streams(stream_settings(tmp_path), body)


def test_what_is_left_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = stream_settings(tmp_path)
    written = lines(0, 900)

    async def first(w: World) -> None:
        await w.mkdir()
        await w.put(b"".join(written[:500]))

    async def second(w: World) -> None:
        assert await w.everything() == b"".join(written[:500])
        await w.put(b"".join(written[500:]))

    async def third(w: World) -> None:
        await w.stream().seal()
        assert await w.sealed() == b"".join(written)
        assert await w.raw_payloads(tmp_path) == written

    for body in (first, second, third):
        run_streams(settings, body)


def test_what_the_channel_appended_is_found_when_the_channel_is_gone(tmp_path: Path) -> None:
    written = lines(0, 60)

    async def body(w: World) -> None:
        await w.mkdir()
        fh = await w.open_append()
        for one in written:
            await w.write(fh, one)
        assert w.kernel.by_itself
        await w.write(fh, b"begun")
        w.kernel.partials.pop(fh)
        w.kind.partial(w.stream().append_ino, fh, b"begun")  # the channel's last words
        w.kernel.gone = True
        await w.kind.end()
        assert await w.sealed() == b"".join(written) + b"begun\n"

    run_streams(stream_settings(tmp_path), body)


def test_a_tail_opened_as_a_seal_appears_does_not_show_it_again(tmp_path: Path) -> None:
    """The rows have the seal as long before the stream hears of it as the log takes to be synced."""
    env, seen = Env(), []

    async def body(w: World) -> None:
        token = trio.lowlevel.current_trio_token()

        async def look() -> None:
            seen.append((await w.sealed(), await w.read("clicks/_tail.jsonl")))

        def applied(name: str) -> None:
            if name == "catalog.commit.applied" and any(part[0].isdigit() for part in w.ls("clicks")):
                env.failpoint = lambda _: None  # type: ignore[method-assign]
                trio.from_thread.run(look, trio_token=token)

        await w.mkdir()
        await w.put(b"one\n" * 10)
        await w.stream().commit()
        env.failpoint = applied  # type: ignore[method-assign]
        await w.stream().seal()
        await w.put(b"two\n")
        assert await w.everything() == b"one\n" * 10 + b"two\n"

    run_streams(stream_settings(tmp_path), body, env=env)
    assert seen == [(b"one\n" * 10, b"")]


def test_the_channel_and_the_daemon_append_in_turn(tmp_path: Path) -> None:
    """Many writers, small segments, lines in pieces: what the channel cannot take comes here, and back."""

    async def body(w: World) -> None:
        await w.mkdir()
        acked: list[list[bytes]] = [[] for _ in range(8)]

        async def write(n: int) -> None:
            fh = await w.open_append()
            for i in range(120):
                line = b"%d:%d:" % (n, i) + b"x" * (i * 53 % 700) + b"\n"
                cut = i * 31 % len(line)
                for piece in (line[:cut], line[cut:]):
                    if piece:
                        await w.write(fh, piece)
                acked[n].append(line)
                if i % 17 == n:
                    await w.opens.get(fh).sync()
                if i % 40 == n:
                    await w.stream().end_segment()
                await trio.sleep(0)
            await w.close(fh)

        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(write, n)
        found = (await w.everything()).splitlines(keepends=True)
        for n in range(8):
            assert [line for line in found if line.startswith(b"%d:" % n)] == acked[n]
        assert len(found) == 960
        assert 0 < w.kernel.by_itself < 1920
        await w.stream().seal()
        assert await w.raw_payloads(tmp_path) == found

    run_streams(stream_settings(tmp_path), body)


def refused(e: pytest.ExceptionInfo[OSError], code: int) -> None:
    assert e.value.errno == code


def test_what_is_sealed_never_changes(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"one\n")
        await w.stream().seal()
        sealed = w.ino("clicks/00000000000000000000.jsonl")
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
            with pytest.raises(OSError) as e:
                await w.kind.open(sealed, flags, ROOT)
            refused(e, errno.EPERM)
        with pytest.raises(OSError) as e:
            await w.kind.set_attributes(sealed, AttributeChange(size=0), ROOT)
        refused(e, errno.EPERM)
        with pytest.raises(OSError) as e:
            await w.kind.create(row.ino, b"file", os.O_WRONLY, 0o644, ROOT)
        refused(e, errno.EPERM)
        with pytest.raises(OSError) as e:
            await w.kind.rename(row.ino, b"00000000000000000000.jsonl", row.ino, b"x", replace=True, exchange=False)
        refused(e, errno.EPERM)
        for name in (b"_append", b"_tail.jsonl", b".segments", b"00000000000000000000.jsonl"):
            with pytest.raises(OSError) as e:
                await w.mkdir(name, row.ino)
            refused(e, errno.EEXIST)
        with pytest.raises(OSError) as e:
            await w.mkdir(b"00000000000000000001.jsonl", row.ino)
        refused(e, errno.EPERM)
        assert await w.read("clicks/00000000000000000000.jsonl") == b"one\n"

    run_streams(stream_settings(tmp_path), body)


def test_removing_a_payload_file_takes_its_index_along(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"one\n")
        await w.stream().seal()
        await w.put(b"two\n")
        await w.stream().seal()
        await w.kind.unlink(row.ino, b"00000000000000000000.jsonl")
        assert w.ls("clicks") == [".segments", "00000000000000000004.jsonl", "_append", "_tail.jsonl"]
        assert len(w.ls("clicks/.segments")) == 2
        await w.put(b"three\n")
        await w.stream().seal()
        assert w.ls("clicks")[2] == "00000000000000000008.jsonl"

    run_streams(stream_settings(tmp_path), body)


def test_a_stream_is_removed_as_rm_does_it(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        row = await w.mkdir()
        await w.put(b"".join(lines(0, 600)))
        for name in w.ls("clicks"):
            if name == ".segments":
                for inner in w.ls("clicks/.segments"):
                    await w.kind.unlink(w.ino("clicks/.segments"), inner.encode())
                await w.kind.rmdir(row.ino, b".segments")
            else:
                await w.kind.unlink(row.ino, name.encode())
        await w.kind.rmdir(w.top, b"clicks")
        assert w.ls() == []
        stream_id = row.ino >> 40
        with w.volume.catalog.view() as view:
            assert not list(view.scan(stream_id, t.DIRTY))
        await until(lambda: not list((w.volume.state_dir / "segments").rglob("*.seg")))
        again = await w.mkdir()
        assert again.ino != row.ino
        await w.put(b"new\n")
        await w.stream().seal()
        assert await w.sealed() == b"new\n"

    run_streams(stream_settings(tmp_path), body)


def test_a_stream_with_records_is_not_empty(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.mkdir()
        await w.put(b"one\n")
        with pytest.raises(OSError) as e:
            await w.kind.rmdir(w.top, b"clicks")
        refused(e, errno.ENOTEMPTY)
        assert await w.everything() == b"one\n"
        await w.mkdir(b"other")
        await w.kind.rename(w.top, b"clicks", w.top, b"other", replace=True, exchange=False)
        assert w.ls() == ["other"]
        assert await w.everything("other") == b"one\n"

    run_streams(stream_settings(tmp_path), body)
