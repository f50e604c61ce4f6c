"""The channel's tables, parsers and answers under ASan and UBSan: known answers, then ten seconds of messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.channel.support import compiled, run

CHANNEL = Path(__file__).resolve().parents[2] / "native" / "channel"
OUTSIDE = {"main.c", "mount.c", "event.c", "device.c", "log.c", "notify.c", "ring.c", "uring.c", "store.c"}
SMALL = [
    *(
        f"-D{t}_MAX=64"
        for t in ("NODES", "HANDLES", "PENDING", "CAPS", "CLEARS", "NAMES", "CRADLES", "GONE", "OVER", "LISTS")
    ),
    "-DNESTS_MAX=8",
    "-DANSWERS_MAX=8",
    *("-DAPPENDS_MAX=8", "-DAPPEND_HANDLES_MAX=16", "-DPARTIALS_MAX=4", "-DPARTIALS_BYTES_MAX=2000"),
]
SECONDS = 10
EXECUTIONS_MIN = 2_000


def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [path for path in sorted(CHANNEL.glob("*.c")) if path.name not in OUTSIDE]
    sources += sorted((CHANNEL / "fuzz").glob("*.c"))
    return compiled(tmp_path_factory.mktemp("fuzz") / "driver", sources, "address,undefined", *SMALL)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


def test_known_answers(driver: Path) -> None:
    result = run(driver, "selfcheck")
    assert (result.returncode, result.stderr) == (0, "")


def test_mutants(driver: Path) -> None:
    result = run(driver, SECONDS)
    assert (result.returncode, result.stderr) == (0, ""), f"{result.stdout}{result.stderr}"
    assert int(result.stdout.split()[-2]) > EXECUTIONS_MIN
