"""From what a writer wrote to records: a line each, with its newline, or one record a write.

Whatever is written becomes payload, byte for byte and in order; framing says only where records begin. A line that is
longer than a record may be is cut there. The part of a line that has no newline yet stays with its handle.

Owner: pure functions.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from aof2.engine.errors import os_error
from aof2.engine.kinds.kernel import Framing
from aof2.engine.segment.format import FOOTER_BYTES, HEADER_BYTES, RECORD_BYTES, Version
from aof2.engine.settings.model import AppendTenant
from aof2.native import frame_lines

RECORD_BYTES_MAX: Final = 16 << 20
HEADER: Final = HEADER_BYTES[Version.V3]
FOOTER: Final = FOOTER_BYTES[Version.V3]
OVERHEAD: Final = RECORD_BYTES[Version.V3]


class Framed(NamedTuple):
    """Whole records, and the part of a line that is left."""

    payloads: Sequence[memoryview | bytes]
    rest: bytes

    @property
    def file_bytes(self) -> int:
        """What the records take in a segment."""
        return sum(map(len, self.payloads)) + OVERHEAD * len(self.payloads)


def framing_of(settings: AppendTenant) -> Framing:
    return Framing.LINE if settings.framing == "line" else Framing.RECORD


def record_max(settings: AppendTenant) -> int:
    """The longest record: one fits into a segment in any case."""
    return min(RECORD_BYTES_MAX, settings.segment_bytes - HEADER - FOOTER - OVERHEAD)


def frame(framing: Framing, partial: bytes, data: bytes, longest: int) -> Framed:
    """EMSGSIZE for a record that is too long to be one."""
    if framing is Framing.RECORD:
        if len(data) > longest:
            raise os_error(errno.EMSGSIZE)
        return Framed([data] if data else [], b"")
    whole = partial + data if partial else data
    lengths, total = frame_lines(whole, longest)
    view = memoryview(whole)
    payloads, at = [], 0
    for length in lengths:
        payloads.append(view[at : at + length])
        at += length
    return Framed(payloads, bytes(view[total:]))


def fitting(payloads: Sequence[memoryview | bytes], room: int) -> int:
    """How many of the first records fit into so many bytes of a segment."""
    for count, payload in enumerate(payloads):
        room -= len(payload) + OVERHEAD
        if room < 0:
            return count
    return len(payloads)
