"""What verify says: findings, what would mend them, and the report with fsck's exit code.

Names of kinds, severities and fixes are in JSON that scripts read: they stay.

Owner: plain data. A crash leaves nothing.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, Final

import msgspec

FINDINGS_MAX: Final = 10_000


class Severity(StrEnum):
    ERROR = "error"  # something is not what was promised
    WARNING = "warning"  # something is left over or does not add up; no byte of a file is at risk
    NOTE = "note"  # worth knowing


class Kind(StrEnum):
    LOG = "log"
    EVICTION = "eviction"
    CATALOG = "catalog"
    OBJECT = "object"
    REFCOUNT = "refcount"
    COUNTER = "counter"
    TIERS = "tiers"
    LOCAL_DAMAGED = "local_damaged"
    LOCAL_MISSING = "local_missing"
    LOCAL_ORPHAN = "local_orphan"
    SCRATCH = "scratch"
    REMOTE_UNREACHABLE = "remote_unreachable"
    REMOTE_MISSING = "remote_missing"
    REMOTE_DAMAGED = "remote_damaged"
    REMOTE_ORPHAN = "remote_orphan"
    REMOTE_LOG = "remote_log"
    AUDIT = "audit"


class Exit(IntEnum):
    """fsck's. When something was corrected and something is left, the answer is LEFT."""

    CLEAN = 0
    CORRECTED = 1
    LEFT = 4
    FAILED = 8
    USAGE = 16


class _Fix(msgspec.Struct, frozen=True, kw_only=True, tag_field="do"):
    """Base of all fixes: data, so that a finding can be looked at before anything is done."""


class _StreamFix(_Fix, frozen=True, kw_only=True):
    stream_id: int


class Remove(_Fix, frozen=True, kw_only=True, tag="remove"):
    """A file or a folder that nothing names."""

    path: str


class Clear(_StreamFix, frozen=True, kw_only=True, tag="clear_blocks"):
    """Blocks that are not here any more (chunk id → bits); the remote has them."""

    masks: dict[int, int]
    path: str


class Cool(_StreamFix, frozen=True, kw_only=True, tag="drop_warm"):
    """A warm blob that cannot be used; the remote has the bytes."""

    chunk_id: int
    path: str


class Upload(_StreamFix, frozen=True, kw_only=True, tag="upload_again"):
    """A blob that is missing or damaged in the remote, from a chunk that is whole here."""

    chunk_id: int


class SetRefs(_StreamFix, frozen=True, kw_only=True, tag="set_refcount"):
    sha256: str
    refs: int


class SetPack(_StreamFix, frozen=True, kw_only=True, tag="set_pack"):
    """How many blobs lie in a pack, counted anew."""

    key: str


class SetCounter(_StreamFix, frozen=True, kw_only=True, tag="set_counter"):
    counter: str


class Refold(_StreamFix, frozen=True, kw_only=True, tag="refold"):
    """A chunk whose tier records do not add up to what its rows say: more records do."""

    chunk_id: int


class PutLog(_StreamFix, frozen=True, kw_only=True, tag="put_log_again"):
    """A manifest object that is missing or damaged in the remote, from the whole one here."""

    key: str


class DropLog(_StreamFix, frozen=True, kw_only=True, tag="drop_log_object"):
    """A manifest object that no copy has any more, and that a snapshot covers: taken off the books."""

    key: str


class PutAudit(_StreamFix, frozen=True, kw_only=True, tag="put_audit_again"):
    """A range of the audit log, from the file here."""

    first_logseq: int


class RebuildAudit(_StreamFix, frozen=True, kw_only=True, tag="rebuild_audit"):
    """The audit log here, from its ranges in the remote or from what of it chains."""


class RebuildCatalog(_Fix, frozen=True, kw_only=True, tag="rebuild_catalog"):
    pass


LogFix = PutLog | DropLog | PutAudit | RebuildAudit
Fix = Remove | Clear | Cool | Upload | SetRefs | SetPack | SetCounter | Refold | RebuildCatalog | LogFix


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to say. `message` is a whole line; `fix` is what --repair does about it, if that is provably safe."""

    kind: Kind
    severity: Severity
    message: str
    tenant: str = ""
    object: str = ""
    path: str = ""
    chunk_id: int | None = None
    key: str = ""
    repairable: bool = False
    repaired: bool = False
    fix: Fix | None = None

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """Tells findings of two looks at one volume apart."""
        return (self.kind, self.tenant, self.object, self.path, self.chunk_id, self.key)


def finding(kind: Kind, severity: Severity, message: str, *, fix: Fix | None = None, **where: Any) -> Finding:
    return Finding(kind=kind, severity=severity, message=message, repairable=fix is not None, fix=fix, **where)


class Report(msgspec.Struct, kw_only=True):
    """The answer. `remote`: listed, read, or why not. Counts are of what was looked at."""

    state_dir: str
    live: bool = False
    clean: bool = True
    exit_code: int = 0
    remote: str = "listed"
    streams: int = 0
    records: int = 0
    evictions: int = 0
    objects: int = 0
    chunks: int = 0
    blocks: int = 0
    local_bytes: int = 0
    blobs: int = 0
    remote_bytes: int = 0
    errors: int = 0
    warnings: int = 0
    notes: int = 0
    repaired: int = 0
    left_off: int = 0
    findings: list[Finding] = []

    def conclude(self) -> None:
        """Counts and exit code from the findings."""
        damage = [f for f in self.findings if f.severity is not Severity.NOTE]
        self.errors = sum(f.severity is Severity.ERROR for f in damage)
        self.warnings = len(damage) - self.errors
        self.notes = len(self.findings) - len(damage)
        self.repaired = sum(f.repaired for f in damage)
        self.clean = not damage
        left = len(damage) > self.repaired or self.left_off
        self.exit_code = Exit.LEFT if left else Exit.CORRECTED if self.repaired else Exit.CLEAN
        if any(f.kind is Kind.REMOTE_UNREACHABLE and f.severity is Severity.ERROR for f in self.findings):
            self.exit_code = Exit.FAILED
