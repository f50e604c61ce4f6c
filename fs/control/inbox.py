"""`inbox` in the daemon: what was delivered is looked for now.

Owner: the trio thread; a task a request. A crash leaves what the intake leaves.
"""

from __future__ import annotations

from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args


class Inbox(Args, kw_only=True):
    """`look` false: only whether this is the mount that takes jobs in."""

    look: bool = True


async def inbox(mounted: Mounted, args: Inbox, _: Tell) -> dict[str, object]:
    """Jobs that were committed before are answered when this returns."""
    volume = mounted.volume
    writes = not (volume.read_only_reason or mounted.options.ro) and volume.settings.manifest.enabled
    if args.look and writes:
        await mounted.inbox.look_now()
    done, refused = mounted.inbox.jobs_done, mounted.inbox.jobs_refused
    return {"writes": writes, "takes": writes and mounted.inbox.is_on, "done": done, "refused": refused}
