"""What intents do to rows: many in one commit, in the order they were answered, each once.

Invariants
- A fold says in the same commit how far it got; the next one starts behind that.
- A birth whose place is taken, and a change of a name that means another inode by now, change nothing.
- What looks at all rows of a kind sees them as they were before its batch: such an intent begins one (`groups`).

Owner: the catalog thread, for the length of a batch.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from aof2.engine import namespace, objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, InodeRow
from aof2.engine.intents.format import MOVES, SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID, Intent, IntentKind
from aof2.engine.namespace import nodes

log = logging.getLogger(__name__)

POSITION: Final = "intents"  # a counter of the stream: log number << 40 | offset
POSITION_SHIFT: Final = 40
STEP: Final = 256  # intents of one batch
NEW: Final = (IntentKind.BORN, IntentKind.MADE, IntentKind.SYMLINKED)  # with an inode of their own
XATTRS: Final = (IntentKind.XATTR_SET, IntentKind.XATTR_REMOVED)
Stays = Callable[[Intent], bool]
_INO_MASK: Final = (1 << INO_STREAM_SHIFT) - 1


def position_of(number: int, offset: int) -> int:
    return number << POSITION_SHIFT | offset


def offset_in(position: int, number: int) -> int | None:
    """How far this log is folded; None: all of it, a later one had its turn."""
    if position >> POSITION_SHIFT > number:
        return None
    return position & (1 << POSITION_SHIFT) - 1 if position >> POSITION_SHIFT == number else 0


def _begins(intent: Intent) -> bool:
    """Whether it may not be in one batch with what is before it: it looks for names that are left, in all rows."""
    if intent.kind is IntentKind.REPLACED:
        return intent.flags > 0 or stat.S_ISDIR(intent.mode)
    return intent.kind is IntentKind.RMDIR or (intent.kind is IntentKind.UNLINKED and intent.uid > 0)


def groups(intents: Sequence[Intent]) -> Iterator[Sequence[Intent]]:
    """The intents of a batch each."""
    first, marked = 0, set[int]()  # marked: with xattrs that a look at all of an inode's would miss
    for at, intent in enumerate(intents):
        kind = intent.kind
        if kind is IntentKind.BORN or kind is IntentKind.CLOSED:  # thousands at once, and they go with anything
            if at - first == STEP:
                yield intents[first:at]
                first = at
                marked.clear()
            continue
        loses = intent.ino if kind is IntentKind.UNLINKED else intent.other if kind is IntentKind.REPLACED else 0
        if at > first and (at - first == STEP or _begins(intent) or loses in marked):
            yield intents[first:at]
            first = at
            marked.clear()
        if intent.kind in XATTRS:
            marked.add(intent.ino)
    if intents:
        yield intents[first:]


def reserve_inos(b: Batch, *, count: int) -> int:
    """Inode numbers for files that are not born yet; the first."""
    return b.stream_id << INO_STREAM_SHIFT | b.next_id("ino", step=count)


def begin(b: Batch, *, number: int) -> None:
    """From here on it is this log's turn."""
    b.put(t.COUNTERS, POSITION, position_of(number, 0))


def nothing_stays(_: Intent) -> bool:
    return False


def fold(
    b: Batch,
    intents: Sequence[Intent],
    *,
    number: int,
    chunk_bytes: int,
    stays: Stays = nothing_stays,
) -> list[InodeRow | None]:
    """The inode of each as it is then, of REPLACED that of what was replaced; None where nothing was done. A file that
    loses its last name by an intent that says `stays` does, nameless."""
    touched: dict[int, int] = {}
    rows: list[InodeRow | None] = []
    born = [intent for intent in intents if intent.kind is IntentKind.BORN]
    b.read_ahead(t.INODES, [intent.ino for intent in born])
    b.read_ahead(t.DENTRIES, [(intent.parent, intent.name) for intent in born])
    for intent in intents:
        if intent.kind is IntentKind.BORN:
            rows.append(_born(b, intent, touched, chunk_bytes))
        elif intent.kind is IntentKind.CLOSED:
            rows.append(None)
        else:
            rows.append(_changed(b, intent, stays))
    for parent, time_ns in touched.items():
        _touch(b, parent, time_ns)
    last = max((intent.ino & _INO_MASK for intent in intents if intent.kind in NEW), default=0)
    if last > (b.get(t.COUNTERS, "ino") or 0):
        b.put(t.COUNTERS, "ino", last)  # the grant itself was lost with the power
    if intents:
        b.put(t.COUNTERS, POSITION, position_of(number, intents[-1].end))
    return rows


def _born(b: Batch, intent: Intent, touched: dict[int, int], chunk_bytes: int) -> InodeRow | None:
    if b.get(t.INODES, intent.ino) is not None:
        return None
    try:
        nodes.check_free(b, intent.parent, intent.name)
    except OSError as e:
        log.critical("a new file lost its place", extra={"ino": intent.ino, "error": str(e)})
        return None
    time_ns = intent.time_ns
    row = InodeRow(
        intent.ino,
        stat.S_IFREG | stat.S_IMODE(intent.mode),
        intent.uid,
        intent.gid,
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        atime_ns=time_ns,
        generation=1,
        parent=intent.parent,
        last_name=intent.name,
    )
    b.put(t.INODES, intent.ino, row)
    nodes.put_entry(b, intent.parent, intent.name, row)
    objects.create(b, intent.ino, 1, chunk_bytes=chunk_bytes)
    touched[intent.parent] = max(time_ns, touched.get(intent.parent, 0))
    return row


