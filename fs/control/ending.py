"""`end`: the last word of an unmount.

The kernel tells the channel that the mount is gone when its last copy is. Each new mount namespace (a container, a
service with folders of its own, `unshare`) begins with a copy of every mount there is, and keeps it after an unmount
elsewhere: the daemon would go on for as long as some process lives that never heard of the mount, and the volume could
not be mounted again. So a copy in which nothing is open does not keep the daemon; one in use does, and is named.

Owner: the trio thread; a task a request. A crash leaves what a crash of the daemon leaves.
"""

from __future__ import annotations

import contextlib

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import stream_of
from aof2.engine.inspect.left import Left, path_of
from aof2.engine.kinds.opens import OPENED_FH
from aof2.fs import mountpoint as mp
from aof2.fs.channel_wire import ChannelError
from aof2.fs.control.closing import Closing
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args, ControlError


async def end(mounted: Mounted, _: Args, __: Tell) -> None:
    """The caller has unmounted: the daemon ends, unless the mount is still there, or in use."""
    at = mounted.mountpoint
    if places := await trio.to_thread.run_sync(_places, mounted.channel.device):
        raise ControlError(f"{at}: its daemon still has it mounted at {', '.join(places)}; unmount that, too")
    with contextlib.suppress(ChannelError):  # the kernel told it meanwhile
        await mounted.kinds.fold()
        await Closing(mounted).closed(await _open_inos(mounted))
        if inos := await _open_inos(mounted):
            used = f"{_named(mounted, inos)} open in another mount namespace"
            raise ControlError(f"{at}: unmounted here, but {used}; its daemon goes on until that is closed")
        mounted.kinds.stop_ahead()  # what the channel made ahead is gone when this has had effect
        await mounted.channel.caught_up()
    mounted.end()


async def _open_inos(mounted: Mounted) -> set[int]:
    """Of open files, also of those that the channel opened by itself."""
    return mounted.kinds.open_inos() | {one.nodeid for one in await mounted.channel.dump() if one.fh & OPENED_FH}


def _places(device: tuple[int, int]) -> list[str]:
    """Where the daemon's own mount namespace has the mount."""
    wanted = "{}:{}".format(*device)
    return [str(entry.mountpoint) for entry in mp.mounts() if entry.device == wanted]


def _named(mounted: Mounted, inos: set[int]) -> str:
    """How many files, and the names of the first."""
    names, found = mounted.volume.tenant_names(), Left()
    with mounted.volume.catalog.view() as view:
        for ino in sorted(inos):
            inode = view.get(stream_of(ino), t.INODES, ino)
            tenant = names.get(stream_of(ino), "")
            path = path_of(view, stream_of(ino), tenant, inode) if inode is not None else f"<inode {ino}>"
            found.add(path, 0, sealed=True)
    return f"{found.files} file(s) are ({found.names()})"
