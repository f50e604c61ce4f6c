"""Streams on a small volume, without a mount: a kind, and a kernel that remembers what it was told."""

from __future__ import annotations

import os
from array import array
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import trio

from aof2.engine.append import names
from aof2.engine.append.framing import frame
from aof2.engine.append.kind import AppendKind
from aof2.engine.append.stream import Stream
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.env import Env
from aof2.engine.files import Files
from aof2.engine.files.kind import FilesKind
from aof2.engine.kinds.kernel import PARTIAL_BYTES_MAX, AppendState, Framing, KernelGoneError
from aof2.engine.kinds.kind import Caller
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import MountWish, Surroundings
from aof2.engine.namespace import root_ino
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.settings import Settings
from aof2.engine.settings.model import AppendTenant, FilesTenant
from aof2.engine.volume import PARTS, Volume, open_volume
from aof2.native import crc64, segment_encode
from tests.engine.helpers import KIB, MIB, small_settings
from tests.files.helpers import FakeKernel

ROOT = Caller(0, 0)
HANGS_AFTER_S = 120.0
NEVER_S = 86_400.0


class Given:
    """A segment that is the channel's."""

    def __init__(self, state: AppendState, fd: int, room_end: int, framing: Framing, record_max: int) -> None:
        self.state = state
        self.fd = os.dup(fd)
        self.framing = framing
        self.record_max = record_max
        self.told = False
        self.has_room(room_end)

    def has_room(self, end: int) -> None:
        self.room_end = end
        self.low: int | None = self.state.end + (end - self.state.end) // 2

    def is_news(self) -> bool:
        """Whether records that were just written are told of."""
        low = self.low is not None and self.state.end >= self.low
        news, self.told = low or not self.told, True
        if low:
            self.low = None
        return news


