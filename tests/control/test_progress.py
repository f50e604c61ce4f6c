"""How far it is, as people see it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aof2.fs.cli import progress
from aof2.fs.cli.mount import as_mount_helper
from aof2.fs.control.protocol import Progress
from aof2.fs.wording import human_size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1 << 20, "1 MiB"), (1_640_000_000, "1.53 GiB")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert human_size(size) == text


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown_progress() as show:
        show(Progress("upload", 1, 100))  # too early
        now[0] += 10
        show(Progress("upload", 25 << 20, 100 << 20))
        now[0] += 10
        show(Progress("evict", 7, 7, "files"))
    assert capsys.readouterr().err == "upload: 25 MiB of 100 MiB, 30 s left\nevict: 7 files\n"


def test_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown_progress():
        pass
    assert capsys.readouterr().err == ""
    with progress.shown_progress() as show:
        show(Progress("upload", 25 << 20, 100 << 20))
    assert "25 MiB of 100 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["aof2", "/aof2", "-o", "rw,conf=/x"], ["mount", "--quiet", "-o", "rw,conf=/x", "--", "/aof2"]),
        (["/aof2", "-o", "rw"], ["mount", "--quiet", "-o", "rw", "--", "/aof2"]),
        (["aof2", "/aof2", "-v", "-t", "fuse.aof2"], ["mount", "--", "/aof2"]),
        (["aof2", "/aof2", "-sfn", "-orw", "-N", "3"], ["mount", "--quiet", "--fake", "-o", "rw", "--", "/aof2"]),
        (["frobnicate"], None),
        (["frobnicate", "--json"], None),
        (["a", "b", "/c"], None),
        (["aof2", "relative", "-o", "rw"], None),
        (["aof2", "/aof2", "-o"], None),
        (["aof2", "/aof2", "--json"], None),
    ],
)
def test_how_mount_calls(args: list[str], wanted: list[str] | None) -> None:
    assert as_mount_helper(args) == wanted


def test_a_verb_that_does_not_exist(tmp_path: Path) -> None:
    from tests.cli.logs import run

    result = run("frobnicate")
    assert result.exit_code == 2
    assert "No such command 'frobnicate'" in result.output
