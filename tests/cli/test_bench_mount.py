"""`aof2 bench mount`: its pure parts, that nothing outlives a run, and a tiny run of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from aof2.fs.bench import install, mount, rows, venue, work
from aof2.fs.bench.contestants import Contestant, Mounted
from aof2.fs.bench.fio import parse_fio, read_job
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.process import OWNER_NAME, Processes, StepError, is_mounted, mounts_under, wait_until
from aof2.fs.bench.race import Race
from aof2.fs.bench.seaweed import parse_sent
from aof2.fs.bench.verdict import Outcome, at_most, judge
from tests.cli.logs import objects, run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


# -- fio ---------------------------------------------------------------------------------------------------------


def report(**read: object) -> str:
    return "fio: a warning\n" + json.dumps({"jobs": [{"error": 0, "read": read}]})


def test_fio_report_after_a_warning() -> None:
    rates = parse_fio(report(bw_bytes=9_000_000, iops=2197.3, io_bytes=45_000_000, total_ios=10_986, clat_ns={}))
    assert (rates.bytes_per_s, rates.reads_per_s, rates.bytes_read, rates.reads) == (9e6, 2197.3, 45_000_000, 10_986)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "something else"),
        ("fio: no such file", "something else"),
        ('{"jobs": []}', "something else"),
        ('{"jobs": [{"error": 5}]}', "error 5"),
        (report(bw_bytes=0, iops=0, io_bytes=0, total_ios=0), "nothing"),
    ],
)
def test_fio_failures_are_steps_that_failed(text: str, reason: str) -> None:
    with pytest.raises(StepError, match=reason):
        parse_fio(text)


def test_everybody_has_the_same_job_but_for_the_path() -> None:
    one, other = (read_job(Path(p), threads=4, size=1 << 20, random_s=None) for p in ("/a", "/b"))
    assert [a for a, b in zip(one, other, strict=True) if a != b] == ["--filename=/a"]
    assert "--runtime=500ms" in read_job(Path("/a"), threads=1, size=1 << 20, random_s=0.5)


# -- verdicts ----------------------------------------------------------------------------------------------------


def shown(measured: list[Measurement]) -> list[tuple[object, ...]]:
    return [(m.value, m.baseline, m.baseline_value, m.target, m.ok, m.note) for m in measured]


def test_a_target_is_for_its_baseline_and_the_others_are_information() -> None:
    outcome = Outcome({"ext4": 10.0, "aof2": 9.0, "rclone": 3.0})
    assert shown(judge("w", "B/s", outcome, subject="aof2", targets={"ext4": 0.95})) == [
        (9.0, "ext4", 10.0, 0.95, False, ""),
        (9.0, "rclone", 3.0, None, None, ""),
    ]


def test_the_best_peer_is_the_fastest_of_them() -> None:
    outcome = Outcome({"aof2": 9.0, "rclone": 3.0, "weed": 4.0, "boto3": 10.0})
    found = judge("w", "B/s", outcome, subject="aof2", peers=["rclone", "weed"], targets={"best peer": 2, "boto3": 0.8})
    assert shown(found) == [
        (9.0, "rclone", 3.0, None, None, ""),
        (9.0, "weed, best peer", 4.0, 2, True, ""),
        (9.0, "boto3", 10.0, 0.8, True, ""),
    ]


def test_the_best_peer_may_have_a_target_of_its_own() -> None:
    found = judge("w", "B/s", Outcome({"aof2": 9.0, "weed": 4.0}), subject="aof2", peers=["weed"], targets={"weed": 3})
    assert shown(found) == [(9.0, "weed", 4.0, 3, False, "")]


def test_a_subject_that_failed_missed_its_targets_and_says_why() -> None:
    outcome = Outcome({"ext4": 10.0, "rclone": 1.0}, {"aof2": "no mount", "s3fs": "too slow"})
    assert shown(judge("w", "B/s", outcome, subject="aof2", targets={"ext4": 0.5})) == [
        (None, "ext4", 10.0, 0.5, False, "no mount"),
        (None, "rclone", 1.0, None, None, "no mount"),
        (None, "s3fs", None, None, None, "too slow"),
    ]
    assert shown(judge("w", "B/s", Outcome({}, {"aof2": "no mount"}), subject="aof2")) == [
        (None, "", None, None, False, "no mount")
    ]


def test_a_subject_that_was_not_asked_missed_nothing() -> None:
    assert shown(judge("w", "B/s", Outcome({"ext4": 10.0}), subject="aof2", targets={"ext4": 0.5})) == [
        (None, "ext4", 10.0, 0.5, None, "")
    ]


@pytest.mark.parametrize(
    ("outcome", "ok"),
    [
        (Outcome({"aof2": 3.0}), True),
        (Outcome({"aof2": 20.0}), False),
        (Outcome({}, {"aof2": "x"}), False),
        (Outcome(), None),
    ],
)
def test_less_than_a_limit(outcome: Outcome, ok: bool | None) -> None:
    assert at_most("w", "x", outcome, subject="aof2", limit=20)[0].ok is ok


def test_what_the_server_sent_is_read_by_bucket() -> None:
    text = (
        '# HELP x\nSeaweedFS_s3_bucket_traffic_sent_bytes_total{bucket="aof2"} 1.048576e+07\n'
        'SeaweedFS_s3_bucket_traffic_sent_bytes_total{bucket="aof2-x"} 5\n'
    )
    assert [parse_sent(text, bucket) for bucket in ("aof2", "aof2-x", "s3fs")] == [10_485_760, 5, 0]


def test_who_made_fewer_files_is_shown_with_their_number() -> None:
    row = Measurement(what="stat", unit="files/s", baseline="weed, best peer")
    for made, shown_as in [
        ({"aof2": 10, "weed": 10}, ("stat", "weed, best peer")),
        ({"aof2": 10, "weed": 4}, ("stat", "weed, best peer (4 files)")),
        ({"aof2": 3, "weed": 10}, ("stat (3 files)", "weed, best peer")),
    ]:
        counted = rows._with_counts(row, made, 10)
        assert (counted.what, counted.baseline) == shown_as


# -- turns -------------------------------------------------------------------------------------------------------


class Fake(Contestant):
    def __init__(self, name: str, rates: list[float | Exception], restarts: bool = True) -> None:
        self.name = name
        self.rates = rates
        self.restarts = restarts
        self.calls: list[str] = []

    def attempt(self) -> float:
        rate = self.rates.pop(0)
        if isinstance(rate, Exception):
            raise rate
        return rate

    def start(self) -> None:
        self.calls.append("start")
        if not self.restarts:
            raise StepError("gone")

    def stop(self) -> None:
        self.calls.append("stop")


def raced(*fakes: Fake, rounds: int = 3) -> tuple[Race, Outcome, list[str]]:
    order: list[str] = []

    def attempt(c: Contestant, _: int) -> float:
        order.append(c.name)
        assert isinstance(c, Fake)
        return c.attempt()

    race = Race(Processes(), fakes, rounds=rounds, deadline_s=5)
    return race, race.turns(attempt, fakes), order


def test_turns_go_back_and_forth_and_give_medians() -> None:
    _, outcome, order = raced(Fake("a", [1.0, 9.0, 2.0]), Fake("b", [4.0, 5.0, 6.0]))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert outcome == Outcome({"a": 2.0, "b": 5.0})


def test_what_a_turn_cost_is_its_own_processes_time() -> None:
    """For each unit, and of nobody else's process."""
    processes = Processes()
    busy = processes.spawn(["sh", "-c", "while :; do :; done"], Path(os.devnull), {OWNER_NAME: "a"})
    race = Race(processes, [], rounds=1, deadline_s=5)

    def attempt(c: Contestant, _: int) -> float:
        with race.metering(c) as meter:
            wait_until(lambda: processes.processor_s("a") > 0.3, 30, "it ran")
            meter.units = 10
        return 1.0

    race.processes.quiet = lambda deadline_s: None  # type: ignore[method-assign]
    try:
        outcome = race.turns(attempt, [Fake("a", []), Fake("b", [])])
    finally:
        busy.kill()
        busy.wait()
    assert outcome.costs_us["a"] > 0
    assert outcome.costs_us["b"] == 0


