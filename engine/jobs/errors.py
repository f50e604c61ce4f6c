"""How a job can end other than well, and what becomes of it: run again, or stay visible with its reason.

Owner: pure. A crash leaves nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aof2.engine import errors
from aof2.engine.catalog.rows import JobType
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.objects import ObjectGoneError
from aof2.engine.quota.accounts import QuotaExceededError, ReservationExpiredError
from aof2.engine.remote.errors import RemoteMissingError, RemoteRefusedError

ATTEMPTS_MAX: Final = 8
# What these do is owed as long as it is undone: a remote that is away for a day must not end them.
PATIENT: Final = frozenset((JobType.CREATE_CHECKPOINT, JobType.PRUNE_CHECKPOINT, JobType.REWRITE_PACKS))


class JobCancelledError(errors.Aof2Error):
    """The operator cancelled the job, and it stopped between two steps. Nothing is to be done."""


class JobGoneError(errors.Aof2Error):
    """The job is not running any more (cancelled, requeued, trimmed), or there is none of that number. Let go of it."""


class JobFailedError(errors.Aof2Error):
    """The job that was waited for failed; the message is its reason. See what it says, then retry the job."""


class JobRefusedError(errors.Aof2Error):
    """The job cannot be done here, now or later. Its reason says why; cancel it."""


class NeedsRepairError(errors.CorruptError):
    """Objects have no good copy left that the job could find. Their names are in the message and in the report."""


class PostponedError(errors.TransientError):
    """A cold scan reads what the job wants to delete, or the remote's log is behind. The job comes again later."""


class Verdict(NamedTuple):
    """What becomes of a job that raised. `attempts_max` None: it is tried until it works."""

    retryable: bool
    reason_code: int
    reason: str
    attempts_max: int | None = ATTEMPTS_MAX
    expected: bool = True  # False: a bug, worth a line with its traceback


_NEVER: Final = (
    errors.CorruptError,
    errors.FatalIOError,
    JobRefusedError,
    errors.LimitError,
    errors.ReadOnlyError,
    RemoteMissingError,
    RemoteRefusedError,
    errors.UnsupportedError,
)


def judge(error: Exception, job_type: JobType) -> Verdict:
    """Whether the job is tried again, and what its row says about it."""
    reason = str(error) or type(error).__name__
    if isinstance(error, errors.TransientError):
        # Keys are rotated, rights are given: what is refused is asked again by itself, whatever it is.
        patient = job_type in PATIENT or error.reason_code == ReasonCode.AUTH
        return Verdict(True, int(error.reason_code), reason, None if patient else ATTEMPTS_MAX)
    if isinstance(error, QuotaExceededError):
        return Verdict(not error.never, int(ReasonCode.TRANSIENT), reason)
    if isinstance(error, NeedsRepairError | RemoteMissingError):
        return Verdict(False, int(ReasonCode.OBJECT_MISSING), reason)
    if isinstance(error, errors.CorruptError):
        return Verdict(False, int(ReasonCode.CODEC), reason)
    if isinstance(error, _NEVER):
        return Verdict(False, int(getattr(error, "reason_code", ReasonCode.UNAVAILABLE)), reason)
    if isinstance(error, OSError | ObjectGoneError | ReservationExpiredError):
        return Verdict(True, int(ReasonCode.TRANSIENT), reason)
    return Verdict(False, int(ReasonCode.UNAVAILABLE), f"unexpected {type(error).__name__}: {reason}", expected=False)
