"""What to make of bytes that do not continue the chain: a torn tail may be cut off, broken history may not.

Where a record fails, one of these is so:
- UNCOMMITTED: its logseq is missing as an uncommitted batch leaves it, and with the logseq put back every record up to
  the end verifies. The batch is whole; a writer completes it. (One damaged logseq looks the same, and is mended by it.)
- TORN: nothing valid follows. The last append never finished; a writer trims it.
- otherwise history is damaged: ChainBrokenError. A record valid in itself follows (its hash verifies with the 32 bytes
  before it as the previous hash), or the next one continues the hash that this one should have had. A damaged length
  in the middle must not pass for a torn tail: trimming there would silently drop acknowledged records.

Behind a missing logseq valid records are no proof of damage (they may be the uncommitted batch's own) unless they lie
further away than a batch is long.

Invariants
- The search reads what is left once; what it hashes is bounded by SEARCH_FACTOR times that. Bytes made to look like
  endless records exhaust the budget, and count as broken: never trim on a guess.

Owner: the thread that replays. Reads only.
"""

from __future__ import annotations

import hashlib
import re
import struct
from enum import Enum
from typing import NamedTuple

from aof2.engine.audit.commit import BATCH_BYTES_MAX, LOGSEQ_BYTES, is_pending
from aof2.engine.audit.format import (
    ENVELOPE,
    HASH_BYTES,
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES_MIN,
    ChainBrokenError,
)
from aof2.engine.audit.source import WINDOW_BYTES, Source

SEARCH_FACTOR = 4
SEARCH_BYTES_MIN = 1 << 20

_U64 = struct.Struct("<Q")


class Tail(Enum):
    """How a log ends."""

    CLEAN = "clean"
    UNCOMMITTED = "uncommitted"
    TORN = "torn"


class Checked(NamedTuple):
    """One envelope with its true hash, which may or may not be the stored one. `payload` is None where it is longer
    than that of any known type."""

    logseq: int  # as it is stored
    record_type: int
    payload: bytes | None
    computed: bytes
    stored: bytes
    end: int


def check_at(source: Source, offset: int, logseq: int, prev_hash: bytes) -> Checked | None:
    """The record at `offset` hashed as if its logseq were `logseq`; None when it runs past the end."""
    if offset + RECORD_BYTES_MIN > source.size:
        return None
    buffer, i = source.window(offset, ENVELOPE.size)
    found, record_type, payload_len = ENVELOPE.unpack_from(buffer, i)
    length = RECORD_BYTES_MIN + payload_len
    end = offset + length
    if end > source.size:
        return None
    before = prev_hash + _U64.pack(logseq)
    if payload_len > PAYLOAD_BYTES_MAX:
        tail = offset + LOGSEQ_BYTES
        computed = source.sha256(before, tail, end - HASH_BYTES - tail)
        return Checked(found, record_type, None, computed, source.read(end - HASH_BYTES, HASH_BYTES), end)
    buffer, i = source.window(offset, length)
    hash_at = i + length - HASH_BYTES
    computed = hashlib.sha256(before + buffer[i + LOGSEQ_BYTES : hash_at]).digest()
    payload = buffer[i + ENVELOPE.size : hash_at]
    return Checked(found, record_type, payload, computed, buffer[hash_at : hash_at + HASH_BYTES], end)


def classify(source: Source, offset: int, logseq: int, prev_hash: bytes) -> Tail:
    """Why the record due as `logseq` at `offset` does not verify: UNCOMMITTED, TORN, or ChainBrokenError."""
    if is_pending(source.read(offset, LOGSEQ_BYTES), offset, logseq):
        if _whole_batch(source, offset, logseq, prev_hash):
            return Tail.UNCOMMITTED
        search_from = offset + BATCH_BYTES_MAX
        what = "its logseq is missing, and more than one batch follows"
    else:
        this = check_at(source, offset, logseq, prev_hash)
        if this is not None:
            after = check_at(source, this.end, logseq + 1, this.computed)
            if after is not None and after.computed == after.stored:
                raise ChainBrokenError("its stored hash is damaged", logseq=logseq, offset=offset, path=source.path)
        search_from = offset + 1
        what = "it does not verify, and valid records follow"
    found = find_valid(source, search_from, logseq, offset)
    if found is not None:
        raise ChainBrokenError(f"{what} (from {found})", logseq=logseq, offset=offset, path=source.path)
    return Tail.TORN


def _whole_batch(source: Source, offset: int, logseq: int, prev_hash: bytes) -> bool:
    if source.size - offset > BATCH_BYTES_MAX:
        return False
    first = True
    while offset < source.size:
        this = check_at(source, offset, logseq, prev_hash)
        if this is None or this.computed != this.stored:
            return False
        if not first and this.logseq != logseq:
            return False
        first = False
        offset, logseq, prev_hash = this.end, logseq + 1, this.stored
    return True


def find_valid(source: Source, search_from: int, logseq: int, broken_at: int) -> int | None:
    """The first offset from `search_from` where a record after `logseq` verifies with the 32 bytes before it.

    Its logseq can be at most as many ahead as records fit between `broken_at` and the end. ChainBrokenError when the
    budget ran out first.
    """
    remaining = source.size - broken_at
    least, most = logseq + 1, logseq + remaining // RECORD_BYTES_MIN
    stop = source.size - RECORD_BYTES_MIN + 1
    budget = SEARCH_FACTOR * remaining + SEARCH_BYTES_MIN
    pattern = _plausible(least, most)
    at = max(search_from, broken_at + 1, HASH_BYTES)
    while at < stop and least <= most:
        count = min(WINDOW_BYTES, stop - at)
        buffer = source.read(at, count + ENVELOPE.size - 1)
        for match in pattern.finditer(buffer):
            i = match.start()
            if i >= count:
                break
            seq, _, payload_len = ENVELOPE.unpack_from(buffer, i)
            if not least <= seq <= most or at + i + RECORD_BYTES_MIN + payload_len > source.size:
                continue
            budget -= RECORD_BYTES_MIN + payload_len
            if budget < 0:
                raise ChainBrokenError(
                    "it does not verify, and too much that follows looks like records",
                    logseq=logseq,
                    offset=broken_at,
                    path=source.path,
                )
            this = check_at(source, at + i, seq, source.read(at + i - HASH_BYTES, HASH_BYTES))
            if this is not None and this.computed == this.stored:
                return at + i
        at += count
    return None


def _plausible(least: int, most: int) -> re.Pattern[bytes]:
    """Matches, without consuming, where a logseq may start: not zero, the high bytes those of both bounds."""
    low, high = _U64.pack(least), _U64.pack(max(least, most))
    same = LOGSEQ_BYTES
    while same and low[same - 1 :] == high[same - 1 :]:
        same -= 1
    edge = b"[" + re.escape(low[same - 1 : same]) + b"-" + re.escape(high[same - 1 : same]) + b"]" if same else b""
    free = b"." * max(0, same - 1)
    return re.compile(b"(?s)(?!\0{8})(?=" + free + edge + re.escape(low[same:]) + b".{8})")
