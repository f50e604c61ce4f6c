"""What opening a volume takes, apart from the volume itself: its lock, its sizes, its settings as the parts want them.

Owner: called by `open_volume`, once each. A crash leaves nothing: the lock goes with the process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.recovery import Opened, open_stream
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, ReadOnlyError, TransientError
from aof2.engine.local.disk import METADATA_BYTES
from aof2.engine.local.reserve import FOLDER as RESERVE_FOLDER
from aof2.engine.local.reserve import Reserve
from aof2.engine.manifest.quarantine import read_quarantine
from aof2.engine.manifest.writer import LogSettings
from aof2.engine.remote.fence import Fence, read_volume
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import look
from aof2.engine.replicate.mend import RemoteMender
from aof2.engine.replicate.stale import take_checked_claim
from aof2.engine.settings import Settings

log = logging.getLogger(__name__)

VOLUME_STREAM = 0
RESERVE_LOOK_S = 2.0
RESERVE_INODES_KEPT = 32
# What a start makes for itself: a socket, a probe, intent logs.
START_INODES = 8
START_BYTES = 1 << 20
# How long opening waits for a remote to say whose volume it is; past it the claim is made when the remote answers.
LOOK_MAX_S = 5.0


def log_settings(settings: Settings) -> LogSettings:
    m = settings.manifest
    return LogSettings(
        chunk_capacity=m.chunk_capacity_bytes, rotation_period_ms=m.rotation_period_ms, durable=m.durable
    )


def ensure_volume_stream(env: Env, opened: Opened, settings: Settings) -> None:
    """The volume's own stream. Damaged, it does for a volume whose tenants are known: no new ones can be made."""
    if VOLUME_STREAM in opened.quarantined:
        with opened.catalog.view() as view:
            if next(view.scan(VOLUME_STREAM, t.TENANTS), None) is not None:
                return
        error = opened.quarantined[VOLUME_STREAM]
        raise ReadOnlyError(
            f"the volume's own log is damaged and names no tenant ({error}); mount again when the remote answers, "
            "or use `aof2 restore --from URL` with a fresh state_dir"
        )
    if VOLUME_STREAM not in opened.streams:
        opened.streams[VOLUME_STREAM] = open_stream(
            env, opened.catalog, settings.volume.state_dir / "manifest", log_settings(settings), VOLUME_STREAM
        )


def find_mender(env: Env, settings: Settings, remote: RemoteStore) -> RemoteMender | None:
    """What mends damaged logs while the volume opens; None where the remote is away, or is not ours to learn from."""
    state_dir = settings.volume.state_dir
    try:
        standing = look(remote, state_dir, timeout_s=min(LOOK_MAX_S, settings.remote.timeout_s))
    except Aof2Error:
        return None  # the claim says what there is to say
    if standing.known is None:
        return None
    return RemoteMender(env, remote, state_dir)


def damage_of(opened: Opened, manifest_dir: Path) -> dict[int, str]:
    """Streams that take no writes, and what is wrong with each."""
    found: dict[int, str] = {}
    for stream_id, error in opened.quarantined.items():
        mark = read_quarantine(manifest_dir / str(stream_id))
        found[stream_id] = f"its log is damaged: {mark.text if mark is not None else error}"
    return found


def claim_now(env: Env, settings: Settings, remote: RemoteStore, opened: Opened) -> Fence | None:
    """The claim on the remote, made before anything of the volume is served; None: the remote is away.

    StaleError: this state folder is behind its remote, or parted from it. Nothing was claimed.
    """
    try:
        read_volume(remote, timeout_s=min(LOOK_MAX_S, settings.remote.timeout_s))
        return take_checked_claim(env, remote, opened.catalog, settings.volume.state_dir)
    except TransientError as e:
        log.info("the remote is away; the volume is claimed when it answers", extra={"error": str(e)})
        return None


def close_unused(opened: Opened) -> None:
    """Lets go of what was opened for a volume that does not come up; nothing of it was changed."""
    for stream in opened.streams.values():
        stream.log.close()
    opened.catalog.close()


def lock_state_dir(state_dir: Path, taken: str = "another aof2 process has this volume open; stop it first") -> int:
    """The descriptor whose end is the lock's; ReadOnlyError says what is `taken` when another process has it."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(state_dir, os.R_OK | os.W_OK | os.X_OK):
        raise ReadOnlyError(f"{state_dir}: this user cannot write there; a volume needs its state_dir writable")
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno != errno.EWOULDBLOCK:
            raise
        raise ReadOnlyError(f"{state_dir}: {taken}") from None
    return fd


def open_reserve(env: Env, settings: Settings) -> Reserve | None:
    """What is kept back for removing and unmounting on a full disk; filled here where there is room."""
    if not settings.manifest.enabled:
        return None  # such a volume writes nothing
    folder = settings.volume.state_dir / RESERVE_FOLDER
    reserve = Reserve(env.files, folder, settings.manifest.chunk_capacity_bytes)
    reserve.open()
    reserve.fill(keep_bytes=METADATA_BYTES, keep_inodes=RESERVE_INODES_KEPT)
    reserve.loosen(inodes=START_INODES, size_bytes=START_BYTES)
    return reserve


async def keep_reserve(reserve: Reserve) -> None:
    """What was given is taken back when the disk has room again."""
    fill = partial(reserve.fill, keep_bytes=2 * METADATA_BYTES, keep_inodes=2 * RESERVE_INODES_KEPT)
    while True:
        await trio.sleep(RESERVE_LOOK_S)
        if not reserve.is_whole:
            await trio.to_thread.run_sync(fill)


def ignore_lease_breaks() -> None:
    """A lease that is broken while we ask for it sends SIGIO, whose default is to end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGIO, signal.SIG_IGN)
