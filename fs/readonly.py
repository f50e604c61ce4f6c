"""A mount that lost its volume to another machine: it takes nothing more, keeps what it has, and goes on serving reads.

    births stopped at the channel → opens, writes and changes refused → what was born or unlinked is folded → log closed

Invariants
- From `end_writing` on no change is answered with success: the channel creates nothing by itself, the operations answer
  EROFS, and the backing files of writers that are open are immutable (they get EPERM; where the filesystem cannot,
  their bytes stay here, dirty).
- What was answered before is in the local log before that is closed: nothing that an application was told is forgotten.

Owner: the mount's nursery, once. A crash leaves what any crash leaves.
"""

from __future__ import annotations

import contextlib
import logging

import trio

from aof2.engine.errors import Aof2Error
from aof2.engine.kinds.kernel import KernelGoneError
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.volume import Volume

log = logging.getLogger(__name__)


async def end_writing(volume: Volume, kinds: Kinds, reason: str) -> None:
    """The mount is read-only when this returns."""
    with trio.CancelScope(shield=True):
        stopped = kinds.refuse_writes()
        with contextlib.suppress(Aof2Error, OSError, KernelGoneError):  # said already; recovery folds the rest
            await kinds.fold()
        volume.target.turn_read_only(reason)
    log.error(
        "this mount is fenced: another machine writes the volume; what is here is kept and served, nothing is taken",
        extra={"reason": reason, "writers_stopped": stopped, "unsealed_files": kinds.unsealed().files},
    )
