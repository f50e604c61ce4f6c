"""restore: a working state folder on an empty machine, from the remote alone, and what it could not find.

    volume.json → every stream's log (as `follow` does) → residency cleared, losses dropped (`lost`) → audit logs → name

Invariants
- The folder is built beside its place, as `<state_dir>.restoring`, and gets its name by rename when it is whole: a half
  restored volume cannot be opened. A state folder that holds anything is refused.
- The remote is only read. The writer's epoch is claimed when the volume is opened, not here.
- What is changed here (residency, losses) is in the restored logs, behind what came from the remote: the rows are
  rebuilt the same from them.

Owner: blocking; the thread that calls it. A crash leaves `<state_dir>.restoring`, which the next restore throws away.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.behind import start_behind
from aof2.engine.catalog.recovery import Opened, open_catalog
from aof2.engine.catalog.store import MAP_BYTES
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, UnsupportedError
from aof2.engine.manifest.reader import Stream, parse_chunk
from aof2.engine.manifest.snapshot import local_snapshots
from aof2.engine.manifest.writer import LogSettings
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.fence import VolumeRecord
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.auditmend import audit_path, joined_ranges
from aof2.engine.replicate.follow import Follower, StreamFollowed
from aof2.engine.replicate.lost import Lost, TenantSalvage

VOLUME_STREAM: Final = 0
STAGING_SUFFIX: Final = ".restoring"
CRASH_POINTS: Final = (
    "replicate.restore.followed",
    "replicate.restore.salvaged",
    "replicate.restore.audited",
    "replicate.restore.named",
)

Progress = Callable[[str], None]


class RestoreError(Aof2Error):
    """The volume cannot be restored from there. The message says what is in the way; nothing was changed."""


class AuditRestored(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    records: int
    problem: str = ""


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream's log ends in the remote: the next record's ordinal and place, and the time of the last one."""

    stream_id: int
    tenant: str
    ordinal: int
    chunk_index: int
    chunk_offset: int
    at_ms: int


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came back and what did not. `whole`: nothing is known to be missing. `complete`: nothing can be, either,
    since the writer unmounted cleanly and its logs end where it said."""

    volume_uuid: str
    writer_epoch: int
    state_dir: str
    streams: list[StreamFollowed]
    tenants: list[str]
    never_uploaded: list[str]
    """Tenants whose own log has nothing on the remote: they come back empty."""
    lost: list[Lost]
    rescued: list[str]
    """Files whose upload was complete on the remote, though the log did not say so yet."""
    checked_blobs: int
    audit: list[AuditRestored]
    log_ends: list[LogEnd]
    closed_at_ms: int
    """When the writer unmounted; 0: it did not, and may have written more than its log in the remote says."""
    clean: bool
    """It did, and the logs reach as far as it said then."""

    @property
    def gaps(self) -> list[str]:
        """Parts of the logs that are missing or damaged on the remote."""
        return [f"stream {s.stream_id}: {what}" for s in self.streams for what in s.missing]

    @property
    def whole(self) -> bool:
        broken = any(a.problem for a in self.audit)
        return not (self.lost or self.never_uploaded or self.gaps or broken)

    @property
    def complete(self) -> bool:
        return self.whole and self.clean


def restore(
    env: Env,
    store: RemoteStore,
    state_dir: Path,
    *,
    log_settings: LogSettings | None = None,
    map_bytes: int = MAP_BYTES,
    progress: Progress | None = None,
) -> RestoreReport:
    """Builds `state_dir` from what the remote holds. RestoreError, TransientError: nothing was changed."""
    tell = progress or (lambda _: None)
    _refuse_taken(state_dir)
    staging = state_dir.with_name(state_dir.name + STAGING_SUFFIX)
    if staging.exists():
        shutil.rmtree(staging)
    env.make_dirs(staging)
    try:
        report = _build(env, store, staging, log_settings or LogSettings(), map_bytes, tell)
    except Aof2Error:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    env.files.rename(staging, state_dir)
    env.failpoint("replicate.restore.named")
    env.files.fsync_dir(state_dir.parent)
    return msgspec.structs.replace(report, state_dir=str(state_dir))


def _refuse_taken(state_dir: Path) -> None:
    if not state_dir.exists():
        return
    if not state_dir.is_dir() or any(state_dir.iterdir()):
        raise RestoreError(f"{state_dir} is not empty; restore into a new folder, or remove what is there")
    if state_dir.is_mount():
        raise RestoreError(f"{state_dir} is a mount point; restore into a folder below it")


def _build(
    env: Env, store: RemoteStore, staging: Path, settings: LogSettings, map_bytes: int, tell: Progress
) -> RestoreReport:
    with Follower(env, store, staging, map_bytes=map_bytes, clear_residency=False) as follower:
        try:
            volume = follower.check_volume()
        except RemoteMissingError as e:
            raise RestoreError(str(e)) from None
        tell("reading the logs")
        streams = follower.catch_up()
        ended = {s.stream_id: last_ms(staging / "manifest" / str(s.stream_id)) for s in streams}
        for followed in streams:
            if followed.position and followed.remote_chunk_last > followed.position.chunk_index:
                # Behind a hole that nothing covers there are chunks whose names are taken: the log goes on after the
                # last of them. A snapshot at that place stands for everything before it, so neither replay nor a
                # follower misses the hole.
                start_behind(
                    env,
                    follower.catalog,
                    staging / "manifest" / str(followed.stream_id),
                    followed.stream_id,
                    chunk_index=followed.remote_chunk_last + 1,
                    ordinal=followed.position.ordinal,
                    snapshot_last=followed.remote_snapshot_last,
                    away=env.files.unlink,
                )
    env.failpoint("replicate.restore.followed")
    _require_root(streams)
    lost: list[Lost] = []
    rescued: list[str] = []
    checked = 0
    with _writing(env, staging, settings, map_bytes) as (opened, writer):
        with opened.catalog.view() as view:
            tenants = {tenant_id: row.name for tenant_id, row in view.scan(VOLUME_STREAM, t.TENANTS)}
        present = [tenant_id for tenant_id in tenants if tenant_id in opened.streams]
        for tenant_id in present:
            tell(f"checking what {tenants[tenant_id]} has on the remote")
            found = TenantSalvage(opened.catalog, writer, store, tenant_id, tenants[tenant_id]).run()
            lost += found.lost
            rescued += found.rescued
            checked += found.checked_blobs
    env.failpoint("replicate.restore.salvaged")
    audit = [restore_audit(env, store, staging, tenant_id, name) for tenant_id, name in tenants.items()]
    env.failpoint("replicate.restore.audited")
    log_ends = [
        LogEnd(
            stream_id=s.stream_id,
            tenant=tenants.get(s.stream_id, ""),
            at_ms=ended[s.stream_id],
            **s.position._asdict(),
        )
        for s in streams
        if s.position is not None
    ]
    return RestoreReport(
        volume_uuid=volume.volume_uuid,
        writer_epoch=volume.writer_epoch,
        state_dir=str(staging),
        streams=streams,
        tenants=sorted(tenants.values()),
        never_uploaded=sorted(name for tenant_id, name in tenants.items() if tenant_id not in present),
        lost=lost,
        rescued=rescued,
        checked_blobs=checked,
        audit=[a for a in audit if a is not None],
        log_ends=log_ends,
        closed_at_ms=volume.closed_at_ms,
        clean=_is_clean(volume, streams),
    )


def last_ms(directory: Path) -> int:
    """The time of the last record that was brought here, or of the snapshot that stands for all of them."""
    chunks = Stream(directory).chunks
    taken = local_snapshots(directory)
    newest_ms = taken[-1].created_ms if taken else 0
    if chunks:
        chunk = parse_chunk(chunks[-1].read(), path=str(chunks[-1].path), last=True, expect_index=chunks[-1].index)
        for record in chunk.records() if chunk is not None else ():
            newest_ms = max(newest_ms, record.timestamp_ms)
    return newest_ms


def _is_clean(volume: VolumeRecord, streams: list[StreamFollowed]) -> bool:
    found = {s.stream_id: s.position.ordinal for s in streams if s.position is not None}
    reached = all(found.get(stream_id, 0) >= ordinal for stream_id, ordinal in volume.closed_at.items())
    return bool(volume.closed_at_ms) and reached


def _require_root(streams: list[StreamFollowed]) -> None:
    """Only the volume's own log says which tenant a stream belongs to."""
    known = {s.stream_id: s for s in streams}
    root = known.get(VOLUME_STREAM)
    if streams and (root is None or root.position is None):
        why = "; ".join(root.missing) if root else "nothing of it was uploaded"
        raise RestoreError(f"the volume's own log (manifest/{VOLUME_STREAM}/) cannot be read: {why}")


@contextlib.contextmanager
def _writing(env: Env, staging: Path, settings: LogSettings, map_bytes: int) -> Iterator[tuple[Opened, CatalogWriter]]:
    """The restored catalog with its writer, closed cleanly."""
    opened = open_catalog(env, staging / "catalog", staging / "manifest", settings, map_bytes=map_bytes)
    writer = CatalogWriter(CatalogTarget(env, opened.catalog, opened.streams, None)).start()
    try:
        yield opened, writer
    except BaseException:
        writer.close()
        opened.catalog.abandon()
        raise
    writer.close()
    opened.catalog.close()


def restore_audit(env: Env, store: RemoteStore, staging: Path, tenant_id: int, tenant: str) -> AuditRestored | None:
    """The tenant's audit log as far as its ranges chain; what follows is derived again when the volume opens."""
    found = joined_ranges(store, tenant_id)
    if isinstance(found.problem, UnsupportedError):
        raise found.problem
    if found.data:
        path = audit_path(staging, tenant_id)
        env.make_dirs(path.parent)
        env.replace_file(path, found.data)
    elif found.problem is None:
        return None  # nothing of it was ever put
    return AuditRestored(tenant=tenant, records=found.last, problem=str(found.problem or ""))
