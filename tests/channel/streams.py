"""An `_append` behind the channel, as small as can be: segments in a folder, written in plain Python where it is asked.

`Stream` runs in the daemon of `daemon.py`. `payloads`, `segments` and `scanned` are for tests: what is in the files,
by the engine's own readers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from aof2.engine.env import Env
from aof2.engine.kinds.kernel import PARTIAL_BYTES_MAX, AppendState, Framing
from aof2.engine.segment import format as fmt
from aof2.engine.segment.pointer import publish
from aof2.engine.segment.reader import Record, SegmentReader
from aof2.fs.channel import Channel

STREAM_INO = 77
FOOTER = fmt.FOOTER_BYTES[fmt.Version.V3]
HEADER = fmt.HEADER_BYTES[fmt.Version.V3]


class Stream:
    """Owns the active segment while the channel does not. `asked` notes what came here."""

    def __init__(self, channel: Channel, ino: int, folder: Path, options: dict[str, Any]) -> None:
        self.channel, self.ino, self.folder = channel, ino, folder
        self.framing = Framing(options.get("framing", Framing.LINE))
        self.record_max = options.get("record_max", 16 << 20)
        self.segment_bytes = options.get("segment_bytes", 64 << 20)
        self.room_bytes = options.get("room_bytes", self.segment_bytes)
        self.fails = options.get("fails", 0)  # what forwarded writes are answered with
        self.gives = options.get("gives", True)
        self.begun: dict[int, bytes] = {}
        self.forwards: set[int] = set()
        self.asked: list[list[Any]] = []
        self.appended: list[AppendState] = []
        self.lock = trio.Lock()
        self.records_before = 0
        folder.mkdir(exist_ok=True)
        self.create(1, options.get("base", 0), options.get("last_ts_ms", 0))

    def create(self, segment_id: int, base_offset: int, last_ts_ms: int = 0) -> None:
        self.path = self.folder / f"{segment_id}.seg"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.state = AppendState(self.ino, segment_id, 0, base_offset, 0, 0, last_ts_ms)
        self.base_offset = base_offset
        self.room_end = self.room_bytes

    # -- requests ----------------------------------------------------------------------------------------------

    def open(self, fh: int, ext_id: int) -> None:
        self.channel.append_handle(self.ino, fh, ext_id=ext_id)

    async def write(self, fh: int, data: bytes) -> int:
        self.channel.hear()
        self.asked.append(["write", fh, len(data)])
        if self.fails:
            raise pyfuse3.FUSEError(self.fails)
        async with self.lock:
            await self.take()
            whole = self.begun.pop(fh, b"") + data
            rest = self.append(whole) if self.framing == Framing.LINE else self.append_one(whole)
            self.keep(fh, rest)
            self.give()
        return len(data)

    def keep(self, fh: int, rest: bytes) -> None:
        if len(rest) > PARTIAL_BYTES_MAX:
            self.begun[fh] = rest
            self.forwards.add(fh)
            self.channel.append_handle(self.ino, fh, forwards=True)
            return
        if fh in self.forwards:
            self.forwards.discard(fh)
            self.channel.append_handle(self.ino, fh)
        self.channel.append_partial(self.ino, fh, rest)

    async def release(self, fh: int) -> None:
        self.channel.hear()
        self.asked.append(["release", fh, len(self.begun.get(fh, b""))])
        self.forwards.discard(fh)
        if rest := self.begun.pop(fh, b""):
            async with self.lock:
                await self.take()
                self.append_one(rest + b"\n")
                self.give()

    def partial(self, fh: int, data: bytes) -> None:
        self.asked.append(["partial", fh, len(data)])
        self.begun[fh] = self.begun.get(fh, b"") + data

    # -- the segment -------------------------------------------------------------------------------------------

    async def take(self) -> AppendState | None:
        taken = await self.channel.append_take(self.ino)
        if taken is not None:
            self.state = taken
        return taken

    def give(self) -> None:
        if not self.gives:
            return
        self.channel.append_give(
            self.state,
            self.fd,
            stream_ino=STREAM_INO,
            base_record_count=self.records_before,
            room_end=self.room_end,
            ext_id=5,
            max_size=self.segment_bytes,
            framing=self.framing,
            record_max=self.record_max,
        )

    def append(self, data: bytes) -> bytes:
        """What is left begins a line."""
        while data:
            end = data.find(b"\n", 0, self.record_max) + 1 or (self.record_max if len(data) >= self.record_max else 0)
            if not end:
                break
            self.append_one(data[:end])
            data = data[end:]
        return data

    def append_one(self, payload: bytes) -> bytes:
        need = (self.state.end or HEADER) + fmt.RECORD_BYTES[fmt.Version.V3] + len(payload) + FOOTER
        if need > self.segment_bytes:
            self.seal()
            return self.append_one(payload)
        self.room_end = max(self.room_end, min(self.segment_bytes, need + self.room_bytes))
        now_ms = max(Env().now_ms(), self.state.last_ts_ms)
        data = fmt.encode_record(3, payload, self.state.next_logical, now_ms, 9)
        if not self.state.end:
            data = fmt.encode_header(self.header(now_ms)) + data
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size, need))
        os.pwrite(self.fd, data, self.state.end)
        at = self.state
        self.state = AppendState(
            *(self.ino, at.segment_id, at.end + len(data), at.next_logical + len(payload)),
            *(at.record_count + 1, fmt.crc64(data, at.crc64), now_ms),
        )
        return b""

    def header(self, created_ms: int) -> fmt.SegmentHeader:
        return fmt.SegmentHeader(
            *(3, STREAM_INO, self.state.segment_id, created_ms, self.base_offset, self.records_before),
            *(self.segment_bytes, 5),
        )

    def seal(self) -> None:
        """Only when it is ours; the next one begins."""
        at = self.state
        footer = fmt.SegmentFooter(3, at.record_count, at.end, at.crc64, 5, 1, at.segment_id, at.last_ts_ms)
        os.ftruncate(self.fd, at.end)
        os.pwrite(self.fd, fmt.encode_footer(footer), at.end)
        os.close(self.fd)
        with SegmentReader(Env(), self.path) as reader:
            publish(Env(), self.folder, reader.sealed_segment())
        self.records_before += at.record_count
        self.create(at.segment_id + 1, at.next_logical)


# -- what is in the files ---------------------------------------------------------------------------------------------


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"), key=lambda path: int(path.stem))


def records(path: Path) -> list[Record]:
    with SegmentReader(Env(), path) as reader:
        return list(reader.records())


def payloads(folder: Path) -> list[bytes]:
    """Of all segments, in order; each reads as a whole, and begins where the one before ended."""
    found: list[bytes] = []
    at: int | None = None
    for path in segments(folder):
        if path.stat().st_size == 0 or not path.read_bytes()[:HEADER].strip(b"\0"):
            continue
        for record in records(path):
            assert at is None or record.logical_offset == at
            at = record.logical_offset + len(record.payload)
            found.append(bytes(record.payload))
    return found


def scanned(path: Path, nodeid: int) -> AppendState:
    """What a scan says of a segment that is not sealed; behind its records there are zeros, a footer's length at
    least."""
    with SegmentReader(Env(), path) as reader:
        tail = reader.tail
        assert not reader.sealed and not tail.torn, str(tail)
        assert path.stat().st_size >= tail.end_offset + FOOTER
        return AppendState(
            *(nodeid, reader.header.segment_id, tail.end_offset, tail.next_logical_offset, tail.record_count),
            *(tail.crc64, tail.last_record_ts_ms),
        )
