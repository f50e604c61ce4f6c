"""A volume with a tenant of files and one of streams, its intake, and deliverers beside it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
import trio

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inbox import Inbox, Job
from aof2.engine.inbox.format import Done
from aof2.engine.inbox.intake import Intake
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import Settings
from aof2.engine.settings.model import FollowSettings, RetentionSettings
from aof2.engine.verify.findings import Finding, Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import PARTS
from tests.append.helpers import World, run_streams, stream_settings

KEEP_S = 60.0


class Arena:
    """The world, its intake, and a deliverer's view of the remote."""

    def __init__(self, world: World, store: RemoteStore) -> None:
        self.world = world
        self.volume = world.volume
        self.intake = Intake(world.volume, world.kinds)
        self.store = store

    async def inbox(self, tenant: str = "default") -> Inbox:
        await self.intake.look()  # which opens the door
        return await trio.to_thread.run_sync(Inbox, self.store, tenant)

    async def job(self, job_id: str, to: str, tenant: str = "default", mode: str = "append") -> Job:
        return (await self.inbox(tenant)).open_job(job_id, to=to, mode=mode)  # type: ignore[arg-type]

    async def deliver(self, job_id: str, to: str, files: dict[str, bytes], mode: str = "append") -> Done | None:
        job = await self.job(job_id, to, mode=mode)
        await trio.to_thread.run_sync(put_all, job, files)
        await self.intake.look()
        return await trio.to_thread.run_sync(job.answer)

    async def deliver_records(self, job_id: str, to: str, records: list[bytes], mode: str = "append") -> Done | None:
        job = await self.job(job_id, to, "events", mode)

        def put() -> None:
            job.put_records(records)
            job.commit()

        await trio.to_thread.run_sync(put)
        await self.intake.look()
        return await trio.to_thread.run_sync(job.answer)

    # -- looking -----------------------------------------------------------------------------------------------

    def row(self, path: str, tenant: str = "default") -> InodeRow:
        tenant_id = self.volume.tenants.named(tenant).tenant_id
        at = namespace.root_ino(tenant_id)
        with self.volume.catalog.view() as view:
            for part in filter(None, path.encode().split(b"/")):
                entry = namespace.entry(view, tenant_id, at, part)
                if entry is None:
                    raise FileNotFoundError(path)
                at = entry.ino
            row = view.get(tenant_id, t.INODES, at)
        assert row is not None
        return row

    def tree(self, path: str = "", tenant: str = "default") -> list[str]:
        """Files below a directory, sorted."""
        tenant_id, found = self.volume.tenants.named(tenant).tenant_id, []
        with self.volume.catalog.view() as view:

            def walk(ino: int, below: str) -> None:
                for name, entry in namespace.list_dir(view, tenant_id, ino, None, 100_000):
                    if entry.mode >> 12 == 4:
                        walk(entry.ino, f"{below}{name.decode()}/")
                    else:
                        found.append(f"{below}{name.decode()}")

            walk(self.row(path, tenant).ino, "")
        return sorted(found)

    async def read(self, path: str, tenant: str = "default") -> bytes:
        row = self.row(path, tenant)
        async with self.volume.opened_object((row.ino >> 40, row.ino, row.generation)) as handle:
            return await self.volume.hydrator.read(handle, 0, row.size)

    def listed(self, prefix: str = "inbox/") -> list[str]:
        return [info.key for info in self.store.list(prefix)]


def put_all(job: Job, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        job.put(path, data)
    job.commit()


def settings_of(root: Path, *, remote_url: str | None = None, **keys: object) -> Settings:
    settings = stream_settings(root, **keys)
    if remote_url is not None:
        settings = msgspec.structs.replace(settings, remote=msgspec.structs.replace(settings.remote, url=remote_url))
    return msgspec.structs.replace(
        settings, follow=FollowSettings(inbox_keep_s=KEEP_S), retention=RetentionSettings(purge_after_s=10.0)
    )


def run(
    settings: Settings,
    body: Callable[[Arena], Awaitable[None]],
    *,
    env: Env | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    async def in_world(world: World) -> None:
        store = open_remote(Env(), settings.remote)
        try:
            await body(Arena(world, store))
        finally:
            store.close()

    run_streams(settings, in_world, env=env, parts=parts)


def some_files(seed: int = 1) -> dict[str, bytes]:
    """Small ones, one that is empty, one of several chunks (of 256 KiB)."""
    rng = random.Random(seed)
    files = {f"part={n % 3}/small-{n}": rng.randbytes(rng.randrange(1, 9000)) for n in range(12)}
    files["empty"] = b""
    files["text"] = b"to be or not to be, " * 2000
    files["large"] = rng.randbytes(700_000)
    return files


def lines(seed: str, count: int) -> list[bytes]:
    return [f"{seed} {n} {hashlib.sha256(f'{seed}{n}'.encode()).hexdigest()}\n".encode() for n in range(count)]


def troubles(settings: Settings) -> list[Finding]:
    """What verify has against the volume, every blob read."""
    return [f for f in verify(settings, deep_remote=True).findings if f.severity is not Severity.NOTE]


def is_refused(answer: Callable[[], object], *words: str) -> bool:
    try:
        answer()
    except Aof2Error as e:
        assert all(word in str(e) for word in words), str(e)
        return True
    return False
