"""What a mounted volume shows of itself: the facts behind `aof2 status`, and the files of `.aof2/` in the mount.

Everything here reads, and may be called from any thread; counting a large volume takes a while, so the daemon calls it
on a worker thread. `light` answers may be as old as COUNTED_FOR_S, or twenty times what counting took.

Owner: the calling thread. A crash leaves nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from aof2.engine import pins
from aof2.engine.inspect.paths import resolve
from aof2.engine.inspect.records import payload_of, raw_payload, record_object
from aof2.engine.inspect.status import VolumeStatus, object_status, tree_status, volume_status
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import ManifestIntegrityError
from aof2.engine.volume import Volume
from aof2.fs.control.facts import MountStatus
from aof2.fs.control.mounted import Mounted

COUNTED_FOR_S: Final = 2.0


def facts(mounted: Mounted, path: str | None = None, light: bool = False) -> dict[str, Any]:
    """The `volume`, a `tree` or an `object`, as the rows say; beside it what only a daemon knows. NoSuchPathError when
    there is nothing of that name."""
    volume = mounted.volume
    with volume.catalog.view() as view:
        place = resolve(view, mounted.mountpoint, path) if path is not None else None
        if place is not None and not place.is_file:
            return {"tree": tree_status(view, volume.settings, place, volume.replication)}
        if place is not None:
            return {
                "object": object_status(view, volume.settings, place, volume.replication),
                "open": mounted.kinds.is_open(place.inode.ino),
                "pinned": pins.is_pinned(view, place.tenant_id, place.inode.ino),
            }
    return {"volume": _count(volume, light=light), "mount": mount_status(mounted)}


_counted: WeakKeyDictionary[Volume, tuple[float, VolumeStatus]] = WeakKeyDictionary()  # good until, what


def _count(volume: Volume, *, light: bool) -> VolumeStatus:
    good_until_s, known = _counted.get(volume, (0.0, None))
    started_s = time.monotonic()
    if light and known is not None and started_s < good_until_s:
        return msgspec.structs.replace(known, replication=volume.replication.lags(volume.tenant_names()))
    with volume.catalog.view() as view:
        found = volume_status(
            view, volume.settings, live=True, now_ms=volume.env.now_ms(), replication=volume.replication
        )
    took_s = time.monotonic() - started_s
    _counted[volume] = (time.monotonic() + max(COUNTED_FOR_S, 20 * took_s), found)
    return found


def mount_status(mounted: Mounted) -> MountStatus:
    volume, kinds = mounted.volume, mounted.kinds
    unsealed, pages, remote = kinds.unsealed(), volume.pages, volume.remote.stats()
    with volume.catalog.view() as view:
        held = [size for tenant_id in volume.tenant_names() for _, size in pins.pinned(view, tenant_id)]
    return MountStatus(
        mountpoint=str(mounted.mountpoint),
        pid=os.getpid(),
        started_ms=mounted.started_ms,
        read_only=mounted.options.ro or not volume.target.enabled or bool(volume.read_only_reason),
        read_only_why=volume.read_only_reason,
        fenced=bool(volume.fenced),
        **kinds.way()._asdict(),
        transport=mounted.channel.transport,
        open_files=kinds.open_count(),
        handed_over=mounted.channel.handed_over,
        unsealed_files=unsealed.files,
        unsealed_bytes=unsealed.bytes,
        pinned_files=len(held),
        pinned_bytes=sum(held),
        page_cache_bytes=pages.used_bytes,
        page_cache_limit_bytes=volume.settings.cache.page_cache_bytes,
        page_cache_hits=pages.hits,
        page_cache_misses=pages.misses,
        hydrated_bytes=volume.hydrator.fetched_bytes,
        evictions=volume.evictor.evictions,
        evicted_bytes=volume.evictor.evicted_bytes,
        thrash=int(volume.metrics.thrash_total.value),
        remote_state=remote.breaker,
        remote_sent_bytes=remote.bytes_sent,
        remote_received_bytes=remote.bytes_received,
        remote_errors=remote.unavailable,
        remote_refused=remote.refused,
        refused_since_ms=remote.refusal.since_ms if remote.refusal is not None else None,
        refused_why=remote.refusal.why if remote.refusal is not None else "",
        mended_log_files=sum(map(len, volume.opened.mended.values())) + volume.replicator.mended_files,
        unknown_events=volume.opened.unknown_events,
        follow=volume.following.status() if volume.following is not None else None,
        followers=volume.followers.facts(volume.log_ends(volume.tenant_names())) if volume.replicating else [],
    )


# -- .aof2/ --------------------------------------------------------------------------------------------------------


def status_json(mounted: Mounted) -> bytes:
    """`.aof2/status.json`: what `aof2 status --json` prints, at most a little old."""
    found = facts(mounted, light=True)
    return msgspec.json.encode({**msgspec.structs.asdict(found["volume"]), "mount": found["mount"]}) + b"\n"


def manifest_jsonl(mounted: Mounted, tenant: str) -> Iterator[bytes]:
    """`.aof2/manifest/<tenant>.jsonl`: the log on this disk, a line a record. ObjectGoneError: no such tenant."""
    folder = mounted.volume.manifest_dir / str(mounted.volume.tenants.named(tenant).tenant_id)
    for examined in examine(survey(folder)):
        for record in examined.chunk.records() if examined.chunk else ():
            try:
                payload = payload_of(record)
            except ManifestIntegrityError:  # `aof2 manifest verify` says more
                payload = raw_payload(record)
            yield msgspec.json.encode(record_object(record, payload)) + b"\n"
