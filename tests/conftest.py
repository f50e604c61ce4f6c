"""Shared fixtures. An unexpected WARNING in the log fails the test that caused it: tests name the ones they mean. So
does a lock that is taken against the order."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from aof2.engine import locks
from aof2.engine.tiering import packs
from tests.lockorder import CheckedLocks

locks.made_by(CheckedLocks())
settings.register_profile(
    "aof2", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("aof2")


@pytest.fixture(autouse=True)
def no_unexpected_warnings(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Mark a test `expects_warnings` when it means to cause some (and then have it assert on them)."""
    yield
    if request.node.get_closest_marker("expects_warnings"):
        return
    seen = [r for when in ("setup", "call") for r in caplog.get_records(when) if r.levelno >= logging.WARNING]
    if seen:
        pytest.fail(f"unexpected log: {[r.getMessage() for r in seen]}")


@pytest.fixture
def blobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small objects are uploaded one by one: for tests that count blobs."""
    monkeypatch.setattr(packs, "MEMBERS_MIN", 1 << 30)
