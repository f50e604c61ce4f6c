"""The queue as people look at it: a row a job, of every tenant, from the catalog alone.

Owner: pure over a view. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from aof2.engine.catalog.rows import JobRow, JobState, JobType
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.jobs import queue
from aof2.engine.manifest.format import ReasonCode

# As the specification calls them (CreateCheckpoint); what a job is started with is the short word.
TYPES: Final = {kind: "".join(word.capitalize() for word in kind.name.split("_")) for kind in JobType}
SHORT: Final = {
    "checkpoint": JobType.CREATE_CHECKPOINT,
    "verify": JobType.VERIFY_MANIFEST,
    "download": JobType.DOWNLOAD_CHECKPOINT,
    "prune": JobType.PRUNE_CHECKPOINT,
    "rewrite": JobType.REWRITE_PACKS,
    "truncate": JobType.TRUNCATE_APPEND_ONLY,
}


class NoSuchJobError(Aof2Error):
    """No job has that name. See `aof2 jobs`."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `job` is its name, TENANT/NUMBER. `next_ms`: not before then; 0: as soon as there is a place."""

    job: str
    tenant: str
    job_id: int
    type: str
    state: str
    done: int
    total: int
    attempts: int
    reason: str
    reason_code: str
    token: str
    created_ms: int
    updated_ms: int
    next_ms: int
    cancel_requested: bool
    report: dict[str, object]


def job_status(row: JobRow, tenant: str) -> JobStatus:
    waits = row.state == JobState.QUEUED and row.not_before_ms > row.updated_ms
    failed = bool(row.reason)
    return JobStatus(
        job=f"{tenant}/{row.job_id}",
        tenant=tenant,
        job_id=row.job_id,
        type=TYPES[row.type],
        state=row.state.name.lower(),
        done=row.done,
        total=row.total,
        attempts=row.attempts,
        reason=row.reason,
        reason_code=_reason(row.reason_code) if failed else "",
        token=row.token,
        created_ms=row.created_ms,
        updated_ms=row.updated_ms,
        next_ms=row.not_before_ms if waits else 0,
        cancel_requested=queue.envelope(row).cancel_requested,
        report=queue.report(row),
    )


def _reason(code: int) -> str:
    try:
        return ReasonCode(code).name.lower()
    except ValueError:
        return str(code)


def every_job(view: View) -> Iterator[JobStatus]:
    """Of every tenant, oldest first."""
    for tenant_id, tenant in sorted(tenant_names(view).items()):
        for row in queue.jobs(view, tenant_id):
            yield job_status(row, tenant)


def find_job(view: View, name: str) -> tuple[int, JobRow, str]:
    """(tenant id, row, tenant) of TENANT/NUMBER; the number alone where only one tenant has it."""
    tenant, _, number = name.rpartition("/")
    found = [
        (tenant_id, row, known)
        for tenant_id, known in tenant_names(view).items()
        if not tenant or known == tenant
        for row in queue.jobs(view, tenant_id)
        if str(row.job_id) == number
    ]
    if not found:
        raise NoSuchJobError(f"{name}: there is no such job; aof2 jobs lists those there are")
    if len(found) > 1:
        names = ", ".join(f"{known}/{number}" for _, _, known in found)
        raise NoSuchJobError(f"{name}: several tenants have one; name {names}")
    return found[0]
