"""An audit log made whole again: from its ranges on the remote, or from what of it still chains; the longer one.

The ranges joined are a prefix of the file, byte for byte. What is behind the longer of the two is derived again from
the manifest log, or from the rows, when the volume opens (`replicate.audit`).

Invariants
- The old file is kept in `state_dir/quarantine/audit/`. The new one gets its name whole.
- Never shorter than what the remote has whole: a record that was put there is not made a second time, differently.

Owner: the tenant's upload task, or repair. A crash leaves the old file, or none and its kept copy, or the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.audit.format import encode_header
from aof2.engine.audit.ranges import replay_ranges
from aof2.engine.audit.reader import Replay
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest.gone import set_aside
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import RemoteStore

log = logging.getLogger(__name__)

AUDIT_DIR: Final = "audit"


def audit_path(state_dir: Path, tenant_id: int) -> Path:
    return state_dir / AUDIT_DIR / f"{tenant_id}.asl"


def rebuild_audit(env: Env, store: RemoteStore | None, state_dir: Path, tenant_id: int) -> int:
    """Puts the longest whole log in place; its last logseq. TransientError: the remote cannot be asked."""
    path = audit_path(state_dir, tenant_id)
    here, last_here = whole_prefix(path)
    there = joined_ranges(store, tenant_id) if store is not None else Joined(b"", 0, None)
    is_longer = there.last > last_here
    data, last = (there.data, there.last) if is_longer else (here, last_here)
    env.make_dirs(path.parent)
    kept = str(set_aside(env, state_dir, AUDIT_DIR, path)) if path.exists() else ""
    env.replace_file(path, data or encode_header())
    log.info(
        "audit log rebuilt",
        extra={"tenant_id": tenant_id, "from_remote": is_longer, "last_logseq": last, "kept": kept},
    )
    return last


def whole_prefix(path: Path) -> tuple[bytes, int]:
    """The bytes of the log up to where its chain breaks, and the last logseq among them."""
    if not path.exists():
        return b"", 0
    end = last = 0
    try:
        for record in Replay(path):
            end, last = record.end, record.logseq
    except (CorruptError, UnsupportedError):
        pass
    return path.read_bytes()[:end], last


class Joined(NamedTuple):
    """The ranges on the remote as far as they chain: their bytes, the last logseq among them, and what ends them."""

    data: bytes
    last: int
    problem: CorruptError | UnsupportedError | RemoteMissingError | None


def range_starts(store: RemoteStore, tenant_id: int) -> list[int]:
    """The first logseq of each range on the remote."""
    parsed = (keys.parse_key(info.key) for info in store.list(f"audit/{tenant_id}/"))
    return sorted(k.first_logseq for k in parsed if isinstance(k, keys.AuditRangeKey))


def joined_ranges(store: RemoteStore, tenant_id: int) -> Joined:
    good: list[bytes] = []
    last = pending = 0
    problem = None

    def parts() -> Iterator[tuple[int, bytes]]:
        nonlocal last
        for first in range_starts(store, tenant_id):
            _, data = store.get_blob(keys.audit_range_key(tenant_id, first))
            yield first, data
            good.append(data)  # asked for the next one: this one was whole
            last = pending

    try:
        for record in replay_ranges(parts()):
            pending = record.logseq
    except (CorruptError, UnsupportedError, RemoteMissingError) as e:
        problem = e
    return Joined(b"".join(good), last, problem)
