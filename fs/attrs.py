"""Attributes as the kernel wants them, from rows and backing files.

A dirty file's size and times are its backing file's, which the kernel may be writing behind our back; everything
else is the catalog's. What nobody writes to changes only through us, so the kernel may remember it for long; where a
mapping outlived its last close, the sealer tells the kernel.

Owner: stateless.
"""

from __future__ import annotations

import os
import stat
from typing import Final

import pyfuse3

from aof2.engine.catalog.rows import InodeRow
from aof2.fs.options import Options

LONG_S: Final = 3600.0
DIRTY_S: Final = 1.0
BLOCK_SIZE: Final = 4096


def attributes(
    row: InodeRow, options: Options, backing: os.stat_result | None = None, *, changing: bool = False
) -> pyfuse3.EntryAttributes:
    """The attributes of an inode; `backing` where it is dirty, `changing` where somebody may be writing."""
    attr = pyfuse3.EntryAttributes()
    attr.st_ino = row.ino
    attr.generation = 0
    attr.entry_timeout = LONG_S
    attr.attr_timeout = DIRTY_S if changing else LONG_S
    attr.st_mode = row.mode if options.umask is None else row.mode & ~options.umask
    attr.st_nlink = row.nlink
    attr.st_uid = row.uid if options.uid is None else options.uid
    attr.st_gid = row.gid if options.gid is None else options.gid
    attr.st_rdev = row.rdev
    attr.st_blksize = BLOCK_SIZE
    if backing is None:
        attr.st_size = row.size
        attr.st_blocks = -(-row.size // 512)
        attr.st_atime_ns = row.atime_ns
        attr.st_mtime_ns = row.mtime_ns
        attr.st_ctime_ns = row.ctime_ns
    else:
        attr.st_size = backing.st_size
        attr.st_blocks = backing.st_blocks
        attr.st_atime_ns = backing.st_atime_ns
        attr.st_mtime_ns = backing.st_mtime_ns
        attr.st_ctime_ns = max(row.ctime_ns, backing.st_ctime_ns)
    if stat.S_ISDIR(row.mode):
        attr.st_size = BLOCK_SIZE
        attr.st_blocks = 8
    return attr


def absent() -> pyfuse3.EntryAttributes:
    """No such name, and the kernel may remember that: names come only through it, or are told to it."""
    attr = pyfuse3.EntryAttributes()
    attr.st_ino = 0
    attr.entry_timeout = LONG_S
    return attr
