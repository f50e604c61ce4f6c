"""Samples of uses into the log: about once a minute, of a mount that was used (`recency/uses.py`).

Invariants
- An idle mount writes nothing. What the log does not take (read-only, a full disk) is let go: it costs a report its
  precision, nothing else.

Owner: a task of the trio thread. A crash loses the last minute's notes.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog.batch import Batch
from aof2.engine.errors import Aof2Error
from aof2.engine.recency import uses

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

SAMPLE_EVERY_S: Final = 60.0


async def keep_noting(volume: Volume) -> None:
    """Until cancelled."""
    while True:
        await trio.sleep(SAMPLE_EVERY_S)
        await note_uses(volume)


async def note_uses(volume: Volume) -> None:
    """What was noted since the last time, into the logs of the tenants that it is about."""
    writable = volume.writable_tenants()
    for stream_id, sample in volume.recent.hot.take().items():
        if stream_id in writable:
            with contextlib.suppress(Aof2Error, OSError):
                await result_of(volume.writer.submit(stream_id, partial(_write, body=uses.encode(sample))))


def _write(b: Batch, body: bytes) -> None:
    b.records.add_event(b.now_ns & (1 << 63) - 1, uses.SCHEMA_ID, body)
