"""What goes over the channel's sockets, in Python: `native/channel/PROTOCOL.md` says what each message means.

Numbers and layouts are frozen: daemon and channel may be of different releases. Control messages are little-endian;
what the kernel reads is in host order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from aof2.engine.kinds.kernel import KernelGoneError

MESSAGE_MAX: Final = 64 * 1024 + 64
COOKIE_LEN: Final = 16

HEADER: Final = struct.Struct("<HHI")
NODE: Final = struct.Struct("<QIIQQ")
HANDLE: Final = struct.Struct("<QQ16s")
RANGE: Final = struct.Struct("<QQQ")
GRANT: Final = struct.Struct("<QQ")
NODEID: Final = struct.Struct("<Q")
CAPS: Final = struct.Struct("<QI")
BYTES: Final = struct.Struct("<QQII")
NEST: Final = struct.Struct("<QIII")
REPLY: Final = struct.Struct("<Qi")
WRITTEN: Final = struct.Struct("<QQQI")
UPCALL: Final = struct.Struct("<QIQIII")
SHORT: Final = struct.Struct("<QqQQQQ")
GROWN: Final = struct.Struct("<QqQI")
TOUCHED: Final = struct.Struct("<QQQQ")
CATALOG: Final = struct.Struct("<QIII")
APPEND: Final = struct.Struct("<11Q3I")
APPEND_HANDLE: Final = struct.Struct("<QQQI")
APPENDED: Final = struct.Struct("<7Q")
OPENED: Final = struct.Struct("<QQI")
INIT: Final = struct.Struct("<IIIII")
TRANSPORT: Final = struct.Struct("<II")
NOTIFY: Final = struct.Struct("=IiQ")
INVAL_INODE: Final = struct.Struct("=Qqq")
INVAL_ENTRY: Final = struct.Struct("=QII")
DELETE: Final = struct.Struct("=QQII")


LOOKUP: Final = 1  # opcodes of upcalls
GETATTR: Final = 3
READDIRPLUS: Final = 44
SERVE: Final = 600  # as the errno of a READ: its blocks are here now, the channel serves it
HELD: Final = 700  # and a slot: its bytes were sent as BYTES
SLOTS: Final = 256
MORE: Final = 1  # flags
AGAIN: Final = 2
UNTRACKED: Final = 4
TAKE: Final = 1
BARREN: Final = 1  # of BIRTH_INOS: nothing is born
SILENT: Final = 1
WATCH_APPEND: Final = 1
LOOKS_UID: Final = 1
LOOKS_GID: Final = 2
FOLLOWS: Final = 4
FORWARDS: Final = 1  # of APPEND_HANDLE


class Kind(IntEnum):
    """Messages, ours and the channel's. Spoken on the socket: never renumber."""

    NODE = 1
    HANDLE = 2
    BLOCKS = 3
    CLEAR = 4
    GRANT = 5
    COLLECT = 6
    DROP = 7
    CAPS = 8
    REPLY = 9
    DUMP = 10
    PROBE = 11
    BIRTH_PAGE = 12
    BIRTH_DIR = 13
    BIRTH_LOG = 14
    BIRTH_INOS = 15
    NEST = 16
    NAMES = 17
    BYTES = 18
    COMING = 19
    # 20 was AHEAD
    BRAKE = 21
    WATCH = 22
    ROOM = 23
    GROWN = 24
    DENY = 25
    CLAIM = 26
    UNCLAIM = 27
    PASS = 28
    EXPECT = 29
    CATALOG = 30
    TREE = 31
    APPEND = 32
    APPEND_ROOM = 33
    APPEND_TAKE = 34
    APPEND_STATE = 35
    APPEND_HANDLE = 36
    APPEND_PARTIAL = 37
    EV_MOUNTED = 128
    EV_FAILED = 129
    EV_INIT = 130
    EV_GONE = 131
    EV_REFUSED = 132
    EV_CLEARED = 133
    EV_WRITTEN = 134
    EV_HANDLE = 135
    EV_DUMPED = 136
    EV_PROBED = 137
    EV_UPCALL = 138
    EV_KILL = 139
    EV_NEST = 140
    EV_BIRTHS = 141
    EV_BRAKED = 142
    EV_SHORT = 143
    EV_GROWN = 144
    EV_CLAIMED = 145
    EV_TOUCHED = 146
    EV_TRANSPORT = 147
    EV_CATALOG = 148
    EV_APPENDED = 149
    EV_PARTIAL = 150
    EV_OPENED = 151
    EV_USED = 152


class Notify(IntEnum):
    """The kernel's numbers."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6


class ChannelError(KernelGoneError):
    """The channel could not mount, or ended by itself. The message is for the user; there is nothing to retry."""


@dataclass(frozen=True, slots=True)
class Upcall:
    """A request libfuse cannot pass on: `body` is what follows the kernel's header."""

    unique: int
    opcode: int
    nodeid: int
    uid: int
    gid: int
    pid: int
    body: bytes


@dataclass(frozen=True, slots=True)
class KnownHandle:
    """A handle in the channel's table."""

    nodeid: int
    fh: int
    cookie: bytes


def inval_inode(nodeid: int, offset: int, length: int) -> bytes:
    """A notification; offset −1: attributes only."""
    return _notification(Notify.INVAL_INODE, INVAL_INODE.pack(nodeid, offset, length))


def inval_entry(parent: int, name: bytes) -> bytes:
    return _notification(Notify.INVAL_ENTRY, INVAL_ENTRY.pack(parent, len(name), 0) + name + b"\0")


def delete(parent: int, name: bytes, child: int) -> bytes:
    return _notification(Notify.DELETE, DELETE.pack(parent, child, len(name), 0) + name + b"\0")


def _notification(code: Notify, body: bytes) -> bytes:
    return NOTIFY.pack(NOTIFY.size + len(body), code, 0) + body
