"""The queue: jobs as rows of their tenant's stream, changed only by the functions here.

    enqueue → QUEUED → claim → RUNNING → finish → DONE
                 ▲                │ fail, may work later: QUEUED again, not before its backoff is over
                 └────────────────┤ fail, will not: FAILED, visible with its reason until `retry`
                                  └ cancel → CANCELLED

Invariants
- A token names at most one job that is not over. Asking for it again gives that job; after it is over, a new one.
- A RUNNING job has a lease. When it runs out, or the process that held it is gone (`recover`), the job is QUEUED again.
- A job keeps its payload and its progress from one attempt to the next: attempts of a job do the same work.
- FAILED jobs stay until they are retried or cancelled, or another job of the same token took their place; of the jobs
  that are over otherwise the newest FINISHED_KEPT stay, and up to TRIM_EVERY more that ended along with their work.
- Times in rows are the wall clock's. It may jump: a job whose time lies further ahead than any backoff or lease could
  put it is due at once.

Owner: the writer thread (`Batch`) or a reader's (`View`). A crash leaves a job in the state of its last commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import JobRow, JobState, JobType
from aof2.engine.catalog.store import View
from aof2.engine.jobs.errors import JobGoneError
from aof2.engine.manifest.format import ReasonCode

LIVE: Final = frozenset((JobState.QUEUED, JobState.RUNNING))
FINISHED_KEPT: Final = 64
TRIM_EVERY: Final = 16
BACKOFF_FIRST_MS: Final = 500
BACKOFF_MAX_MS: Final = 60_000
LEASE_MAX_MS: Final = 600_000


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What a row's payload holds. Written to disk: append fields, with a default."""

    body: bytes = b""  # the executor's own: the plan, and how far it is where a count does not say
    cancel_requested: bool = False
    report: bytes = b""  # msgpack of what the job found, for the operator and the next attempt


_envelopes: Final = msgspec.msgpack.Decoder(Envelope)


def envelope(row: JobRow) -> Envelope:
    return _envelopes.decode(row.payload) if row.payload else Envelope()


def report(row: JobRow) -> dict[str, object]:
    """What the job found; {} when it has nothing to tell (yet)."""
    data = envelope(row).report
    return msgspec.msgpack.decode(data, type=dict[str, object]) if data else {}


def job_name(tenant_id: int, job_id: int) -> str:
    """Of its scratch folder and of its quota; job ids count by tenant."""
    return f"{tenant_id}-{job_id}"


# -- asking ----------------------------------------------------------------------------------------------------


def get(b: Batch, job_id: int) -> JobRow:
    row = b.get(t.JOBS, job_id)
    if row is None:
        raise JobGoneError(f"there is no job {job_id}")
    return row


def is_due(row: JobRow, now_ms: int) -> bool:
    """Whether the job may be claimed."""
    if row.state == JobState.QUEUED:
        return not 0 < row.not_before_ms - now_ms <= BACKOFF_MAX_MS
    return row.state == JobState.RUNNING and not 0 < row.lease_until_ms - now_ms <= LEASE_MAX_MS


def due_in_ms(row: JobRow, now_ms: int) -> int | None:
    """How long until it may be claimed; 0 is now, None never."""
    if row.state not in LIVE:
        return None
    at_ms = row.not_before_ms if row.state == JobState.QUEUED else row.lease_until_ms
    return 0 if is_due(row, now_ms) else at_ms - now_ms


def jobs(view: View, tenant_id: int) -> Iterator[JobRow]:
    """All that are known, oldest first."""
    return (row for _, row in view.scan(tenant_id, t.JOBS))


class Unfinished:
    """Finds the jobs that are not over without a look at those that are: a few live ones behind many that are kept to
    be shown. A job that is over stays so, and numbers only rise: up to some number all are.

    Owner: the trio thread learns that number; any thread may use it."""

    def __init__(self) -> None:
        self._over_until: dict[int, int] = {}

    def of(self, view: View, tenant_id: int) -> list[JobRow]:
        """All that are QUEUED, RUNNING or FAILED, oldest first."""
        until = self._over_until.get(tenant_id, 0)
        after = t.JOBS.pack_key(until) if until else None
        return [row for _, row in view.scan(tenant_id, t.JOBS, after=after) if not _is_over(row)]

    def learn(self, view: View, tenant_id: int) -> None:
        """From a view of what is committed."""
        until = self._over_until.get(tenant_id, 0)
        for job_id, row in view.scan(tenant_id, t.JOBS, after=t.JOBS.pack_key(until) if until else None):
            if not _is_over(row):
                break
            until = job_id
        self._over_until[tenant_id] = until