def test_idle_processes_are_quiet_and_busy_ones_until_the_deadline() -> None:
    processes = Processes()
    asleep = processes.spawn(["sleep", "60"], Path(os.devnull))
    processes.quiet(60.0)
    asleep.kill()
    asleep.wait()
    busy = processes.spawn(["sh", "-c", "while :; do :; done"], Path(os.devnull))
    processes.quiet(1.0)
    assert busy.poll() is None
    busy.kill()
    busy.wait()


def test_who_fails_sits_out_the_row_and_is_mounted_again() -> None:
    bad = Fake("a", [1.0, StepError("broke")])
    race, outcome, order = raced(bad, Fake("b", [4.0, 5.0, 6.0]))
    assert order == ["a", "b", "b", "a", "b"]
    assert outcome == Outcome({"b": 5.0}, {"a": "broke"})
    assert (bad.calls, race.out) == (["stop", "start"], {})


def test_who_cannot_be_mounted_again_is_out() -> None:
    bad = Fake("a", [OSError(5, "Input/output error")], restarts=False)
    race, outcome, _ = raced(bad)
    assert race.out == {"a": "gone"}
    assert race.turns(lambda c, n: 1.0, [bad]).failures == {"a": "gone"}
    assert outcome.failures == {"a": "[Errno 5] Input/output error"}


