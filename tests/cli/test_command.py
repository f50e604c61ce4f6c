"""The command as a whole: help, errors as one line, exit codes, and a few runs of the installed program."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aof2.engine.errors import Aof2Error
from aof2.fs.cli import errors, main
from tests.cli.logs import flip, make_log, run

AOF2 = os.path.join(sys.prefix, "bin", "aof2")


def every_verb() -> Iterator[list[str]]:
    def walk(command: click.Command, path: list[str]) -> Iterator[list[str]]:
        if isinstance(command, click.Group):
            with click.Context(command) as ctx:
                for name in command.list_commands(ctx):
                    child = command.get_command(ctx, name)
                    assert child is not None
                    yield from walk(child, [*path, name])
        else:
            yield path

    return walk(main, [])


def test_the_verbs_there_are() -> None:
    verbs = {" ".join(verb) for verb in every_verb()}
    assert verbs >= {"bench formats", "manifest inspect", "manifest verify", "status", "verify", "why"}


@pytest.mark.parametrize("verb", list(every_verb()), ids=" ".join)
def test_help_has_an_example_and_json(verb: list[str]) -> None:
    result = run(*verb, "--help")
    assert result.exit_code == 0
    assert "Example: aof2 " + " ".join(verb) in result.stdout
    assert "--json" in result.stdout


def test_top_help_and_version() -> None:
    help_text = run("--help").stdout
    assert "manifest" in help_text
    assert "bench" in help_text
    assert run("--version").stdout == "aof2 0.1.0\n"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_missing_folder_or_a_file(tmp_path: Path, verb: str) -> None:
    for name, says in ((tmp_path / "no\nsuch", "no such directory"), (Path(__file__), "not a directory")):
        result = run("manifest", verb, name)
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("aof2: ")
        assert says in line


def test_usage_errors_are_clicks() -> None:
    assert run("nonsense").exit_code == 2
    assert run("manifest", "inspect").exit_code == 2
    assert run("manifest", "inspect", ".", "--from", "-1").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Aof2Error("what\nwhere"), 1, "aof2: what\\nwhere\n"),
        (
            PermissionError(errno.EACCES, "Not yours", "/x"),
            1,
            "aof2: /x: not yours; run as its owner\n",
        ),
        (OSError("odd"), 1, "aof2: odd\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_become_a_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as left, errors.reported():
        raise error
    assert left.value.code == code
    assert capsys.readouterr().err == line


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), errors.reported():
        raise ZeroDivisionError


def test_installed_program_inspects_and_verifies(tmp_path: Path) -> None:
    make_log(tmp_path)
    shown = subprocess.run([AOF2, "manifest", "inspect", tmp_path, "--json"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run("manifest", "inspect", tmp_path, "--json").stdout
    flip(tmp_path / "0.mlog", 64 + 40)
    checked = subprocess.run([AOF2, "manifest", "verify"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 1
    assert checked.stderr.count("\n") == 1
    assert "Traceback" not in checked.stderr


def test_closed_pipe_is_left_quietly(tmp_path: Path) -> None:
    make_log(tmp_path, 300)
    with subprocess.Popen(
        [AOF2, "manifest", "inspect", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline().startswith(b"chunk_index\t")
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == errors.EXIT_BROKEN_PIPE


def test_help_does_not_load_the_engine() -> None:
    code = "import sys; import aof2.fs.cli; print([m for m in ('rich', 'aof2.native', 'msgspec') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    make_log(tmp_path)
    with open("/dev/full", "wb") as full:
        done = subprocess.run([AOF2, "manifest", "verify", tmp_path], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no space left" in done.stderr
    closed = subprocess.run(["sh", "-c", f'"{AOF2}" manifest verify "{tmp_path}" >&-'], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
