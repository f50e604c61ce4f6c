"""`aof2 bench names`: its loops, its tree, how it is judged, and a tiny run of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aof2.fs.bench import nameloops, names, tree
from aof2.fs.bench.contestants import Setup
from aof2.fs.bench.juicefs import JuiceFs
from aof2.fs.bench.process import Processes, StepError, is_mounted
from aof2.fs.bench.verdict import Outcome
from tests.cli.logs import objects, run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")


# -- the loops ---------------------------------------------------------------------------------------------------


def looped(*arguments: object) -> dict[str, float]:
    command = [sys.executable, nameloops.__file__, *(str(a) for a in arguments)]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


@pytest.mark.parametrize("processes", [1, 4])
def test_each_operation_finds_what_the_ones_before_left(tmp_path: Path, processes: int) -> None:
    for op in names.OPS:
        answer = looped(op.task, tmp_path / "d", processes, 8, op.first, op.second)
        assert answer["count"] == 8, op
        assert answer["seconds"] > 0
        if op.what == "setxattr":
            assert os.listxattr(tmp_path / "d/0/f000000") == ["user.bench"]
        if op.undo:
            looped(op.undo[0], tmp_path / "d", processes, 8, *op.undo[1:])
    assert sorted(tmp_path.glob("d/*/*")) == []
    assert len(list(tmp_path.glob("d/*"))) == processes


def test_an_operation_that_fails_fails_the_loop(tmp_path: Path) -> None:
    for processes in (1, 2):
        with pytest.raises(subprocess.CalledProcessError) as e:
            looped("unlink", tmp_path / "d", processes, 2, "f", "-")
        assert b"FileNotFoundError" in e.value.stderr.splitlines()[-1]


# -- the tree ----------------------------------------------------------------------------------------------------


def test_a_tree_is_made_up(tmp_path: Path) -> None:
    made = tree.prepare(tmp_path / "t", Processes(), None, 40)
    assert (made.files, made.changed) == (40, 23)
    for chore in tree.CHORES:
        for line in chore.lines(made, tmp_path / "clone"):
            subprocess.run(line, check=True, capture_output=True, env={**os.environ, **tree.GIT_ENVIRON})
        if chore.what == "git clone":
            assert len(list(tmp_path.glob("clone/part*/*.py"))) == 40
        if chore.what == "rm -rf":
            assert not (tmp_path / "clone").exists()
    assert len(list(tmp_path.glob("clone/part*/*.py"))) == 40


def test_a_repository_of_one_commit_cannot_be_checked_out_back_and_forth(tmp_path: Path) -> None:
    processes, folder = Processes(), tmp_path / "given"
    folder.mkdir()
    (folder / "a").write_text("a")
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        processes.run(["git", "-C", folder, *line], deadline_s=60, env=tree.GIT_ENVIRON)
    with pytest.raises(StepError, match="one commit only"):
        tree.prepare(tmp_path / "t", processes, folder, 0)


# -- verdicts ----------------------------------------------------------------------------------------------------


def test_a_busy_mount_stands_beside_the_others_as_they_were_idle() -> None:
    idle = Outcome({"ext4": 9.0, "bindfs": 3.0, "aof2": 4.0}, {"juicefs": "gone"}, {"aof2": 50.0})
    assert names._beside(Outcome({"aof2": 2.0}), idle) == Outcome(
        {"ext4": 9.0, "bindfs": 3.0, "aof2": 2.0}, {"juicefs": "gone"}
    )
    assert names._beside(Outcome({}, {"aof2": "broke"}), idle).failures == {"juicefs": "gone", "aof2": "broke"}


def test_what_a_change_costs_has_a_target_and_a_look_has_none() -> None:
    outcome = Outcome({"aof2": 4.0}, {}, {"aof2": 120.0, "bindfs": 10.0})
    ops = {op.what: op for op in names.OPS}
    (cost,) = names._cost(ops["chmod"], "1 process", outcome)
    assert (cost.what, cost.value, cost.ok) == ("chmod, 1 process, processor time", 120.0, False)
    assert names._cost(ops["stat, names dropped"], "1 process", outcome) == []
    assert names._cost(ops["chmod"], "1 process", Outcome({"aof2": 4.0})) == []


def test_juicefs_needs_a_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, takes_part in [(set(), False), ({"juicefs"}, False), ({"juicefs", "redis-server"}, True)]:
        monkeypatch.setattr(shutil, "which", lambda name, here=here: name if name in here else None)
        assert JuiceFs.on_path() is takes_part


FAKE_REDIS = """\
#!/bin/sh
exec {python} -c 'import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    client = server.accept()[0]
    client.recv(16)
    client.sendall(b"+PONG\\r\\n")' "$@"
"""
FAKE_JUICEFS = """\
#!/bin/sh
echo "$1 $SECRET_KEY" >> {said}
test "$1" = format && exit
for mountpoint; do :; done
mount -t tmpfs bench "$mountpoint"
exec sleep 60
"""


@needs_root
def test_juicefs_is_formatted_once_and_mounted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    for name, text in (("redis-server", FAKE_REDIS), ("juicefs", FAKE_JUICEFS)):
        (programs / name).write_text(text.format(python=sys.executable, said=said))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    server: Any = SimpleNamespace(endpoint_url="http://127.0.0.1:1", environ=dict, access_key="A", secret_key="S")
    processes = Processes()
    contestant = JuiceFs(Setup(tmp_path, server, processes, names.QUICK))
    try:
        contestant.start()
        assert is_mounted(contestant.mountpoint)
        contestant.drop(contestant.directory)
        contestant.stop()
        assert not is_mounted(contestant.mountpoint)
    finally:
        contestant.stop()
        processes.end_all()
    assert said.read_text().splitlines() == ["format S", "mount S", "mount S"]


# -- command line and runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "rclone"], "rclone: choose from bindfs"),
        (["--only", "two"], "two: choose from one, four, tree"),
        (["--tree", "/nowhere"], "does not exist"),
        (["--changes", "3"], "--changes"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = run("bench", "names", *arguments)
    assert result.exit_code == 2
    assert message in result.output


TINY = (
    "bench",
    "names",
    "--quick",
    "--changes",
    "8",
    "--files",
    "20",
    "--peers",
    "none",
    "--only",
    "four,tree",
    "--json",
)


@needs_root
def test_tiny_run_with_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*TINY)
    assert result.exit_code == 0, result.output
    found = objects(result)
    for row in found:
        assert row["value"] is not None, str(row)
    whats = {row["what"] for row in found}
    assert {"stat, names dropped, 4 processes, files on their way to S3", "git clone, 200 files"} <= whats
    assert {row["what"] for row in found if row["target"] == names.COST_US_MAX} == {
        f"{op.what}, 4 processes, processor time" for op in names.OPS if not op.asks
    }
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs is not installed")
def test_tiny_run_beside_bindfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("bench", "names", "--quick", "--changes", "8", "--only", "four", "--without-aof2", "--json")
    assert result.exit_code == 0, result.output
    beside = [row for row in objects(result) if row["baseline"] == "bindfs"]
    assert len(beside) == len(names.OPS)
    assert all(row["baseline_value"] for row in beside), str(beside)
    assert {row["target"] for row in beside} == {1.0, 2.0}
