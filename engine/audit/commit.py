"""How several records become durable together: the last bytes written are part of the first record's logseq.

A batch is written whole but for its commit bytes, which stay zero, and synced; then the commit bytes are written and
synced. They are the first record's logseq, or, where its 8 bytes lie across two sectors, the part in one sector that is
not zero. So the disk changes from "no batch" to "batch" in the write of one sector, which it does whole or not at all,
and no state in between needs a field of its own: the log's bytes are what ENC/ASL-LOG/1 says.

Invariants
- The commit bytes of a whole batch are never all zero (logseq starts at 1), so zero there means: not committed.
- The file grows to hold the batch in one step before it is written, so no size in between is ever found.
- A batch is at most BATCH_BYTES_MAX long: what lies further behind a missing logseq was acknowledged once.
- A batch that is whole but for its commit bytes can be completed: no caller was told it failed, and its hashes prove
  what the missing bytes are.

Owner: pure functions, any thread. A crash leaves what `is_pending` recognises; writer.py completes or trims it.
"""

from __future__ import annotations

import struct

SECTOR_BYTES = 512
BATCH_BYTES_MAX = 4 << 20
LOGSEQ_BYTES = 8

_U64 = struct.Struct("<Q")


def commit_slice(offset: int, logseq: int) -> slice:
    """Which of the 8 bytes of the logseq at `offset` are written last."""
    first = SECTOR_BYTES - offset % SECTOR_BYTES
    if first >= LOGSEQ_BYTES:
        return slice(0, LOGSEQ_BYTES)
    return slice(0, first) if any(_U64.pack(logseq)[:first]) else slice(first, LOGSEQ_BYTES)


def is_pending(field: bytes, offset: int, logseq: int) -> bool:
    """Whether `field`, found at `offset` where `logseq` is due, is what an uncommitted batch may have left there.

    A field cut short by the end of the file counts as if zeros followed.
    """
    due = _U64.pack(logseq)
    found = field[:LOGSEQ_BYTES].ljust(LOGSEQ_BYTES, b"\0")
    last = commit_slice(offset, logseq)
    if any(found[last]):
        return False
    if last.start:
        return found[: last.start] in (due[: last.start], bytes(last.start))
    return found[last.stop :] in (due[last.stop :], bytes(LOGSEQ_BYTES - last.stop))
