"""Attributes as the kernel wants them, from rows and backing files: for pyfuse3, or as they go over the wire.

A dirty file's size and times are its backing file's, which the kernel may be writing behind our back; everything
else is the catalog's. What has no writer changes only through us, so the kernel may remember it for long; where a
mapping outlived its last close, the sealer tells the kernel.

Invariant: both forms are made of the same facts (`_facts`), and say what libfuse would make of the first.

Owner: stateless.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import Final

import pyfuse3

from aof2.engine.catalog.rows import InodeRow
from aof2.fs.options import Options

LONG_S: Final = 3600
DIRTY_S: Final = 1
BLOCK_SIZE: Final = 4096
_NS: Final = 1_000_000_000
_U32: Final = 0xFFFFFFFF

# fuse_entry_out and fuse_attr_out: who and for how long, then fuse_attr. Times are signed, as the kernel takes them.
_ATTR: Final = "QQQqqq10I"
_ENTRY_OUT: Final = struct.Struct("=QQQQII" + _ATTR)
_ATTR_OUT: Final = struct.Struct("=QII" + _ATTR)
_DIRENT: Final = struct.Struct("=QQII")
DIRENT_LEN: Final = _ENTRY_OUT.size + _DIRENT.size  # fuse_direntplus before the name, which is padded to 8 bytes


def _facts(row: InodeRow, options: Options, backing: os.stat_result | None) -> tuple[int, ...]:
    """size, blocks, three times in ns, mode, uid, gid."""
    mode = row.mode if options.umask is None else row.mode & ~options.umask
    uid = row.uid if options.uid is None else options.uid
    gid = row.gid if options.gid is None else options.gid
    if backing is not None:
        ctime_ns = max(row.ctime_ns, backing.st_ctime_ns)
        size, blocks, atime_ns, mtime_ns = backing.st_size, backing.st_blocks, backing.st_atime_ns, backing.st_mtime_ns
        return size, blocks, atime_ns, mtime_ns, ctime_ns, mode, uid, gid
    data = -(-(row.size - row.hole_bytes) // BLOCK_SIZE) * (BLOCK_SIZE // 512)
    size, blocks = (BLOCK_SIZE, 8) if stat.S_ISDIR(row.mode) else (row.size, data)
    return size, blocks, row.atime_ns, row.mtime_ns, row.ctime_ns, mode, uid, gid


def attributes(
    row: InodeRow, options: Options, backing: os.stat_result | None = None, *, changing: bool = False
) -> pyfuse3.EntryAttributes:
    """The attributes of an inode; `backing` where it is dirty, `changing` where it has a writer."""
    attr = pyfuse3.EntryAttributes()
    attr.st_ino = row.ino
    attr.generation = 0
    attr.entry_timeout = _long_s(options)
    attr.attr_timeout = DIRTY_S if changing else _long_s(options)
    attr.st_nlink = row.nlink
    attr.st_rdev = row.rdev
    attr.st_blksize = BLOCK_SIZE
    (
        attr.st_size,
        attr.st_blocks,
        attr.st_atime_ns,
        attr.st_mtime_ns,
        attr.st_ctime_ns,
        attr.st_mode,
        attr.st_uid,
        attr.st_gid,
    ) = _facts(row, options, backing)
    return attr


def absent(options: Options) -> pyfuse3.EntryAttributes:
    """No such name, and the kernel may remember that: names come only through it, or are told to it. Not on a follower,
    where each look asks the log's end."""
    attr = pyfuse3.EntryAttributes()
    attr.st_ino = 0
    attr.entry_timeout = 0 if options.follow else LONG_S
    return attr


def absent_out(options: Options) -> bytes:
    """The same as the answer of a LOOKUP."""
    return _ABSENT_NOW if options.follow else _ABSENT


def _long_s(options: Options) -> int:
    """How long the kernel may remember what does not change behind its back; on a follower everything may."""
    return DIRTY_S if options.follow else LONG_S


def _packed(row: InodeRow, options: Options, backing: os.stat_result | None) -> tuple[int, ...]:
    """fuse_attr."""
    size, blocks, atime_ns, mtime_ns, ctime_ns, mode, uid, gid = _facts(row, options, backing)
    return (
        row.ino, size, blocks, atime_ns // _NS, mtime_ns // _NS, ctime_ns // _NS,
        atime_ns % _NS, mtime_ns % _NS, ctime_ns % _NS, mode, row.nlink, uid, gid, row.rdev & _U32, BLOCK_SIZE, 0,
    )  # fmt: skip


def entry_out(
    row: InodeRow, options: Options, backing: os.stat_result | None = None, *, changing: bool = False
) -> bytes:
    """The answer of a LOOKUP."""
    long_s = _long_s(options)
    return _ENTRY_OUT.pack(row.ino, 0, long_s, DIRTY_S if changing else long_s, 0, 0, *_packed(row, options, backing))


_ABSENT: Final = _ENTRY_OUT.pack(0, 0, LONG_S, *[0] * 19)
_ABSENT_NOW: Final = _ENTRY_OUT.pack(*[0] * 22)


def attr_out(
    row: InodeRow, options: Options, backing: os.stat_result | None = None, *, changing: bool = False
) -> bytes:
    """The answer of a GETATTR."""
    return _ATTR_OUT.pack(DIRTY_S if changing else _long_s(options), 0, 0, *_packed(row, options, backing))


def direntplus(entry: bytes, ino: int, mode: int, name: bytes, position: int) -> bytes:
    """One name in the answer of a READDIRPLUS, behind which the next is at `position`."""
    padding = b"\0" * (-len(name) & 7)
    return entry + _DIRENT.pack(ino, position, len(name), stat.S_IFMT(mode) >> 12) + name + padding
