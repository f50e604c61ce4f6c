"""`manifest disable` and `enable`: the log of a mounted volume turned off and on again.

    changes refused → births stopped, what is closed sealed and uploaded, the log's end uploaded → the log takes nothing
    the log takes records → changes are taken

Invariants
- While the log is off, nothing that would need a record in it is answered with success (EROFS); reads go on.
- It is turned off only when it says everything: no writer is open, nothing is dirty, and the remote has all of it. Else
  it stays on, and the caller is told what is in the way.

The wish is not kept: the next mount does what `[manifest] enabled` says.

Owner: the trio thread, one at a time. A crash leaves a volume that was at rest.
"""

from __future__ import annotations

from typing import Final

import trio

from aof2.fs.control import durable
from aof2.fs.control.closing import Closing
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted, by_the_daemon_alone
from aof2.fs.control.protocol import Args, ControlError

REASON: Final = "the manifest log was turned off; aof2 manifest enable turns it on again"
LOG_MAX_S: Final = 60.0


class Toggle(Args, kw_only=True):
    enabled: bool


async def toggle(mounted: Mounted, args: Toggle, tell: Tell) -> dict[str, bool]:
    """Whether the log is `enabled` now, and whether that `changed`."""
    volume = mounted.volume
    if not volume.settings.manifest.enabled:
        raise ControlError("mounted with [manifest] enabled = false; set it to true and mount again")
    is_on = volume.target.enabled
    if volume.fenced:
        raise ControlError(f"the volume is read-only: {volume.fenced}")
    if args.enabled == is_on and bool(volume.paused) != args.enabled:
        return {"enabled": is_on, "changed": False}
    if args.enabled:
        volume.target.enabled = True
        volume.paused = ""
        volume.jobs.runner.wake()
        return {"enabled": True, "changed": True}
    if volume.paused:
        raise ControlError("it is being turned off already")
    volume.paused = REASON
    try:
        await _come_to_rest(mounted, tell)
        volume.target.enabled = False
    except BaseException:
        volume.paused = ""
        raise
    return {"enabled": False, "changed": True}


async def _come_to_rest(mounted: Mounted, tell: Tell) -> None:
    """Everything that was answered is in the log and in the remote, and nothing more is on its way there."""
    volume = mounted.volume
    await by_the_daemon_alone(mounted)
    await Closing(mounted).closed(mounted.kinds.writing())
    writing = mounted.kinds.writing()
    if writing:
        raise ControlError(f"{len(writing)} file(s) are open for writing; close them first, aof2 status counts them")
    await mounted.kinds.seal(None)
    left = mounted.kinds.unsealed()
    if left.files:
        raise ControlError(f"{left.files} file(s) are still being sealed or mapped; try again")
    await durable.upload(volume, set(volume.tenant_names()), tell, log=False)
    await volume.hydrator.settle()
    with trio.move_on_after(LOG_MAX_S):
        await volume.replicator.drain()
        return
    raise ControlError(f"the remote does not take the end of the log within {LOG_MAX_S:g} s; try again later")