# -- processes and mounts ----------------------------------------------------------------------------------------


def test_a_step_past_its_deadline_is_killed() -> None:
    processes = Processes()
    start = time.monotonic()
    with pytest.raises(StepError, match=r"sh took longer than 0\.3 s"):
        processes.run(["sh", "-c", "sleep 60 & sleep 60"], deadline_s=0.3)
    assert time.monotonic() - start < 10
    wait_until(lambda: not processes.alive(), 5, "they are gone")


def test_a_step_that_fails_says_what_the_program_said() -> None:
    with pytest.raises(StepError, match="sh ended with 3: no luck"):
        Processes().run(["sh", "-c", "echo no luck >&2; exit 3"], deadline_s=10)
    with pytest.raises(StepError, match="no such file"):
        Processes().run(["/nowhere/aof2"], deadline_s=10)


def test_a_daemon_is_found_and_ended_and_nobody_else() -> None:
    processes, others = Processes(), Processes()
    bystander = others.spawn(["sleep", "60"], Path(os.devnull))
    processes.run(["sh", "-c", "setsid sleep 60 & exit 0"], deadline_s=10)
    assert len(processes.alive()) == 1
    processes.end_all()
    assert processes.alive() == []
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


class Stuck(Mounted):
    """A mount and a daemon that do not go by themselves."""

    name = "stuck"

    def command(self) -> list[str]:
        return ["sh", "-c", f"mount -t tmpfs bench '{self.mountpoint}'; trap '' TERM; while :; do sleep 1; done"]

    def environ(self) -> dict[str, str]:
        return {}

    def stop(self) -> None:
        raise StepError("I stay")


