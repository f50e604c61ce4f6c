"""Opening a folder that follows: its mark, its rows as far as the remote has the log, its own logs.

    mark → rows (trusted, or replayed from the logs here) → the remote's logs, listed once → own logs

Of a volume that was made a moment ago the beginnings of its logs are waited for. A remote that is away does not keep a
follower from opening that has been here before: what is here is served.

Owner: the thread that opens the volume, under the folder's lock. A crash leaves a folder that opens again.
"""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.recovery import Opened
from aof2.engine.catalog.store import Catalog, discard, trusted
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.follow.mark import FollowerMark, ensure_mark
from aof2.engine.follow.ownlog import open_own
from aof2.engine.follow.ownrows import OwnRows
from aof2.engine.opening import VOLUME_STREAM
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.follow import LogFolder
from aof2.engine.settings import Settings

log = logging.getLogger(__name__)

FIRST_LOG_S: Final = 10.0  # for a new volume's first chunks
FIRST_LOG_LOOK_S: Final = 0.2


class Followed(NamedTuple):
    """What a mounted follower begins with. `away`: why the remote could not be asked."""

    opened: Opened
    folder: LogFolder
    own: OwnRows
    mark: FollowerMark
    away: str


def open_followed(env: Env, settings: Settings, remote: RemoteStore) -> Followed:
    """See the module's text. ReadOnlyError: the folder is a writer's. RemoteMissingError: no volume there."""
    state_dir = settings.volume.state_dir
    started_s = env.monotonic_s()
    mark = ensure_mark(env, state_dir)
    catalog = _open_rows(env, settings)
    opened = Opened(catalog)
    try:
        own = OwnRows()
        folder = LogFolder(env, remote, state_dir, catalog, own)
        folder.replay_all()
        away = _catch_up(folder)
        while not away and not _has_begun(catalog) and env.monotonic_s() < started_s + FIRST_LOG_S:
            time.sleep(FIRST_LOG_LOOK_S)
            away = _catch_up(folder)
        with catalog.view() as view:
            tenants = [tenant_id for tenant_id, _ in view.scan(VOLUME_STREAM, t.TENANTS)]
        if not tenants:
            raise RemoteMissingError("the remote has nothing of the volume's log yet; mount again once its writer has")
        for stream_id in tenants:
            opened.streams[stream_id] = open_own(env, catalog, state_dir, stream_id)
            own.take(stream_id)  # nothing was told to the kernel yet
    except BaseException:
        for stream in opened.streams.values():
            stream.log.close()
        catalog.abandon()
        raise
    opened.replay_s = env.monotonic_s() - started_s
    return Followed(opened, folder, own, mark, away)


def _has_begun(catalog: Catalog) -> bool:
    """Whether the remote has the beginning of each log: a writer that was mounted a moment ago puts one by one."""
    with catalog.view() as view:
        tenants = [tenant_id for tenant_id, _ in view.scan(VOLUME_STREAM, t.TENANTS)]
        return bool(tenants) and all(view.position(tenant_id) is not None for tenant_id in tenants)


def _open_rows(env: Env, settings: Settings) -> Catalog:
    directory = settings.volume.state_dir / "catalog"
    if not trusted(directory):
        discard(directory)
    try:
        return Catalog.open(env, directory)
    except CorruptError as e:
        log.warning("catalog is rebuilt", extra={"error": str(e)})
        discard(directory)
        return Catalog.open(env, directory)


def _catch_up(folder: LogFolder) -> str:
    """Why the remote could not be asked; "" where it was."""
    try:
        for done in folder.catch_up():
            for what in done.missing:
                log.warning("the log has a hole in the remote", extra={"stream_id": done.stream_id, "error": what})
    except TransientError as e:
        with folder.catalog.view() as view:
            if next(view.scan(VOLUME_STREAM, t.TENANTS), None) is None:
                raise  # there is nothing to serve
        log.warning("the remote is away; what is here is served", extra={"error": str(e)})
        return str(e)
    return ""
