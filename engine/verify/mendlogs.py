"""Repair of the logs on this disk, before anything else is looked at: everything else is checked against them.

    damaged or missing files      → fetched from the remote
    the end of our own log        → fetched from the remote
    records that no copy has      → given up: the log goes on behind a snapshot of what replays

Invariants
- The volume's lock is held. The folder is the one that the remote's claim knows: a stale one learns nothing from there.
- Records are given up only when the remote was asked and does not have them. The damaged files are kept in
  `state_dir/quarantine/`, and the finding says which records, and of which files they spoke.

Owner: the calling thread. A crash leaves what `replicate.mend` and `catalog.behind` say.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from aof2.engine.catalog.behind import start_behind
from aof2.engine.catalog.recovery import Opened, open_catalog, stream_ids
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.rows import CATALOG_DIR, MANIFEST_DIR
from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.manifest.examine import Kind as LogKind
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.gone import set_aside
from aof2.engine.manifest.quarantine import lift, read_quarantine
from aof2.engine.manifest.snapshot import usable_snapshots
from aof2.engine.opening import log_settings
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.claim import look
from aof2.engine.replicate.listing import list_stream, list_streams
from aof2.engine.replicate.mend import Mended, RemoteMender
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Finding, Kind, Severity, finding


def mend_logs(env: Env, settings: Settings, store: RemoteStore) -> list[Finding]:
    """What was wrong with the logs here, and is mended. What could not be is found again by the look that follows."""
    state_dir = settings.volume.state_dir
    try:
        standing = look(store, state_dir)
        if standing.known is None:
            return []
        there = list_streams(store) if standing.is_ours else {}
    except Aof2Error as e:
        return [finding(Kind.REMOTE_LOG, Severity.NOTE, f"the logs here were not mended: {e}")]
    mending = _Mending(env, settings, store)
    found: list[Finding] = []
    streams = {*stream_ids(state_dir / MANIFEST_DIR), *there}
    for stream_id in sorted(streams):
        last_there = max(there[stream_id].chunk_indexes(), default=-1) if stream_id in there else -1
        found += mending.stream(stream_id, last_there)
    return found


class _Mending:
    def __init__(self, env: Env, settings: Settings, store: RemoteStore) -> None:
        self._env = env
        self._settings = settings
        self._store = store
        self._state_dir = settings.volume.state_dir
        self._mender = RemoteMender(env, store, self._state_dir)

    def stream(self, stream_id: int, last_there: int) -> list[Finding]:
        directory = self._state_dir / MANIFEST_DIR / str(stream_id)
        self._env.make_dirs(directory)
        before = check(directory)
        last_here = max((chunk.index for chunk in survey(directory).chunks), default=-1)
        if before.clean and before.quarantine is None and last_there <= last_here:
            return []
        mended = self._mender.mend(directory, stream_id, last=last_there)
        after = check(directory) if mended else before
        if not after.clean and not self._mender.away:
            mended += self._drop_covered(directory, stream_id, after)
            after = check(directory)
        said = [_said(directory, one) for one in mended]
        if not after.clean and not self._mender.away:
            said += self._give_up(directory, stream_id)
            after = check(directory)
        if after.clean and read_quarantine(directory) is not None:
            lift(self._env, directory)
            said.append(f"{directory}: quarantine lifted, the log replays again")
        found = (finding(Kind.LOG, Severity.ERROR, message, path=str(directory)) for message in said)
        return [msgspec.structs.replace(one, repairable=True, repaired=True) for one in found]

    def _drop_covered(self, directory: Path, stream_id: int, report: CheckReport) -> list[Mended]:
        """Damaged chunks that a snapshot covers, with those before them: only history is lost."""
        newest = next(usable_snapshots(directory), None)
        covered = newest.position.chunk_index if newest is not None else 0
        bad = [e.where.index for e in examine(survey(directory)) if e.damage is not None]
        bad += [f.chunk_index or 0 for f in report.damage if f.kind is LogKind.GAP]
        worst = max((index for index in bad if index < covered), default=-1)
        dropped: list[Mended] = []
        for where in survey(directory).chunks:
            if where.index <= worst and where.length is None:
                kept = set_aside(self._env, self._state_dir, directory.name, where.path)
                what = "damaged or before damage, and a snapshot covers it"
                one = Mended(stream_id=stream_id, name=where.path.name, what=what, placed=False, aside=str(kept))
                dropped.append(one)
        return dropped

    def _give_up(self, directory: Path, stream_id: int) -> list[str]:
        """The log goes on behind what no copy has, from the rows as far as they replay; if recovery cannot go on."""
        opened = self._open()
        try:
            with opened.catalog.view() as view:
                position = view.position(stream_id)
            if stream_id not in opened.quarantined:
                return []
            mark = read_quarantine(directory)
            ends = [e.chunk.end_position.ordinal for e in examine(survey(directory)) if e.chunk is not None]
            inventory = list_stream(self._store, stream_id)
            last = max([*(c.index for c in survey(directory).chunks), *inventory.chunk_indexes()], default=-1)
            start_behind(
                self._env,
                opened.catalog,
                directory,
                stream_id,
                chunk_index=last + 1,
                ordinal=max([*ends, position.ordinal if position else 0]),
                snapshot_last=max(inventory.snapshots, default=0),
                away=partial(set_aside, self._env, self._state_dir, directory.name),
            )
            return [f"{directory}: given up: {mark.text if mark is not None else 'what no copy has'}"]
        finally:
            opened.catalog.close()

    def _open(self) -> Opened:
        wanted = log_settings(self._settings)
        opened = open_catalog(self._env, self._state_dir / CATALOG_DIR, self._state_dir / MANIFEST_DIR, wanted)
        for stream in opened.streams.values():
            stream.log.close()
        return opened


def _said(directory: Path, one: Mended) -> str:
    path = directory / one.name
    how = "fetched from the remote" if one.placed else "no other copy is needed or to be had"
    kept = f", kept as {one.aside}" if one.aside else ""
    what = one.what if str(path) in one.what else f"{path}: {one.what}"
    return f"{what}; {how}{kept}"
