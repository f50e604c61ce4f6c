"""The C core under AddressSanitizer and UndefinedBehaviorSanitizer: known answers, then ten seconds of mutants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-g", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
SECONDS = 10
EXECUTIONS_MIN = 10_000


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)


def build(folder: Path, *flags: str) -> Path:
    """The driver, built by gcc with the sanitizers, or a skip where that cannot be."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc here to build the fuzzer with")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if run("gcc", *SANITIZE, probe, "-o", folder / "probe").returncode:
        pytest.skip("this gcc cannot link libasan and libubsan")
    sources = [path for path in sorted(NATIVE.glob("*.c")) if path.name != "_native.c"]
    sources += sorted((NATIVE / "fuzz").glob("*.c"))
    built = run("gcc", *FLAGS, *flags, *SANITIZE, *sources, "-o", folder / "driver", "-lcrypto")
    assert built.returncode == 0, built.stderr
    return folder / "driver"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fuzz"))


def test_known_answers(driver: Path) -> None:
    result = run(driver, "selfcheck")
    assert (result.returncode, result.stderr) == (0, "")


def test_mutants(driver: Path) -> None:
    result = run(driver, str(SECONDS))
    assert (result.returncode, result.stderr) == (0, ""), f"{result.stdout}{result.stderr}"
    assert int(result.stdout.split()[-2]) > EXECUTIONS_MIN


def test_without_the_x86_kernels(tmp_path: Path) -> None:
    """As on other machines: it builds without warnings, and holds for a second of mutants."""
    driver = build(tmp_path, "-DAOF2_PORTABLE")
    for what in ("selfcheck", "1"):
        result = run(driver, what)
        assert (result.returncode, result.stderr) == (0, ""), f"{result.stdout}{result.stderr}"
