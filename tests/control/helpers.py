"""A mounted volume without a mount: a real engine volume, a real control socket, and stand-ins for open files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.inbox.intake import Intake
from aof2.engine.kinds.catalogued import Catalogued
from aof2.engine.kinds.kind import Unsealed, Way
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.kinds.opens import Opens
from aof2.engine.local.handles import Key
from aof2.engine.settings import Settings
from aof2.engine.volume import PARTS, Volume, open_volume
from aof2.fs.channel import KnownHandle
from aof2.fs.control.client import ControlClient
from aof2.fs.control.protocol import Progress
from aof2.fs.control.server import ControlServer
from aof2.fs.options import Options
from tests.engine.helpers import backing_path, create_object, seal_object


class FakeFiles(Catalogued):
    """What is written and not sealed is told by the test."""

    def __init__(self, volume: Volume) -> None:
        super().__init__(volume, volume.tenant_names())
        self.opened: set[int] = set()
        self.held = 0  # so many seals find each file held by an open
        self.dirty: dict[int, Key] = {}
        self.dropped: list[int] = []
        self.catches_up: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint

    async def write(self, tenant: str, name: bytes, data: bytes) -> Key:
        """A file as it is after its last close: written, not sealed."""
        key = await create_object(self.volume, tenant, name)
        backing_path(self.volume, key).write_bytes(data)
        self.dirty[key[1]] = key
        return key

    def way(self) -> Way:
        return Way(passthrough_why="there is no mount", brake_why="there is no mount")

    async def fold(self) -> None:
        await self.catches_up()

    async def seal(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        if self.held:
            self.held -= 1
            return 0
        wanted = [ino for ino in self.dirty if ino not in self.opened and (inos is None or ino in inos)]
        for ino in wanted:
            await seal_object(self.volume, self.dirty.pop(ino))
        return len(wanted)

    def is_open(self, ino: int) -> bool:
        return ino in self.opened

    def is_kept_unsealed(self, ino: int) -> bool:
        return ino in self.opened

    def writing(self) -> set[int]:
        return set(self.opened)

    def open_inos(self) -> set[int]:
        return set(self.opened)

    def open_count(self) -> int:
        return len(self.opened)

    def unsealed(self) -> Unsealed:
        sizes = [backing_path(self.volume, key).stat().st_size for key in self.dirty.values()]
        return Unsealed(len(sizes), sum(sizes))

    async def drop_kernel_pages(self, ino: int) -> None:
        self.dropped.append(ino)


class FakeChannel:
    def __init__(self) -> None:
        self.invalidated: list[tuple[int, bytes]] = []
        self.handed_over = 0
        self.transport = "read: there is no kernel"
        self.device = (0, 0)  # none that is mounted

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.invalidated.append((parent, name))

    async def caught_up(self) -> None:
        await trio.lowlevel.checkpoint()

    async def dump(self) -> list[KnownHandle]:
        """It opened nothing by itself."""
        await trio.lowlevel.checkpoint()
        return []


class FakeMounted:
    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.mountpoint = volume.settings.volume.mountpoint
        self.options = Options()
        self.files = FakeFiles(volume)
        self.kinds = Kinds(dict.fromkeys(volume.tenant_names(), self.files), Opens())
        self.channel = FakeChannel()
        self.inbox = Intake(volume, self.kinds)
        self.started_ms = volume.env.now_ms()
        self.ended = False

    def end(self) -> None:
        self.ended = True

    async def call(self, verb: str, *, on_progress: Callable[[Progress], None] | None = None, **args: object) -> Any:
        """What a command would get."""

        def talk() -> Any:
            with ControlClient(self.volume.settings) as client:
                return client.call(verb, on_progress, **args)

        return await trio.to_thread.run_sync(talk)

    def ino(self, tenant_id: int, name: bytes) -> int:
        with self.volume.catalog.view() as view:
            found = [e.ino for (_, n), e in view.scan(tenant_id, t.DENTRIES) if n == name]
        return found[0]


def run_mounted(
    settings: Settings,
    body: Callable[[FakeMounted], Awaitable[None]],
    *,
    env: Env | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with open_volume(settings, env=env, parts=parts) as volume, trio.open_nursery() as nursery:
                mounted = FakeMounted(volume)
                await nursery.start(ControlServer(settings.volume.state_dir / "control.sock", mounted).run)
                await body(mounted)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def serve_without_a_mount(
    settings: Settings, mountpoint: Path, options: Options, ready: Callable[[], None], *, end: Path | None = None
) -> None:
    """Stands in for fs.daemon.serve: everything but the mount. Runs until `end` is there."""
    async with open_volume(settings) as volume, trio.open_nursery() as nursery:
        mounted = FakeMounted(volume)
        mounted.mountpoint = mountpoint
        await nursery.start(ControlServer(settings.volume.state_dir / "control.sock", mounted).run)
        ready()
        while end is None or not end.exists():
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


def ending_when(end: Path) -> Any:
    return partial(serve_without_a_mount, end=end)