class StreamKernel(FakeKernel):
    """Appends by itself to what it was given, as the channel does; says what names it was told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: AppendKind | None = None
        self.forgotten: list[tuple[int, bytes]] = []
        self.given: dict[int, Given] = {}
        self.ext_ids: dict[int, int] = {}
        self.forwarding: set[int] = set()
        self.partials: dict[int, bytes] = {}
        self.by_itself = 0
        self.gone = False

    def invalidate_entry(self, parent: int, name: bytes, child: int = 0) -> None:
        self.forgotten.append((parent, name))

    def append_give(self, state: AppendState, fd: int, **facts: Any) -> None:
        assert state.nodeid not in self.given and state.segment_id
        assert os.fstat(fd).st_size >= state.end
        self.given[state.nodeid] = Given(state, fd, facts["room_end"], facts["framing"], facts["record_max"])

    def append_room(self, nodeid: int, room_end: int) -> None:
        assert room_end > self.given[nodeid].room_end
        self.given[nodeid].has_room(room_end)

    async def append_take(self, nodeid: int) -> AppendState | None:
        await trio.lowlevel.checkpoint()
        if self.gone:
            raise KernelGoneError("the mount is gone")
        given = self.given.pop(nodeid, None)
        if given is None:
            return None
        os.close(given.fd)
        return given.state

    async def append_state(self, nodeid: int) -> AppendState | None:
        await trio.lowlevel.checkpoint()
        given = self.given.get(nodeid)
        if given is None:
            return None
        given.told = False
        return given.state

    def append_handle(self, nodeid: int, fh: int, *, ext_id: int = 0, forwards: bool = False) -> None:
        self.ext_ids[fh] = ext_id
        self.forwarding.discard(fh)
        self.forwarding |= {fh} if forwards else set()

    def append_partial(self, nodeid: int, fh: int, data: bytes) -> None:
        assert fh in self.ext_ids and len(data) <= PARTIAL_BYTES_MAX
        self.partials[fh] = data

    def hear(self) -> None:
        """What was told is heard at once."""

    def appends(self, nodeid: int, fh: int, data: bytes) -> bool:
        """A WRITE; False: it is forwarded."""
        given, partial = self.given.get(nodeid), self.partials.get(fh, b"")
        if given is not None and fh not in self.forwarding and self._append(given, fh, partial, data):
            self.by_itself += 1
            return True
        self._forward(nodeid, fh)
        return False

    def _append(self, given: Given, fh: int, partial: bytes, data: bytes) -> bool:
        framed = frame(given.framing, partial, data, given.record_max)
        state, lengths = given.state, [len(payload) for payload in framed.payloads]
        if state.end + framed.file_bytes + 96 > given.room_end or len(framed.rest) > PARTIAL_BYTES_MAX:
            return False
        logicals = [state.next_logical + sum(lengths[:n]) for n in range(len(lengths))]
        ones = len(lengths)
        encoded = segment_encode(
            *(3, b"".join(framed.payloads), array("I", lengths), array("Q", logicals)),
            *(array("Q", [state.last_ts_ms] * ones), array("Q", [self.ext_ids[fh]] * ones), array("I", [0] * ones)),
        )
        os.pwrite(given.fd, encoded, state.end)
        given.state = state._replace(
            end=state.end + len(encoded),
            next_logical=state.next_logical + sum(lengths),
            record_count=state.record_count + ones,
            crc64=crc64(encoded, state.crc64),
        )
        self.partials[fh] = framed.rest
        if self.kind is not None and given.is_news():
            self.kind.appended(given.state)
        return True

    def _forward(self, nodeid: int, fh: int) -> None:
        assert self.kind is not None
        if partial := self.partials.pop(fh, b""):
            self.kind.partial(nodeid, fh, partial)

    def releases(self, nodeid: int, fh: int) -> None:
        self._forward(nodeid, fh)
        self.ext_ids.pop(fh, None)
        self.forwarding.discard(fh)

    def close(self) -> None:
        super().close()
        for given in self.given.values():
            os.close(given.fd)
        self.given.clear()


class World:
    """A volume with a tenant of streams, as a mount would have it."""

    def __init__(self, volume: Volume, kernel: StreamKernel, opens: Opens, kind: AppendKind, kinds: Kinds) -> None:
        self.volume = volume
        self.kernel = kernel
        self.opens = opens
        self.kind = kind
        self.kinds = kinds
        self.top = root_ino(volume.tenants.named("events").tenant_id)

    async def mkdir(self, name: bytes = b"clicks", parent: int | None = None) -> InodeRow:
        return await self.kind.mkdir(self.top if parent is None else parent, name, 0o755, ROOT)

    def ino(self, path: str) -> int:
        at = self.top
        for part in path.encode().split(b"/"):
            row = self.kind.find(at, part)
            if row is None:
                raise FileNotFoundError(path)
            at = row.ino
        return at

    def stream(self, path: str = "clicks") -> Stream:
        return self.kind.streams.get(self.ino(path))

    def ls(self, path: str = "") -> list[str]:
        ino = self.ino(path) if path else self.top
        found: list[str] = []
        while page := self.kind.entries(ino, os.fsencode(found[-1]) if found else None, 3):
            found += [os.fsdecode(name) for name, _ in page]
        return found

    async def open_append(self, path: str = "clicks") -> int:
        return await self.kind.open(self.ino(f"{path}/_append"), os.O_WRONLY, ROOT)

    async def write(self, fh: int, data: bytes) -> None:
        """By the channel where it may, else here."""
        handle = self.opens.get(fh)
        if not self.kernel.appends(handle.ino, fh, data):
            assert await handle.write(0, data) == len(data)

    async def close(self, fh: int) -> None:
        handle = self.opens.get(fh)
        self.kernel.releases(handle.ino, fh)
        await handle.close()

    async def put(self, *writes: bytes, path: str = "clicks") -> None:
        fh = await self.open_append(path)
        for data in writes:
            await self.write(fh, data)
        await self.close(fh)

    async def read(self, path: str) -> bytes:
        """As a reader of the mount would, by whatever way."""
        ino = self.ino(path)
        if names.made_up(ino) is None:
            row = self.kind.row(ino)
            async with self.volume.opened_object((ino >> 40, ino, row.generation)) as handle:
                return await self.volume.hydrator.read(handle, 0, row.size)
        fh = await self.kind.open(ino, os.O_RDONLY, ROOT)
        out = b""
        while part := await self.opens.get(fh).read(len(out), 7000):
            out += part
        await self.close(fh)
        return out

    async def sealed(self, path: str = "clicks") -> bytes:
        """All payload files, one behind the other: each begins where the last one ended."""
        out = b""
        for name in self.ls(path):
            if name[0].isdigit():
                assert int(name[:20]) == len(out)
                out += await self.read(f"{path}/{name}")
        return out

    async def everything(self, path: str = "clicks") -> bytes:
        await self.stream(path).commit()
        return await self.sealed(path) + await self.read(f"{path}/_tail.jsonl")

    async def raw_payloads(self, scratch: Path, path: str = "clicks") -> list[bytes]:
        """Every record of the raw segments, by a reader of the format alone."""
        found: list[tuple[int, bytes]] = []
        for name in self.ls(f"{path}/.segments"):
            if name.endswith(".seg"):
                data = await self.read(f"{path}/.segments/{name}")
                assert len(data) == self.kind.row(self.ino(f"{path}/.segments/{name}")).size
                (scratch / name).write_bytes(data)
                with SegmentReader(self.volume.env, scratch / name) as reader:
                    assert reader.sealed
                    reader.verify()
                    found += [(r.logical_offset, bytes(r.payload)) for r in reader.records()]
        at = 0
        for offset, payload in sorted(found):
            assert offset == at
            at += len(payload)
        return [payload for _, payload in sorted(found)]


def stream_settings(root: Path, *, hot_bytes: int = 64 * MIB, **keys: object) -> Settings:
    tenant = AppendTenant(**{"segment_bytes": 16 * KIB, "seal_after_s": NEVER_S, **keys})  # type: ignore[arg-type]
    return msgspec.structs.replace(
        small_settings(root, hot_bytes=hot_bytes), tenants={"default": FilesTenant(), "events": tenant}
    )


Body = Callable[[World], Awaitable[None]]


def run_streams(
    settings: Settings,
    body: Body,
    *,
    env: Env | None = None,
    kernel: StreamKernel | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    """`body` with the volume mounted, as it were; unmounted without a clean end."""
    kernel = kernel or StreamKernel()

    async def main() -> None:
        async with open_volume(settings, env=env, parts=parts) as volume:
            opens = Opens()
            files = Files(volume, kernel, opens)
            at = Surroundings(volume, kernel, opens, MountWish(), {})
            base = FilesKind(at._replace(tenants=volume.tenants.by_kind()[0]), files)
            kind = AppendKind(at._replace(tenants=volume.tenants.by_kind()[1], made={0: base}))
            kernel.kind = kind
            by_stream = {**dict.fromkeys(base.tenants, base), **dict.fromkeys(kind.tenants, kind)}
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(files.run)
                    await nursery.start(kind.run)
                    with trio.fail_after(HANGS_AFTER_S):
                        await body(World(volume, kernel, opens, kind, Kinds(by_stream, opens)))
                    nursery.cancel_scope.cancel()
            finally:
                kernel.close()

    trio.run(main)
