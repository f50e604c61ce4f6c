"""`aof2 spark verify` and `manifest`: which volume they read, what they refuse; and the log of the bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.manifest.check import check
from aof2.fs.bench import logloops
from tests.cli.logs import run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the commands would run."""
    given: list[Any] = []

    def instead(_: object, arguments: object, **how: object) -> None:
        given.append((arguments, how))

    monkeypatch.setattr("aof2.fs.cli.pipelines.verify.launch", instead)
    monkeypatch.setattr("aof2.fs.cli.pipelines.manifest.launch", instead)
    return given


def test_a_remote_by_its_url(launched: list[Any]) -> None:
    options = ("--remote", "s3://bucket/volume", "--endpoint-url", "http://127.0.0.1:8333", "--region", "here")
    assert run("spark", "verify", *options, "--", "--master", "local[4]").exit_code == 0
    assert run("spark", "manifest", *options, "--price", "put=1", "--out", "/tmp/x").exit_code == 0
    (verify, how), (manifest, _) = launched
    assert how["failed_code"] == 8
    assert verify.settings.remote == manifest.remote
    assert (manifest.remote.url, manifest.remote.region) == ("s3://bucket/volume", "here")
    assert (manifest.out, manifest.prices.put) == ("/tmp/x", 1.0)


def test_a_volume_by_its_conf(launched: list[Any], tmp_path: Path) -> None:
    conf = tmp_path / "mount.conf"
    conf.write_text(
        f'[volume]\nmountpoint = "/aof2"\nstate_dir = "{tmp_path}/s"\n[remote]\nurl = "file://{tmp_path}/r"\n'
    )
    assert run("spark", "verify", "--conf", conf).exit_code == 0
    assert launched[0][0].settings.remote.directory == tmp_path / "r"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("verify", "--remote", "ftp://x"), 8, "unknown scheme"),
        (("verify", "--endpoint-url", "http://x"), 8, "go with --remote"),
        (("verify", "--remote", "s3://bucket", "--conf", "c"), 8, "not by both"),
        (("verify", "--what"), 16, "No such option"),
        (("manifest", "/tmp", "--remote", "s3://bucket"), 1, "not both"),
        (("manifest", "/tmp", "--price", "x=1"), 1, "NAME=DOLLARS"),
    ],
)
def test_what_cannot_be_asked(launched: list[Any], options: tuple[str, ...], code: int, said: str) -> None:
    result = run("spark", *options)
    assert result.exit_code == code
    assert said in result.stderr
    assert not launched


def test_the_log_of_the_bench_is_a_log(tmp_path: Path) -> None:
    command = [sys.executable, logloops.__file__, "write_log", str(tmp_path / "m"), "10000"]
    written = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    report = check(tmp_path / "m" / "1")
    assert report.clean, report.damage
    assert report.records == written["count"] >= 10_000
    assert report.sealed_chunks >= 1
