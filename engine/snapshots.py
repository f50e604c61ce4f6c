"""Snapshots that users take: a moment of a tenant that retention keeps until the snapshot is deleted.

    everything sealed is in the remote → row (from here on it pins) → the tree as of that commit, as JSON, in the remote

A snapshot has no row a file: a generation is pinned when it was the file's published content at the snapshot's moment
(`pinned`), which its rows say. So taking one costs a walk and one object, and prunes look at the times alone. The JSON
(`snapshots/{tenant}/{id}/meta-{sha256}.json`) lists every name with inode, generation, size, hash, owner, mode and
times: what there was, where `generations`, `revert` and `undelete` bring it back from.

Invariants
- From the commit of its row on, nothing that was published and current then is released.
- The row names the JSON only once the remote has it; without that, the snapshot pins, and says that it is not complete.

Owner: changes are the catalog's writer thread's; the walk is a worker thread's, over one view of exactly that commit.
A crash leaves a snapshot without JSON (list says so; delete it), or, while one is deleted, a JSON that no row names.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow, ObjectRow, ObjectState, SnapshotRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.namespace import root_ino


class NoSuchSnapshotError(Aof2Error):
    """The tenant has no snapshot of that number. See `aof2 snapshot list`."""


# -- rows ----------------------------------------------------------------------------------------------------------


def take(b: Batch, name: str) -> SnapshotRow:
    """The moment is that of this commit."""
    row = SnapshotRow(b.next_id("snapshot_id"), name, b.now_ms)
    b.put(t.SNAPSHOTS, row.snapshot_id, row)
    return row


def complete(b: Batch, snapshot_id: int, *, key: str, files: int, size_bytes: int) -> SnapshotRow:
    """Its JSON is in the remote."""
    row = msgspec.structs.replace(get(b, snapshot_id), key=key, files=files, size_bytes=size_bytes)
    b.put(t.SNAPSHOTS, snapshot_id, row)
    return row


def delete(b: Batch, snapshot_id: int) -> SnapshotRow:
    """It pins nothing any more."""
    row = get(b, snapshot_id)
    b.delete(t.SNAPSHOTS, snapshot_id)
    return row


def get(b: Batch, snapshot_id: int) -> SnapshotRow:
    row = b.get(t.SNAPSHOTS, snapshot_id)
    if row is None:
        raise NoSuchSnapshotError(f"there is no snapshot {snapshot_id}; aof2 snapshot list shows those there are")
    return row


def moments(view: View, stream_id: int) -> list[int]:
    return [row.taken_ms for _, row in view.scan(stream_id, t.SNAPSHOTS)]


def pinned(rows: Sequence[ObjectRow], taken_ms: Collection[int]) -> set[int]:
    """Of one inode's generations, those that were its published content at one of these moments."""
    kept: set[int] = set()
    for moment in taken_ms:
        then = [row for row in rows if row.published_ms and row.published_ms <= moment]
        newest = max(then, key=lambda row: row.generation, default=None)
        if newest is not None and (not newest.tombstoned_ms or newest.tombstoned_ms > moment):
            kept.add(newest.generation)
    return kept


# -- the tree ------------------------------------------------------------------------------------------------------


class Tree(msgspec.Struct, frozen=True):
    """The JSON on the local disk."""

    sha256: bytes
    length: int
    files: int
    size_bytes: int


def write_tree(view: View, tenant_id: int, tenant: str, row: SnapshotRow, path: Path) -> Tree:
    """The tenant's names as the view has them, a line each. Blocks."""
    digest, files, size_bytes, length = hashlib.sha256(), 0, 0, 0
    with open(path, "wb") as out:
        head = {"tenant": tenant, "snapshot_id": row.snapshot_id, "name": row.name, "taken_ms": row.taken_ms}
        length += _line(out, digest, head)
        for entry in _entries(view, tenant_id, row.taken_ms):
            length += _line(out, digest, entry)
            if "generation" in entry:
                files, size_bytes = files + 1, size_bytes + entry["size"]
        out.flush()
        os.fsync(out.fileno())
    return Tree(digest.digest(), length, files, size_bytes)


def _line(out: Any, digest: Any, value: dict[str, Any]) -> int:
    data = msgspec.json.encode(value) + b"\n"
    digest.update(data)
    out.write(data)
    return len(data)


def _entries(view: View, tenant_id: int, taken_ms: int) -> Iterator[dict[str, Any]]:
    stack = [(root_ino(tenant_id), b"")]
    while stack:
        parent, above = stack.pop()
        for (_, name), dentry in view.scan(tenant_id, t.DENTRIES, prefix=t.DENTRIES.pack_key((parent, b""))):
            inode = view.get(tenant_id, t.INODES, dentry.ino)
            if inode is None:
                continue
            path = above + name
            yield _entry(view, tenant_id, inode, path, taken_ms)
            if stat.S_ISDIR(inode.mode):
                stack.append((inode.ino, path + b"/"))


def _entry(view: View, tenant_id: int, inode: InodeRow, path: bytes, taken_ms: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": path.decode(errors="backslashreplace"),
        "ino": inode.ino,
        "mode": inode.mode,
        "uid": inode.uid,
        "gid": inode.gid,
        "mtime_ns": inode.mtime_ns,
    }
    if inode.target:
        entry["target"] = inode.target.decode(errors="backslashreplace")
    if stat.S_ISREG(inode.mode):
        rows = [row for _, row in view.scan(tenant_id, t.OBJECTS, prefix=inode.ino.to_bytes(8, "big"))]
        kept = pinned(rows, [taken_ms])
        for row in rows:
            if row.generation in kept and row.state != ObjectState.DIRTY:
                entry |= {"generation": row.generation, "size": row.size, "sha256": row.sha256.hex()}
    return entry