def _is_over(row: JobRow) -> bool:
    return row.state in (JobState.DONE, JobState.CANCELLED)


# -- changing --------------------------------------------------------------------------------------------------


def enqueue(b: Batch, job_type: JobType, token: str, body: bytes = b"", *, total: int = 0) -> tuple[int, bool]:
    """The number of the job with this token, and whether it is new."""
    known = b.get(t.JOB_TOKENS, token)
    if known is not None:
        row = b.get(t.JOBS, known)
        if row is not None and row.state in LIVE:
            return known, False
    job_id = b.next_id("job_id")
    row = JobRow(
        job_id,
        job_type,
        b.stream_id,
        token,
        payload=t.encode(Envelope(body)),
        total=total,
        created_ms=b.now_ms,
        updated_ms=b.now_ms,
    )
    b.put(t.JOBS, job_id, row)
    b.put(t.JOB_TOKENS, token, job_id)
    return job_id, True


def claim(
    b: Batch, *, lease_ms: int, types: Collection[JobType] = tuple(JobType), skip: Collection[int] = ()
) -> JobRow | None:
    """The oldest job that is due, now RUNNING under a lease; None when there is none. `skip`: not these numbers."""
    for job_id, row in b.scan(t.JOBS):
        if row.type in types and job_id not in skip and is_due(row, b.now_ms):
            if envelope(row).cancel_requested:
                cancelled(b, job_id)
                continue
            return _lease(b, row, lease_ms)
    return None


def claim_new(b: Batch, job_id: int, *, lease_ms: int) -> JobRow:
    """A job that this very batch enqueued, RUNNING at once: the caller starts it after the commit."""
    return _lease(b, get(b, job_id), lease_ms)


def renew(b: Batch, job_id: int, *, lease_ms: int) -> JobRow:
    """The worker is alive: its lease runs anew."""
    return _lease(b, _running(b, job_id), lease_ms)


def _lease(b: Batch, row: JobRow, lease_ms: int) -> JobRow:
    return _put(b, row, state=JobState.RUNNING, lease_until_ms=b.now_ms + min(lease_ms, LEASE_MAX_MS))


def progress(
    b: Batch, job_id: int, done: int, total: int, *, body: bytes | None = None, report: bytes | None = None
) -> JobRow:
    """So much is done, of so much; what is None stays as it was."""
    row = _running(b, job_id)
    old = envelope(row)
    new = Envelope(old.body if body is None else body, old.cancel_requested, old.report if report is None else report)
    payload = row.payload if new == old else t.encode(new)
    return _put(b, row, done=done, total=total, payload=payload)


def finish(b: Batch, job_id: int) -> JobRow:
    row = _finish(b, _running(b, job_id))
    _trim(b, row)
    return row


def _finish(b: Batch, row: JobRow, **changes: object) -> JobRow:
    return _put(b, row, state=JobState.DONE, reason="", reason_code=0, lease_until_ms=0, **changes)


def finish_along(b: Batch, job_id: int, done: int, total: int) -> bool:
    """`progress` and `finish` beside the last of the job's work; False for a job that is not to end like that. A caller
    waits for that commit, and a look at all jobs that are kept takes as long as the rest of it: few commits have one.
    """
    row = b.get(t.JOBS, job_id)
    if row is None or row.state != JobState.RUNNING or envelope(row).cancel_requested:
        return False
    row = _finish(b, row, done=done, total=total)
    if not job_id % TRIM_EVERY:
        _trim(b, row)
    return True