def _changed(b: Batch, intent: Intent, stays: Stays) -> InodeRow | None:
    """The inode as it is then; None: its name means another by now, so it is not what was meant."""
    b.now_ns = max([intent.time_ns, *(_mtime_ns(b, directory) for directory in _directories(intent))])
    try:
        if intent.kind in NEW:
            return _made(b, intent)
        if intent.kind is IntentKind.LINKED:
            return namespace.link(b, intent.ino, intent.parent, intent.name)
        if intent.kind is IntentKind.SET:
            return _set(b, intent)
        if intent.kind is IntentKind.XATTR_SET:
            return namespace.put_xattr(b, nodes.get_inode(b, intent.ino), *intent.names)
        if intent.kind is IntentKind.XATTR_REMOVED:
            return namespace.remove_xattr(b, intent.ino, intent.name)
        if intent.kind in MOVES:
            return _moved(b, intent, stays)
        if not _means(b, intent.parent, intent.name, intent.ino):
            return None
        if intent.kind is IntentKind.RMDIR:
            return namespace.rmdir(b, intent.parent, intent.name)
        return namespace.unlink(b, intent.parent, intent.name, is_open=lambda _: stays(intent))
    except OSError as e:
        extra = {"ino": intent.ino, "kind": intent.kind.name, "error": str(e)}
        log.critical("a change of a name lost its place", extra=extra)
        return None


def _means(b: Batch, parent: int, name: bytes, ino: int) -> bool:
    entry = b.get(t.DENTRIES, (parent, name))
    return entry is not None and entry.ino == ino


def _moved(b: Batch, intent: Intent, stays: Stays) -> InodeRow | None:
    old, new = intent.names
    if not _means(b, intent.parent, old, intent.ino):
        return None
    if intent.other and not _means(b, intent.fh, new, intent.other):
        return None

    def must_stay(ino: int) -> bool:
        return stat.S_ISREG(nodes.get_inode(b, ino).mode) and stays(intent)

    exchange = intent.kind is IntentKind.EXCHANGED
    replace = intent.kind is not IntentKind.RENAMED
    moved = namespace.rename(
        b, intent.parent, old, intent.fh, new, replace=replace, exchange=exchange, is_open=must_stay
    )
    return moved.replaced if intent.kind is IntentKind.REPLACED else moved.moved


def _directories(intent: Intent) -> tuple[int, ...]:
    """Whose times the intent moves."""
    if intent.kind is IntentKind.SET or intent.kind in XATTRS:
        return ()
    return (intent.parent, intent.fh) if intent.kind in MOVES else (intent.parent,)


def _mtime_ns(b: Batch, ino: int) -> int:
    """Times of a directory never go back: as was told meanwhile."""
    above = b.get(t.INODES, ino)
    return above.mtime_ns if above is not None else 0


def _made(b: Batch, intent: Intent) -> InodeRow | None:
    """A directory, or a symlink."""
    if b.get(t.INODES, intent.ino) is not None:
        return None
    is_dir = intent.kind is IntentKind.MADE
    name, target = (intent.name, b"") if is_dir else intent.names
    nodes.check_free(b, intent.parent, name)
    row = InodeRow(
        intent.ino,
        intent.mode,
        intent.uid,
        intent.gid,
        size=len(target),
        nlink=2 if is_dir else 1,
        mtime_ns=intent.time_ns,
        ctime_ns=intent.time_ns,
        atime_ns=intent.time_ns,
        parent=intent.parent,
        target=target,
        last_name=name,
    )
    b.put(t.INODES, intent.ino, row)
    nodes.put_entry(b, intent.parent, name, row)
    nodes.touch(b, intent.parent, links=int(is_dir))
    return row


def _set(b: Batch, intent: Intent) -> InodeRow:
    return namespace.set_attributes(
        b,
        intent.ino,
        mode=intent.mode if intent.flags & SET_MODE else None,
        uid=intent.uid if intent.flags & SET_UID else None,
        gid=intent.gid if intent.flags & SET_GID else None,
        atime_ns=intent.fh if intent.flags & SET_ATIME else None,
        mtime_ns=intent.parent if intent.flags & SET_MTIME else None,
        ctime_ns=intent.time_ns,
    )


def _touch(b: Batch, parent: int, time_ns: int) -> None:
    """The directory as it was told meanwhile: its times never go back."""
    above = b.get(t.INODES, parent)
    if above is not None:
        now_ns = max(time_ns, above.mtime_ns)
        b.put(t.INODES, parent, msgspec.structs.replace(above, mtime_ns=now_ns, ctime_ns=max(now_ns, above.ctime_ns)))
