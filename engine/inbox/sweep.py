"""What goes of an inbox: attempts that were not committed, answers that are old, jobs that never came to a commit.

    a job that is done       what it staged and no row locates: at once
    one that was refused     what its commit lists: at once
    neither                  all of it, `inbox_keep` after the last of it came
    commits and answers      `inbox_keep` after the answer; the job's row 30 days after that

Invariants
- What a row locates stays, whatever its job became: its end is the prune's (`jobs/prune.py`).
- A commit goes before its answer: no look meets one that was answered, without the answer.
- The store asks the fence before it deletes.

Owner: the intake's task, so that nothing is published meanwhile; blocking, on a worker thread. A crash leaves the rest
for the next sweep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.jobs.prune import is_named
from aof2.engine.remote.keys import (
    InboxBlobKey,
    InboxCommitKey,
    InboxDoneKey,
    InboxKnockKey,
    InboxPackKey,
    InboxRefusedKey,
    name_of,
    parse_key,
)

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

ROWS_KEPT_MS: Final = 30 * 86_400_000
CRASH_POINTS: Final = ("inbox.swept",)


@dataclass
class _Found:
    """What there is of a job, beside what rows locate."""

    newest_ms: int = 0
    commit: bool = False
    knock: bool = False
    done_ms: int = 0
    refused_ms: int = 0
    unnamed: list[str] = field(default_factory=list)


class Sweep:
    """Of a volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._old: list[str] = []  # jobs whose answers went

    def job(self, tenant_id: int, tenant: str, job_id: str) -> None:
        """The job is done: what it staged and no row locates goes. Blocks."""
        prefix = f"inbox/{tenant}/{job_id}/"
        self.unnamed(tenant_id, (info.key for info in self._volume.remote.list(prefix)))

    def unnamed(self, tenant_id: int, keys: Iterable[str]) -> int:
        """Of these, what no row locates. Blocks."""
        gone = []
        with self._volume.catalog.view() as view:
            for key in keys:
                if isinstance(parse_key(key), InboxBlobKey | InboxPackKey) and not is_named(view, tenant_id, key):
                    gone.append(key)
        if gone:
            self._volume.remote.delete(gone)
            self._volume.env.failpoint("inbox.swept")
        return len(gone)

    def run(self, tenant_id: int, tenant: str) -> list[str]:
        """Goes through all of a tenant's inbox; jobs that are committed and have no answer. Blocks."""
        volume = self._volume
        before_ms = volume.env.now_ms() - int(volume.settings.follow.inbox_keep_s * 1000)
        gone: list[str] = []
        waiting: list[str] = []
        for job_id, found in self._jobs(tenant_id, tenant).items():
            row = volume.catalog.get(tenant_id, t.DELIVERIES, job_id)
            answered_ms = found.done_ms or found.refused_ms
            names = [name_of(kind(tenant, job_id)) for kind in (InboxCommitKey, InboxKnockKey)]
            if row is not None:
                gone += found.unnamed
            if found.commit and not answered_ms:
                waiting.append(job_id)
            elif answered_ms and answered_ms < before_ms:
                volume.remote.delete(names)
                gone += [name_of(kind(tenant, job_id)) for kind in (InboxDoneKey, InboxRefusedKey)]
                gone += found.unnamed if found.newest_ms < before_ms else []
                self._old += [job_id] if row is not None and not row.swept_ms else []
            elif not answered_ms and found.newest_ms < before_ms:
                gone += [*found.unnamed, *names]
        if gone:
            volume.remote.delete(dict.fromkeys(gone))
            volume.env.failpoint("inbox.swept")
        return waiting

    def _jobs(self, tenant_id: int, tenant: str) -> dict[str, _Found]:
        found: dict[str, _Found] = {}
        with self._volume.catalog.view() as view:
            for info in self._volume.remote.list(f"inbox/{tenant}/"):
                key = parse_key(info.key)
                if isinstance(key, InboxBlobKey | InboxPackKey):
                    if is_named(view, tenant_id, info.key):
                        continue
                    found.setdefault(key.job_id, _Found()).unnamed.append(info.key)
                elif isinstance(key, InboxCommitKey | InboxKnockKey | InboxDoneKey | InboxRefusedKey):
                    _note(found.setdefault(key.job_id, _Found()), key, info.modified_ms)
                else:
                    continue
                found[key.job_id].newest_ms = max(found[key.job_id].newest_ms, info.modified_ms)
        return found

    async def forget(self, tenant_id: int) -> None:
        """Rows: of jobs whose answers went that they did; those that did so long ago go. On the trio thread."""
        old, self._old = self._old, []
        with self._volume.catalog.view() as view:
            now_ms = self._volume.env.now_ms()
            gone = [job for job, row in view.scan(tenant_id, t.DELIVERIES) if _is_old(row.swept_ms, now_ms)]
        if old or gone:
            work = partial(_forget, old=old, gone=gone)
            await result_of(self._volume.writer.submit(tenant_id, work))


def _is_old(swept_ms: int, now_ms: int) -> bool:
    return bool(swept_ms) and swept_ms + ROWS_KEPT_MS < now_ms


def _note(
    found: _Found, key: InboxCommitKey | InboxKnockKey | InboxDoneKey | InboxRefusedKey, modified_ms: int
) -> None:
    match key:
        case InboxCommitKey():
            found.commit = True
        case InboxKnockKey():
            found.knock = True
        case InboxDoneKey():
            found.done_ms = modified_ms
        case InboxRefusedKey():
            found.refused_ms = modified_ms


def _forget(b: Batch, old: Collection[str], gone: Collection[str]) -> None:
    for job_id in old:
        row = b.get(t.DELIVERIES, job_id)
        if row is not None:
            b.put(t.DELIVERIES, job_id, msgspec.structs.replace(row, swept_ms=b.now_ms))
    for job_id in gone:
        b.delete(t.DELIVERIES, job_id)
