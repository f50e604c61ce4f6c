"""One open of what a stream makes up: `_append`, `_tail`, a raw segment.

Owner: the trio thread. A crash leaves nothing: the part of a line that a handle holds is no record yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from typing import TYPE_CHECKING, NoReturn

import trio

from aof2.engine.append import rows
from aof2.engine.append.stream import Stream
from aof2.engine.append.views import RawSegment, TailReader, opened_raw
from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import Aof2Error, os_error
from aof2.engine.kinds.kernel import Framing, KernelGoneError
from aof2.engine.kinds.kind import FileHandle

if TYPE_CHECKING:
    from aof2.engine.append.streams import Streams
    from aof2.engine.kinds.opens import Opens

log = logging.getLogger(__name__)


class MadeUpHandle:
    """What all of them refuse."""

    keeps_pages = False
    direct_io = True

    def __init__(self, opens: Opens, ino: int) -> None:
        self._opens = opens
        self.ino = ino
        self.fh = opens.new_number()

    async def read(self, offset: int, size: int) -> bytes | None:
        raise os_error(errno.EBADF)

    async def write(self, offset: int, data: bytes) -> int:
        raise os_error(errno.EBADF)

    async def sync(self) -> None:
        """Nothing of it is written here."""

    async def close(self) -> None:
        self._opens.pop(self.fh)

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        self._refuse()

    async def seek(self, offset: int, whence: int) -> int:
        self._refuse()

    async def copy_from(self, source: FileHandle, offset_in: int, offset_out: int, length: int) -> int:
        raise os_error(errno.EXDEV)

    def _refuse(self) -> NoReturn:
        raise os_error(errno.EOPNOTSUPP)


class AppendHandle(MadeUpHandle):
    """A writer. `partial`: the part of a line that it wrote last, as far as it is not the channel's."""

    def __init__(self, streams: Streams, opens: Opens, stream: Stream, process: int = 0) -> None:
        super().__init__(opens, stream.append_ino)
        self._streams = streams
        self.stream = stream
        self.process = process
        self.partial = b""
        self.ext_id = 0
        self.forwards = False  # all its writes come here, the channel was told
        stream.users += 1
        stream.handles[self.fh] = self

    async def read(self, offset: int, size: int) -> bytes | None:
        return b""

    async def write(self, offset: int, data: bytes) -> int:
        self._streams.kernel.hear()
        return await self.stream.write(self, data)

    async def sync(self) -> None:
        await self.stream.commit()

    async def close(self) -> None:
        """The part of a line that is left becomes one."""
        self._streams.kernel.hear()
        self._opens.pop(self.fh)
        self.stream.handles.pop(self.fh, None)  # the channel knows it no more
        try:
            if self.partial and self.stream.framing is Framing.LINE:
                await self.stream.write(self, b"\n")
        except (Aof2Error, OSError, KernelGoneError) as e:
            path = str(self.stream.folder)
            log.critical("the end of a line is lost", extra={"path": path, "bytes": len(self.partial), "error": str(e)})
        finally:
            self._streams.unused(self.stream)


class TailHandle(MadeUpHandle):
    """A reader of what is not sealed: from where that began when it was opened, on and on."""

    def __init__(self, streams: Streams, opens: Opens, stream: Stream) -> None:
        super().__init__(opens, stream.tail_ino)
        self._streams = streams
        self._volume = streams.volume
        self._stream = stream
        with self._volume.catalog.view() as view:  # which shows a seal a moment before the stream hears of it
            sealed = rows.position_of(view, stream_of(stream.ino), stream.ino)
        self._base = max(stream.position.next_logical, sealed.next_logical)
        self._tail = TailReader(streams.volume.env)
        self._reading = trio.Lock()  # a thread at a time
        stream.users += 1
        stream.tail_handles += 1

    async def read(self, offset: int, size: int) -> bytes:
        parts: list[bytes] = []
        at, stop = self._base + offset, min(self._base + offset + size, self._stream.committed_logical)
        while at < stop:
            piece = await self._read(at, stop - at)
            if not piece:
                break
            parts.append(piece)
            at += len(piece)
        return b"".join(parts)

    async def _read(self, logical: int, size: int) -> bytes:
        for segment in self._stream.unsealed():
            if segment.base_offset <= logical < segment.committed_logical:
                async with self._reading:
                    return await trio.to_thread.run_sync(self._tail.read, segment, logical, size)
        for part in self._stream.sealed_lately:
            if part.base_offset <= logical < part.end_logical:
                key = (stream_of(self.ino), part.payload_ino, rows.GENERATION)
                async with self._volume.opened_object(key) as handle:
                    return await self._volume.hydrator.read(handle, logical - part.base_offset, size)
        raise os_error(errno.ESTALE)  # it was removed meanwhile

    async def close(self) -> None:
        await super().close()
        self._stream.tail_handles -= 1
        self._tail.close()
        self._streams.unused(self._stream)


class RawHandle(MadeUpHandle):
    """A reader of a raw segment: its two files stay while it is open."""

    direct_io = False

    def __init__(self, streams: Streams, opens: Opens, ino: int, payload_ino: int, index_ino: int) -> None:
        super().__init__(opens, ino)
        self._files = streams.files
        self._inos = (payload_ino, index_ino)
        self._kept = contextlib.ExitStack()
        self._opened = contextlib.AsyncExitStack()
        self._raw: RawSegment | None = None
        for one in self._inos:
            self._kept.enter_context(self._files.known.opening(one))

    async def open(self) -> None:
        """What it is composed of is open, too; ESTALE."""
        try:
            keys = [(stream_of(ino), ino, rows.GENERATION) for ino in self._inos]
            self._raw = await self._opened.enter_async_context(opened_raw(self._files.volume, *keys))
        except BaseException:
            await self.close()
            raise

    async def read(self, offset: int, size: int) -> bytes:
        if self._raw is None:
            raise os_error(errno.EBADF)
        return await self._raw.read(offset, size)

    async def close(self) -> None:
        await super().close()
        await self._opened.aclose()
        self._kept.close()
        for ino in self._inos:
            await self._files.removal.drop_nameless(ino)
