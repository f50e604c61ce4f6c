"""The audit log against the rows: equal, behind, and contradicting."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.audit.format import ArtifactPublish, Payload, SegmentSeal, Tombstone, artifact_ref
from aof2.engine.audit.writer import AuditWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.env import Env
from aof2.engine.inspect.rows import open_rows
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from tests.verify.build import TENANT, chunks_of, commit, flip, kinds


def published(settings: Settings) -> list[ObjectRow]:
    with open_rows(settings.volume.state_dir) as rows, rows.view() as view:
        return [row for _, row in view.scan(TENANT, t.OBJECTS) if row.state == ObjectState.PUBLISHED]


def write(settings: Settings, payloads: list[Payload]) -> Path:
    path = settings.volume.state_dir / "audit" / f"{TENANT}.asl"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with AuditWriter(Env(), path) as log:
        log.append(payloads)
    return path


def publications(settings: Settings) -> list[Payload]:
    return [
        ArtifactPublish(artifact_ref("default", row.ino, row.generation, row.sha256)) for row in published(settings)
    ]


def caught_up(settings: Settings) -> None:
    """As if the audit log had been derived from everything so far."""
    commit(settings, lambda b: b.put(t.COUNTERS, "audit_chunk", 1 << 40))


def test_equal(settings: Settings) -> None:
    caught_up(settings)
    write(settings, publications(settings))
    report = verify(settings)
    assert report.exit_code == 0
    assert not [f for f in report.findings if f.kind is Kind.AUDIT]


def test_behind_is_a_note_while_the_log_still_has_it(settings: Settings) -> None:
    write(settings, publications(settings)[:2])
    report = verify(settings)
    (found,) = [f for f in report.findings if f.kind is Kind.AUDIT]
    assert report.exit_code == 0
    assert "behind by" in found.message


@pytest.mark.parametrize("harm", ["missing", "extra", "tombstone", "seal", "chain"])
def test_contradictions(settings: Settings, harm: str) -> None:
    caught_up(settings)
    payloads = publications(settings)
    if harm == "missing":
        payloads.pop()
    elif harm == "extra":
        payloads.append(ArtifactPublish(artifact_ref("default", 9, 9, bytes(32))))
    elif harm == "tombstone":
        payloads.append(Tombstone(payloads[0].artifact))  # type: ignore[union-attr]
    elif harm == "seal":
        payloads.append(SegmentSeal(chunks_of(settings, "here")[0].chunk_id, bytes(32)))
    path = write(settings, payloads)
    if harm == "chain":
        flip(path, 24 + 20)
    report = verify(settings, repair=True)
    # What contradicts the rows stays as it is; a broken chain is cut where it breaks, and derived again.
    assert (report.exit_code, kinds(report)) == (1 if harm == "chain" else 4, [Kind.AUDIT])
