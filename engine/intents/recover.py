"""Intent logs that the last mount left: folded before anything else is served, then removed.

Owner: recovery, one thread. A crash leaves logs that the next start goes on with: a fold says how far it got.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.intents import fold
from aof2.engine.intents.format import Intent, IntentKind, parse
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


def waiting_births(view: View, state_dir: Path, stream_id: int) -> list[Intent]:
    """Files of a tenant that the catalog does not know yet: those of a daemon that ended before it could say so."""
    left = [i for number, path in _logs(state_dir, stream_id) for i in _unfolded(view, stream_id, number, path)]
    gone = {intent.ino for intent in left if intent.kind is IntentKind.UNLINKED and not intent.uid}
    return [intent for intent in left if intent.kind is IntentKind.BORN and intent.ino not in gone]


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