def fail(
    b: Batch,
    job_id: int,
    *,
    reason: str,
    reason_code: int = 0,
    retryable: bool = False,
    attempts_max: int | None = None,
    jitter: float = 1.0,
) -> JobRow:
    """The attempt failed. Worth another: QUEUED, after a backoff half of which is `jitter` (0 to 1); else FAILED."""
    row = _running(b, job_id)
    attempts = row.attempts + 1
    again = retryable and (attempts_max is None or attempts < attempts_max)
    return _put(
        b,
        row,
        state=JobState.QUEUED if again else JobState.FAILED,
        attempts=attempts,
        reason=reason,
        reason_code=reason_code,
        not_before_ms=b.now_ms + backoff_ms(attempts, jitter) if again else 0,
        lease_until_ms=0,
    )


def backoff_ms(attempts: int, jitter: float) -> int:
    """Doubles from the first failure on, up to a minute; half of it is `jitter`."""
    full = min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << min(attempts - 1, 20))
    return full // 2 + int(full // 2 * jitter)


def release(b: Batch, job_id: int) -> JobRow:
    """The worker stops without having failed (shutdown): the job is QUEUED, due at once, for the next one."""
    return _put(b, _running(b, job_id), state=JobState.QUEUED, lease_until_ms=0, not_before_ms=0)


def cancel(b: Batch, job_id: int) -> JobState:
    """Stops the job: at once if no worker runs it, else its worker is to find the wish and stop between two steps."""
    row = get(b, job_id)
    if row.state in (JobState.QUEUED, JobState.FAILED):
        return cancelled(b, job_id).state
    if row.state == JobState.RUNNING:
        old = envelope(row)
        _put(b, row, payload=t.encode(Envelope(old.body, True, old.report)))
    return row.state


def cancelled(b: Batch, job_id: int) -> JobRow:
    """The job stopped because it was asked to."""
    row = _put(b, get(b, job_id), state=JobState.CANCELLED, lease_until_ms=0, not_before_ms=0)
    _trim(b, row)
    return row


def retry(b: Batch, job_id: int) -> bool:
    """A FAILED job, or one that waits out its backoff, is due at once, with all its attempts before it again."""
    row = get(b, job_id)
    waiting = row.state == JobState.QUEUED and row.not_before_ms > 0
    if row.state != JobState.FAILED and not waiting:
        return False
    known = b.get(t.JOB_TOKENS, row.token)
    newer = None if known in (None, job_id) else b.get(t.JOBS, known or 0)
    if newer is not None and newer.state in LIVE:
        return False  # another job of that token does it already
    b.put(t.JOB_TOKENS, row.token, job_id)
    _put(b, row, state=JobState.QUEUED, attempts=0, not_before_ms=0)
    return True


def recover(b: Batch) -> list[int]:
    """At start, when no worker runs anything: what was RUNNING is due again, and so is what an older version gave up
    for want of credentials. The numbers of those jobs."""
    again: list[int] = []
    for job_id, row in b.scan(t.JOBS):
        if row.state == JobState.RUNNING:
            if envelope(row).cancel_requested:
                cancelled(b, job_id)
                continue
            _put(b, row, state=JobState.QUEUED, lease_until_ms=0, not_before_ms=0)
            again.append(job_id)
        elif row.state == JobState.FAILED and row.reason_code == ReasonCode.AUTH and retry(b, job_id):
            again.append(job_id)
    return again


def _running(b: Batch, job_id: int) -> JobRow:
    row = get(b, job_id)
    if row.state != JobState.RUNNING:
        raise JobGoneError(f"job {job_id} is {row.state.name}, not running")
    return row


def _put(b: Batch, row: JobRow, **changes: object) -> JobRow:
    new = msgspec.structs.replace(row, updated_ms=b.now_ms, **changes)
    b.put(t.JOBS, row.job_id, new)
    return new


def _trim(b: Batch, over: JobRow) -> None:
    """Forgets the oldest jobs that are over, beyond those kept."""
    finished = [row for _, row in b.scan(t.JOBS) if row.job_id != over.job_id and _may_go(b, row)]
    for row in finished[: max(0, len(finished) + 1 - FINISHED_KEPT)]:
        b.delete(t.JOBS, row.job_id)
        if b.get(t.JOB_TOKENS, row.token) == row.job_id:
            b.delete(t.JOB_TOKENS, row.token)


def _may_go(b: Batch, row: JobRow) -> bool:
    if row.state == JobState.FAILED:
        return b.get(t.JOB_TOKENS, row.token) != row.job_id
    return row.state not in LIVE
