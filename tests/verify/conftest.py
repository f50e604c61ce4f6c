"""One volume a session; each test gets a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.settings import Settings
from tests.verify import build


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("volume")
    build.make(root)
    return root


@pytest.fixture
def settings(template: Path, tmp_path: Path) -> Settings:
    return build.copy(template, tmp_path / "copy")
