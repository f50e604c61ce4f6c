"""Moving data on request: warm, evict, pin, unpin. What cannot be moved is named, and the rest is moved all the same.

Owner: the trio thread. A crash leaves what the engine leaves: whole movements, in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import trio

from aof2.engine import pins
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.paths import Place
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.objects import ObjectGoneError, bytes_here
from aof2.fs.control import durable, walk
from aof2.fs.control.closing import Closing
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import ControlError, Paths, Progress
from aof2.fs.wording import explain, human_size

WARM_PARALLEL: Final = 4
SKIPPED_MAX: Final = 1000  # named one by one; the rest is counted


class Moved(msgspec.Struct, kw_only=True):
    """What a verb has done. `skipped` names at most SKIPPED_MAX files that were left as they are, and `why`;
    `skipped_files` counts all."""

    files: int = 0
    bytes: int = 0
    skipped_files: int = 0
    skipped: list[dict[str, str]] = []

    def skip(self, path: str, why: str) -> None:
        self.skipped_files += 1
        if len(self.skipped) < SKIPPED_MAX:
            self.skipped.append({"path": path, "why": why})


class Resident(msgspec.Struct, kw_only=True):
    """How much of some files is on this disk."""

    files: int = 0
    bytes: int = 0
    local_files: int = 0
    local_bytes: int = 0


# -- warm ----------------------------------------------------------------------------------------------------------


def _local_bytes(mounted: Mounted, view: View, tenant_id: int, row: ObjectRow) -> tuple[int, int]:
    if row.state == ObjectState.DIRTY:
        return row.size, row.size
    return bytes_here(view, tenant_id, row, mounted.volume.settings.engine.block_bytes)


async def resident(mounted: Mounted, args: Paths, _: Tell) -> Resident:
    """How much of it is in hot_cache: `warm --check`."""
    found = Resident()
    for page in walk.files(mounted, walk.find(mounted, args.paths)):
        await trio.lowlevel.checkpoint()
        with mounted.volume.catalog.view() as view:
            for place in page:
                row = walk.newest(view, place)
                here, size = _local_bytes(mounted, view, place.tenant_id, row) if row is not None else (0, 0)
                found.files += 1
                found.bytes += size
                found.local_bytes += here
                found.local_files += here == size
    return found


async def warm(mounted: Mounted, args: Paths, tell: Tell) -> Moved:
    """Brings the files to this disk, several at a time."""
    before = await resident(mounted, args, tell)
    limit = mounted.volume.settings.cache.hot_bytes
    if before.bytes > limit:
        wanted = f"{human_size(before.bytes)} do not fit into cache.hot_bytes = {human_size(limit)}"
        raise ControlError(f"{wanted}; warm less, or raise it")
    warming = _Warming(mounted, before.bytes - before.local_bytes, tell)
    send, receive = trio.open_memory_channel[Place](WARM_PARALLEL)
    async with open_nursery() as telling:
        telling.start_soon(warming.tell_forever)
        async with open_nursery() as nursery:
            for _ in range(WARM_PARALLEL):
                nursery.start_soon(warming.work, receive.clone())
            receive.close()
            async with send:
                for page in walk.files(mounted, walk.find(mounted, args.paths)):
                    for place in page:
                        await send.send(place)
        telling.cancel_scope.cancel()
    return warming.moved


class _Warming:
    """Files on their way to this disk."""

    def __init__(self, mounted: Mounted, missing_bytes: int, tell: Tell) -> None:
        self.moved = Moved()
        self._mounted = mounted
        self._missing_bytes = missing_bytes
        self._tell = tell
        self._active: dict[Key, tuple[ObjectHandle, int]] = {}  # and what was here of it before

    async def tell_forever(self) -> None:
        while True:
            coming = sum(handle.resident_bytes - before for handle, before in self._active.values())
            done = min(self.moved.bytes + max(0, coming), self._missing_bytes)
            await self._tell(Progress("warm", done, self._missing_bytes))
            await trio.sleep(durable.LOOK_EVERY_S)

    async def work(self, places: trio.MemoryReceiveChannel[Place]) -> None:
        async with places:
            async for place in places:
                try:
                    left = await self._one(place)
                except ObjectGoneError:
                    continue  # unlinked or rewritten meanwhile
                except (Aof2Error, OSError) as e:
                    self.moved.skip(walk.shown(self._mounted, place), explain(e))
                else:
                    self.moved.files += 1
                    if left:
                        why = f"no room on this disk for {human_size(left)} of it"
                        self.moved.skip(walk.shown(self._mounted, place), why)

    async def _one(self, place: Place) -> int:
        """Bytes that found no room."""
        volume = self._mounted.volume
        with volume.catalog.view() as view:
            row = walk.newest(view, place)
        if row is None or row.state == ObjectState.DIRTY:
            return 0  # all of it is here, if there is any
        key = (place.tenant_id, row.ino, row.generation)
        async with volume.opened_object(key) as handle:
            before = handle.resident_bytes
            self._active[key] = (handle, before)
            try:
                await volume.hydrator.fill(handle)
            finally:
                del self._active[key]
                self.moved.bytes += max(0, handle.resident_bytes - before)
            return handle.absent_bytes


# -- evict ---------------------------------------------------------------------------------------------------------


async def evict(mounted: Mounted, args: Paths, tell: Tell) -> Moved:
    """Drops every local copy, durable first. What is open, pinned or still written to is skipped and named."""
    places = walk.find(mounted, args.paths)
    moved = Moved()
    closing = Closing(mounted)
    await _make_durable(mounted, places, closing, tell)
    for page in walk.files(mounted, places):
        await closing.closed([place.inode.ino for place in page])
        await trio.lowlevel.checkpoint()
        await _evict_page(mounted, page, closing, moved)
        await tell(Progress("evict", moved.files, moved.files, "files"))
    return moved


async def _make_durable(mounted: Mounted, places: Sequence[Place], closing: Closing, tell: Tell) -> None:
    """Published, and so is the log that says so: what is evicted can be restored. All that a follower has is."""
    if mounted.volume.following is not None:
        return
    await walk.seal_below(mounted, places)
    inos = await walk.not_uploaded(mounted, places)
    if inos:
        await closing.closed(inos)
        await mounted.kinds.seal(inos)
    await durable.upload(mounted.volume, {place.tenant_id for place in places}, tell, inos=inos)


async def _evict_page(mounted: Mounted, page: Sequence[Place], closing: Closing, moved: Moved) -> None:
    volume = mounted.volume
    by_key: dict[Key, Place] = {}
    with volume.catalog.view() as view:
        for place in page:
            row = walk.newest(view, place)
            why = _kept(mounted, view, place, row)
            if why:
                moved.skip(walk.shown(mounted, place), why)
                continue
            moved.files += 1
            for key in _generations(view, place):
                by_key[key] = place
    freed, refused = await volume.evict(list(by_key))
    moved.bytes += freed
    while refused and await closing.again():
        freed, refused = await volume.evict(refused)
        moved.bytes += freed
    for place in {by_key[key].inode.ino: by_key[key] for key in refused}.values():
        moved.files -= 1
        moved.skip(walk.shown(mounted, place), "in use")
    for ino in {place.inode.ino for place in by_key.values()}:
        await mounted.kinds.of(ino).drop_kernel_pages(ino)


def _kept(mounted: Mounted, view: View, place: Place, row: ObjectRow | None) -> str:
    """Why the file is not evicted; "" when it may be."""
    if mounted.kinds.is_open(place.inode.ino):
        return "open"
    if not walk.is_durable(row):
        return "not in the remote yet"
    if pins.is_pinned(view, place.tenant_id, place.inode.ino):
        return "pinned"
    return ""


def _generations(view: View, place: Place) -> list[Key]:
    """Every generation that may have local bytes: the newest, and older ones that are kept restorable."""
    found = view.scan(place.tenant_id, t.OBJECTS, prefix=place.inode.ino.to_bytes(8, "big"))
    return [
        (place.tenant_id, ino, generation)
        for (ino, generation), row in found
        if row.state == ObjectState.PUBLISHED and row.chunks
    ]


# -- pin -----------------------------------------------------------------------------------------------------------


async def pin(mounted: Mounted, args: Paths, tell: Tell) -> Moved:
    """Keeps the files on this disk from now on, and brings what is missing. Survives a restart."""
    volume = mounted.volume
    by_tenant: dict[int, list[int]] = {}
    size = 0
    for page in walk.files(mounted, walk.find(mounted, args.paths)):
        await trio.lowlevel.checkpoint()
        with volume.catalog.view() as view:
            for place in page:
                row = walk.newest(view, place)
                if not pins.is_pinned(view, place.tenant_id, place.inode.ino):
                    size += row.data_bytes if row is not None else 0
                by_tenant.setdefault(place.tenant_id, []).append(place.inode.ino)
    _check_fits(mounted, size)
    await _in_batches(mounted, by_tenant, pins.pin)
    return await warm(mounted, args, tell)


def _check_fits(mounted: Mounted, size: int) -> None:
    """What is pinned must leave room for everything else to pass through."""
    volume = mounted.volume
    with volume.catalog.view() as view:
        held = sum(n for tenant_id in volume.tenant_names() for _, n in pins.pinned(view, tenant_id))
    cache = volume.settings.cache
    most = int(cache.hot_bytes * cache.low_water)
    if held + size > most:
        now = f"{human_size(held + size)} would be pinned, {human_size(held)} are"
        raise ControlError(f"{now}; cache.hot_bytes lets at most {human_size(most)}: pin less, or raise it")


async def unpin(mounted: Mounted, args: Paths, _: Tell) -> Moved:
    by_tenant: dict[int, list[int]] = {}
    for page in walk.files(mounted, walk.find(mounted, args.paths)):
        await trio.lowlevel.checkpoint()
        for place in page:
            by_tenant.setdefault(place.tenant_id, []).append(place.inode.ino)
    return Moved(files=await _in_batches(mounted, by_tenant, pins.unpin))


async def _in_batches(mounted: Mounted, by_tenant: dict[int, list[int]], change: Callable[..., int]) -> int:
    changed = 0
    for tenant_id, inos in by_tenant.items():
        for first in range(0, len(inos), walk.PAGE):
            work = partial(change, inos=inos[first : first + walk.PAGE])
            changed += await result_of(mounted.volume.writer.submit(tenant_id, work, sync=True))
    return changed
