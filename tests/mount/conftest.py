"""Where nothing can be mounted, these tests are skipped."""

from __future__ import annotations

import pytest

from tests.support.mount import skip_where_impossible


@pytest.fixture(autouse=True, scope="session")
def can_mount() -> None:
    skip_where_impossible()
