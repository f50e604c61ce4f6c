"""Which way rows go: through a mount on this machine that writes, or through the inbox.

    remote, tenant or as = "parquet" given        the inbox
    staging given                                 the mount
    neither                                       the mount, where conf names one that answers as the writer's, else
                                                  the inbox

Decided once a job, by the driver, before a row is read.

Owner: pure but for the questions. Crash: nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inbox.job import read_door
from aof2.engine.remote.open import open_remote
from aof2.engine.settings import Settings
from aof2.engine.settings.loader import load_settings
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.spark.by_inbox import InboxWay
from aof2.engine.spark.by_mount import MountWay
from aof2.engine.spark.deliver import CONTROL_NAME, DeliveryError, ask, conf_path
from aof2.engine.spark.options import What, WriteOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

MOUNTPOINT = Path("/aof2")  # where no conf says another


class Way(Protocol):
    """How rows get in. Tasks have a copy of it."""

    def begin(self, job: str) -> None: ...

    def stage(self, batches: Iterator[pa.RecordBatch], schema: StructType, job: str) -> WriterCommitMessage:
        """A task's rows are where `commit` finds them."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], job_id: str, *, overwrite: bool) -> None:
        """All of them are there when this returns, once, however often it is asked for."""

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What these staged goes."""

    def end(self, job: str) -> None: ...


def way_of(options: WriteOptions) -> Way:
    if options.staging:
        return MountWay(options)
    named = conf_path(options.conf)
    settings = load_settings(named) if not options.remote and named.exists() else None
    if settings is None and not options.remote:
        if options.names_inbox:
            raise DeliveryError(f"{named}: no mount.conf here; name one by option conf, or the remote by option remote")
        return MountWay(options)
    control = _writer(settings) if settings is not None else None
    if control is not None and not options.names_inbox:
        return MountWay(options)
    return _inbox(options, settings, control)


def _writer(settings: Settings) -> Path | None:
    """The control socket of a daemon of this machine that writes the volume."""
    control = settings.volume.state_dir / CONTROL_NAME
    try:
        return control if control.exists() and ask(control, verb="inbox", look=False)["writes"] else None
    except (Aof2Error, KeyError, OSError):
        return None


def _inbox(options: WriteOptions, settings: Settings | None, control: Path | None) -> InboxWay:
    mountpoint = settings.volume.mountpoint if settings is not None else MOUNTPOINT
    tenant, to = place_of(options.path, mountpoint, options.tenant)
    remote = settings.remote if settings is not None else RemoteSettings(url=options.remote)
    if options.remote:
        remote = RemoteSettings(url=options.remote, endpoint_url=options.endpoint_url, region=options.region)
    store = open_remote(Env(), remote)
    try:
        door = read_door(store, tenant)
    finally:
        store.close()
    wanted = "append" if options.what is What.RECORDS else "files"
    if door.kind != wanted:
        raise ValueError(
            f'tenant {tenant} is of kind {door.kind}: records go into one of kind append, as = "parquet" into files'
        )
    return InboxWay(remote, door, to, options.what, options.partition_by, options.deadline_s, control)


def place_of(path: str, mountpoint: Path, tenant: str) -> tuple[str, str]:
    """The tenant, and the path in it, of a path in the mount; with a tenant, a relative one is below that."""
    parts, root = Path(path).parts, mountpoint.parts
    if parts[: len(root)] == root and len(parts) > len(root):
        inside = parts[len(root) :]
        if not tenant:
            return inside[0], "/".join(inside[1:])
        if inside[0] == tenant:
            return tenant, "/".join(inside[1:])
    if tenant and not path.startswith("/"):
        return tenant, path.strip("/")
    below = mountpoint / tenant
    raise ValueError(f"{path}: not below {below}; name a path there, or, with option tenant, one relative to that")
