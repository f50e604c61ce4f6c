"""The events of a checkpoint job, each with exactly the fields the checkpoint design gives it.

All at INFO: they are state transitions, failures included. Who alerts on failures reads `checkpoint.failed`.

Owner: stateless; any thread. Crash: see `logs`.
"""

from __future__ import annotations

import logging

from aof2.engine.observe.logs import log_event

JobId = int | str


def checkpoint_started(
    logger: logging.Logger, *, job_id: JobId, tenant: str, plan_size_bytes: int, wal_range: tuple[int, int] | None
) -> None:
    """`wal_range` is first and past-the-last WAL position; None when no WAL feeds the job (sealed files)."""
    log_event(
        logger,
        "checkpoint.started",
        job_id=job_id,
        tenant=tenant,
        plan_size_bytes=plan_size_bytes,
        wal_range=wal_range,
    )


def checkpoint_staged(
    logger: logging.Logger, *, job_id: JobId, staged_chunks: int, staged_bytes: int, duration_ms: int
) -> None:
    log_event(
        logger,
        "checkpoint.staged",
        job_id=job_id,
        staged_chunks=staged_chunks,
        staged_bytes=staged_bytes,
        duration_ms=duration_ms,
    )


def checkpoint_uploaded(
    logger: logging.Logger, *, job_id: JobId, uploaded_blobs: int, uploaded_bytes: int, duration_ms: int
) -> None:
    log_event(
        logger,
        "checkpoint.uploaded",
        job_id=job_id,
        uploaded_blobs=uploaded_blobs,
        uploaded_bytes=uploaded_bytes,
        duration_ms=duration_ms,
    )


def checkpoint_published(
    logger: logging.Logger, *, job_id: JobId, manifest_generation: int, checkpoint_id: int
) -> None:
    log_event(
        logger,
        "checkpoint.published",
        job_id=job_id,
        manifest_generation=manifest_generation,
        checkpoint_id=checkpoint_id,
    )


def checkpoint_cleaned_up(logger: logging.Logger, *, job_id: JobId, quota_released_bytes: int) -> None:
    log_event(logger, "checkpoint.cleaned_up", job_id=job_id, quota_released_bytes=quota_released_bytes)


def checkpoint_failed(logger: logging.Logger, *, job_id: JobId, error: str, stage: str, retryable: bool) -> None:
    log_event(logger, "checkpoint.failed", job_id=job_id, error=error, stage=stage, retryable=retryable)