@needs_root
def test_whatever_happens_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a ü"  # the mount table spells spaces its own way
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(venue, "running_seaweed", no_server)
    monkeypatch.setattr(mount, "PEERS", {"stuck": Stuck})
    monkeypatch.setitem(install.OF_PEER, "stuck", install.Program("sh", "dash"))
    monkeypatch.setattr(rows, "prepare", lambda f: None)
    seen: list[bool] = []
    made: list[Processes] = []
    monkeypatch.setattr(mount, "Processes", lambda: made.append(Processes()) or made[0])

    def interrupted(f: rows.MountField) -> list[Measurement]:
        seen.extend(is_mounted(c.mountpoint) for c in f.peers if isinstance(c, Stuck))
        raise KeyboardInterrupt

    monkeypatch.setitem(rows.ROWS, "cold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mount.run(mount.Plan(size=1 << 20, peers=["stuck"], with_aof2=False, only=["cold"]), say=print)
    assert seen == [True]
    assert mounts_under(folder) == []
    assert made[0].alive() == []
    assert list(folder.iterdir()) == []


@contextmanager
def no_server(folder: Path, buckets: list[str]) -> Iterator[object]:
    yield SimpleNamespace(endpoint_url="", environ=dict)


# -- set-up and command line -------------------------------------------------------------------------------------


def test_a_missing_program_is_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(StepError, match="fio is not installed; run: sudo apt-get install -y fio"):
        install.ensure(install.FIO, Processes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "rclone,nfs"], "nfs: choose from rclone, s3fs, weed"),
        (["--only", "hot"], "hot: choose from resident"),
        (["--size", "10"], "whole MiB"),
        (["--size", "much"], "a size such as"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = run("bench", "mount", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_no_room_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("bench", "mount", "--size", "100TiB", "--only", "cold", "--peers", "none")
    assert result.exit_code == 1
    assert "needed; set TMPDIR" in result.output
    assert list(tmp_path.iterdir()) == []


TINY = ("bench", "mount", "--quick", "--size", "4MiB", "--files", "20", "--peers", "none", "--json")


@needs_fio
def test_tiny_run_of_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*TINY, "--without-aof2")
    assert result.exit_code == 0, result.output
    disk = venue.filesystem_of(tmp_path)
    measured = [(r["what"], r["baseline"], r["target"]) for r in objects(result)]
    assert measured[:8] == [
        ("resident sequential read, 1 thread", disk, 0.95),
        ("resident sequential read, 4 threads", disk, 0.95),
        ("resident 4 KiB random reads, 1 thread", disk, 0.85),
        ("resident 4 KiB random reads, 4 threads", disk, 0.85),
        ("resident sequential read, answered by the daemon", "", None),
        ("resident sequential read, passthrough off", "", None),
        ("write of a new 4 MiB file", disk, 0.9),
        ("write of a new 4 MiB file, with fsync", disk, None),
    ]
    assert ("first read of 4 MiB from S3", "boto3", 0.8) in measured
    assert ("creating 20 files of 4 KiB", disk, None) in measured
    assert list(tmp_path.iterdir()) == []


@needs_root
@needs_fio
def test_tiny_run_with_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*TINY)
    assert result.exit_code == 0, result.output
    for row in objects(result):
        assert row["value"], str(row)
    assert all("cost_us" in row for row in objects(result))
    assert any(row["cost_us"] for row in objects(result))
    assert list(tmp_path.iterdir()) == []


# -- the loops ---------------------------------------------------------------------------------------------------


def looped(*arguments: object) -> dict[str, float]:
    command = [sys.executable, work.__file__, *(str(a) for a in arguments)]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


def test_loops_do_what_they_say(tmp_path: Path) -> None:
    looped("write", tmp_path / "f", (3 << 20) + 5, 1, 1)
    assert (tmp_path / "f").stat().st_size == (3 << 20) + 5
    assert looped("read", tmp_path / "f")["bytes"] == (3 << 20) + 5
    looped("write", tmp_path / "g", (3 << 20) + 5, 2, 0)
    assert looped("checksum", tmp_path / "f") != looped("checksum", tmp_path / "g")
    assert looped("ranges", tmp_path / "f", 9, 65536, 3)["bytes"] == 9 * 65536
    assert looped("create", tmp_path / "d", 7, 60.0)["count"] == 7
    assert looped("stat", tmp_path / "d", 7)["count"] == looped("listing", tmp_path / "d")["count"] == 7
    assert looped("create", tmp_path / "e", 7, 0.0)["count"] == 0


def test_no_two_files_have_the_same_bytes(tmp_path: Path) -> None:
    assert looped("fill", tmp_path / "d", 40, 8, 4096, 1, 60.0)["count"] == 40
    assert looped("fill", tmp_path / "e", 40, 1, 4096, 2, 60.0)["count"] == 40
    assert looped("fill", tmp_path / "f", 40, 8, 4096, 1, 0.0)["count"] == 0
    contents = [path.read_bytes() for path in tmp_path.glob("?/*")]
    assert {len(content) for content in contents} == {4096}
    assert len(set(contents)) == 80


def test_commands_are_timed_and_a_failure_says_why(tmp_path: Path) -> None:
    lines = [["mkdir", str(tmp_path / "a")], ["touch", str(tmp_path / "a/b")]]
    assert looped("command", json.dumps(lines))["seconds"] > 0
    assert (tmp_path / "a/b").exists()
    race = Race(Processes(), [], rounds=1, deadline_s=30)
    with pytest.raises(StepError, match="no luck"):
        race.work("command", json.dumps([["sh", "-c", "echo no luck >&2; exit 3"]]))
