"""The tree: names, inodes and what removing a name does to an object. Each function is one atomic batch of its tenant.

A directory's inode number is the parent half of its entries' keys, so a listing is one range and renaming a directory
touches two rows however much is below it. Errors are OSErrors with the errno POSIX asks for; who may do what is asked
elsewhere.

Unlinking the last name of a published object leaves a tombstone: its rows stay for the undelete window, and `undelete`
gives it a name again. An object that was never published goes at once, rows and bytes. What is open when its last name
goes stays as it is, nameless, until `drop_nameless`.

Reading (`read.py`) is over a view, from any thread. Changing is the catalog's writer thread's, for the length of a
batch; a crash leaves the tree before or after it, and nameless inodes that no process has open any more.
"""

from aof2.engine.namespace.attributes import put_xattr, remove_xattr, set_attributes, set_xattr
from aof2.engine.namespace.make import bring, create, create_unnamed, link, make_node, make_root, mkdir, symlink
from aof2.engine.namespace.move import Renamed, rename
from aof2.engine.namespace.nodes import NAME_LEN_MAX, check_name, erase, get_inode, lookup, root_ino
from aof2.engine.namespace.read import (
    deleted,
    entry,
    get_xattr,
    inode,
    list_dir,
    list_xattrs,
    nameless,
    path_of,
    resolve,
)
from aof2.engine.namespace.remove import IsOpen, drop_nameless, never, rmdir, undelete, unlink
