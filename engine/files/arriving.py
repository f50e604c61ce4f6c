"""Files that come by the inbox: names, inodes and objects of a job, in one commit; their bytes stay in the remote.

    target directory, made where it is not there → overwrite: what is below it goes → directories, files → the job's row

Invariants
- All files of a job are there, or none; who lists the directory sees it before or after.
- Where a job overwrites, what was there goes as unlink and rmdir take it: readers keep what they have open, the rest
  becomes tombstones.
- A job that was published is answered from its row, and changes nothing.

Owner: `publish` is the catalog thread's, for the length of a batch; `take_in` the trio thread's. A crash leaves the
tree before or after the job.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from aof2.engine import delivered, namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DeliveryRow, InodeRow
from aof2.engine.errors import os_error
from aof2.engine.inbox.check import CheckedJob
from aof2.engine.inbox.format import RefusedError, split_path
from aof2.engine.kinds.kernel import KernelGoneError
from aof2.engine.namespace import nodes

if TYPE_CHECKING:
    from aof2.engine.files.kind import FilesKind

CRASH_POINTS: Final = ("inbox.files.published",)
_WHY: Final = {
    errno.EEXIST: "there is something of that name; deliver with mode overwrite, or elsewhere",
    errno.ENOTDIR: "not a directory",
    errno.EMLINK: "the directory is full",
}


class Gone(NamedTuple):
    """A name that went, and the inode as it was then."""

    parent: int
    name: bytes
    row: InodeRow


class Published(NamedTuple):
    row: DeliveryRow
    gone: list[Gone]
    made: list[tuple[int, bytes]]


async def take_in(kind: FilesKind, tenant_id: int, job: CheckedJob) -> DeliveryRow:
    """See `Kind.take_in`."""
    volume = kind.volume
    kind.stop_ahead()
    await kind.kernel.caught_up()
    await kind.fold()
    work = partial(publish, job=job, chunk_bytes=volume.settings.engine.chunk_bytes, is_open=kind.files.known.must_stay)
    done: Published = await result_of(volume.writer.submit(tenant_id, work, sync=True))
    volume.env.failpoint("inbox.files.published")
    for gone in done.gone:
        kind.went(gone.row)
    with contextlib.suppress(KernelGoneError):
        for parent, name in (*((gone.parent, gone.name) for gone in done.gone), *done.made):
            kind.kernel.invalidate_entry(parent, name)
            kind.kernel.invalidate_attr(parent)
    return done.row


def publish(b: Batch, job: CheckedJob, *, chunk_bytes: int, is_open: namespace.IsOpen) -> Published:
    """RefusedError: why none of it can be there."""
    before = b.get(t.DELIVERIES, job.job_id)
    if before is not None:
        return Published(before, [], [])
    done = Published(DeliveryRow(b.now_ms), [], [])
    try:
        target = _folder(b, namespace.root_ino(b.stream_id), split_path(job.to), done)
        if job.overwrite:
            _empty(b, target, is_open, done)
    except OSError as e:
        raise RefusedError(f"{job.to}: {_why(e)}") from None
    checkpoint_id = delivered.begin_job(b)
    last = 0
    for one in job.files:
        *above, name = split_path(one.path)
        try:
            parent = _folder(b, target, tuple(above), done)
            made = namespace.bring(b, parent, name, like=nodes.directory(b, parent), size=one.size)
        except OSError as e:
            raise RefusedError(f"{job.to}/{one.path}: {_why(e)}") from None
        done.made.append((parent, name))
        row = delivered.make_object(
            b, made.ino, one.sha256, one.chunks, chunk_bytes=chunk_bytes, checkpoint_id=checkpoint_id
        )
        last = max(last, *row.chunks, 0)
    delivered.drop_unnamed(b, (chunk for one in job.files for chunk in one.chunks), last)
    row_of_job = DeliveryRow(b.now_ms, files=len(job.files), size_bytes=sum(one.size for one in job.files))
    b.put(t.DELIVERIES, job.job_id, row_of_job)
    return done._replace(row=row_of_job)


def _why(e: OSError) -> str:
    return _WHY.get(e.errno or 0) or (e.strerror or "").lower()


def _folder(b: Batch, at: int, parts: tuple[bytes, ...], done: Published) -> int:
    """The directory below `at`; what of it is not there is made, like the one above it. ENOTDIR."""
    for name in parts:
        entry = nodes.get_entry(b, at, name)
        if entry is None:
            above = nodes.directory(b, at)
            made = namespace.mkdir(b, at, name, mode=stat.S_IMODE(above.mode), uid=above.uid, gid=above.gid)
            done.made.append((at, name))
            at = made.ino
        elif stat.S_ISDIR(entry.mode):
            at = entry.ino
        else:
            raise os_error(errno.ENOTDIR, name)
    return at


def _empty(b: Batch, directory: int, is_open: namespace.IsOpen, done: Published) -> None:
    """All below it goes, what is deepest first. Rows are scanned as they were before the batch: a directory that was
    made in it has none."""
    prefix = t.DENTRIES.pack_key((directory, b""))
    for (_, name), entry in list(b.scan(t.DENTRIES, prefix=prefix)):
        if not stat.S_ISDIR(entry.mode):
            done.gone.append(Gone(directory, name, namespace.unlink(b, directory, name, is_open=is_open)))
            continue
        _empty(b, entry.ino, is_open, done)
        row = msgspec.structs.replace(nodes.get_inode(b, entry.ino), nlink=0, parent=directory, last_name=name)
        b.delete(t.DENTRIES, (directory, name))
        nodes.erase(b, entry.ino)
        nodes.touch(b, directory, links=-1)
        done.gone.append(Gone(directory, name, row))
