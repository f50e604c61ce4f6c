"""One Spark session for every test of this folder: it takes ten seconds to start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import Stream, lines


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    if not shutil.which("java"):
        pytest.skip("there is no Java: apt-get install default-jre-headless")
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    local = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", str(local / "warehouse"))
        .config("spark.local.dir", str(local))
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """Three segments of unlike sizes."""
    made = Stream(tmp_path / "clicks")
    made.seal(lines(500))
    made.seal(lines(3, first=500), ext_ids=[1, 2**63, 2**64 - 1], flags=[0, 1, 3])
    made.seal([*lines(200, first=503), b"", b"\xff\x00 binary, no newline"])
    return made
