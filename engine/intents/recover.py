"""Intent logs that the last mount left: folded before anything else is served, then removed.

Owner: recovery, one thread. A crash leaves logs that the next start goes on with: a fold says how far it got.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.intents import fold
from aof2.engine.intents.format import MOVES, Intent, IntentKind, parse
from aof2.engine.intents.log import FOLDER, log_name

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)


def recover_intents(volume: Volume, stream_ids: Iterable[int]) -> int:
    """Folds what is left of these tenants' logs, and removes them; how many intents. Blocks."""
    found, done = 0, []
    for stream_id in stream_ids:
        for number, path in _logs(volume.state_dir, stream_id):
            found += _recover_one(volume, stream_id, number, path)
            done.append(path)
    if done:
        volume.writer.flush()  # the manifest log has it durably before this one goes
        for path in done:
            volume.env.files.unlink(path)
    if found:
        log.info("names recovered", extra={"intents": found})
    return found


class Waiting(NamedTuple):
    """What a daemon that ended had answered for, and the rows do not show."""

    births: list[Intent]  # files
    names: dict[int, tuple[int, bytes]]  # parent and name that an inode got last
    gone: set[int]  # inodes that lost their last name


def waiting(view: View, state_dir: Path, stream_id: int) -> Waiting:
    found = Waiting([], {}, set())
    for intent in [i for number, path in _logs(state_dir, stream_id) for i in _unfolded(view, stream_id, number, path)]:
        if intent.kind is IntentKind.BORN:
            found.births.append(intent)
        if intent.kind in MOVES:
            found.names[intent.ino] = (intent.fh, intent.names[1])
        if intent.kind is IntentKind.EXCHANGED:
            found.names[intent.other] = (intent.parent, intent.names[0])
        elif intent.kind is IntentKind.REPLACED and not intent.flags:
            found.gone.add(intent.other)
        elif intent.kind in (IntentKind.BORN, IntentKind.MADE, IntentKind.LINKED):
            found.names[intent.ino] = (intent.parent, intent.name)
        elif intent.kind is IntentKind.UNLINKED and not intent.uid:
            found.gone.add(intent.ino)
    return found


def _logs(state_dir: Path, stream_id: int) -> list[tuple[int, Path]]:
    numbers = sorted(int(path.stem.split("-")[1]) for path in (state_dir / FOLDER).glob(f"{stream_id}-*.log"))
    return [(number, state_dir / FOLDER / log_name(stream_id, number)) for number in numbers]


def _unfolded(view: View, stream_id: int, number: int, path: Path) -> list[Intent]:
    start = fold.offset_in(view.get(stream_id, t.COUNTERS, fold.POSITION) or 0, number)
    if start is None:
        return []
    with path.open("rb") as f:
        f.seek(start)
        return list(parse(f.read(), start, check=True))


def _recover_one(volume: Volume, stream_id: int, number: int, path: Path) -> int:
    with volume.catalog.view() as view:
        intents = _unfolded(view, stream_id, number, path)
    chunk_bytes = volume.settings.engine.chunk_bytes
    for some in fold.groups(intents):
        volume.writer.call(stream_id, partial(fold.fold, intents=some, number=number, chunk_bytes=chunk_bytes))
    return len(intents)
