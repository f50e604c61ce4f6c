"""`aof2 spark …`: its command line, the seam of the pipelines, and what is made of Spark's errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from aof2.engine.spark.pipelines.jobs import number_of, seen, still_there
from aof2.engine.spark.pipelines.mounted import Mounted
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.seam import PipelineError, Summary
from aof2.fs.cli.pipelines import launch as launching
from aof2.fs.cli.pipelines.causes import cause_of
from aof2.fs.cli.spark import PIPELINES
from tests.cli.logs import run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a pipeline was started with, instead of Spark."""
    found: dict[str, Any] = {}

    def instead(pipeline: Any, arguments: Any, **how: Any) -> None:
        options = click.get_current_context().meta["aof2.spark.submit_options"]
        found.update(name=pipeline.NAME, arguments=arguments, options=options, how=how)

    monkeypatch.setattr("aof2.fs.cli.pipelines.ingest.launch", instead)
    monkeypatch.setattr("aof2.fs.cli.pipelines.compact.launch", instead)
    return found


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_each_pipeline_has_help_and_a_file_for_spark_submit(name: str) -> None:
    result = run("spark", name, "--help")
    assert result.exit_code == 0
    assert f"Example: aof2 spark {name}" in result.output
    script = Path(__file__).parents[2] / "scripts" / f"spark_{name}.py"
    assert f'"spark", "{name}"' in script.read_text()
    assert name in run("spark", "--help").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["ingest"], "Missing argument"),
        (["ingest", "a", "b", "--option", "x"], "'x': it is KEY=VALUE"),
        (["ingest", "a", "b", "--checkpoint", "c"], "add --trigger"),
        (["ingest", "a", "b", "--trigger", "available-now"], "needs --checkpoint"),
        (["ingest", "a", "b", "--file-bytes", "many"], "--file-bytes"),
        (["ingest", "a", "b", "--file-bytes", "0"], "1 byte at least"),
        (["compact"], "Missing argument"),
        (["compact", "a", "b", "c"], "unexpected extra argument"),
        (["compact", "a", "b", "--as", "orc"], "'orc' is not one of"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = run("spark", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_what_is_read_from_the_command_line(recorded: dict[str, Any]) -> None:
    line = ["ingest", "s3a://bucket/a", "b", "c", "--option", "x=1=2", "--partition-by", "day=date(t)", "--json"]
    assert run("spark", *line, "--", "--master", "yarn", "--", "x").exit_code == 0
    assert recorded["options"] == ["--master", "yarn", "--", "x"]
    arguments = recorded["arguments"]
    assert arguments.sources == ["s3a://bucket/a", str(Path("b").absolute())]
    assert arguments.target == str(Path("c").absolute())
    assert (arguments.options, arguments.layout.partition_by) == ({"x": "1=2"}, ("day=date(t)",))
    assert recorded["how"] == {"as_json": True, "spark_log": None}
    assert run("spark", "compact", "a", "--remove-sources").exit_code == 0
    assert (recorded["name"], recorded["arguments"].target, recorded["options"]) == ("compact", "", [])


def test_the_options_of_spark_submit() -> None:
    assert "local[*]" in launching._defaults("ingest", [])
    assert "--master" not in launching._defaults("ingest", ["--master=spark://one:7077"])
    assert launching._option(["--conf", "spark.pyspark.python=/a=b"], "spark.pyspark.python") == "/a=b"
    assert launching._on_the_cluster(["--deploy-mode", "cluster"])
    assert not launching._on_the_cluster(["--deploy-mode", "client"])
    assert not launching._on_the_cluster([])


def test_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = run("spark", "compact", "a", "b")
    assert result.exit_code == 1
    assert "there is no Java; run: sudo apt-get install" in result.output


def test_how_a_pipeline_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipeline:
        NAME = "compact"

        @staticmethod
        def run(session: object, arguments: object, tell: Any) -> Summary:
            tell("write", 1, 2, "tasks")
            if arguments == "refused":
                raise PipelineError("it cannot be done; do another")
            return Summary({"rows": 3}, [("rows", "3")], complaints=["one is odd"], exit_code=4)

    class Session:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(launching, "session", Session)
    monkeypatch.setattr(launching, "check_installed", lambda: None)
    given: list[Any] = []
    monkeypatch.setattr(
        "aof2.fs.cli.pipelines.compact.launch", lambda _, __, **how: launching.launch(Pipeline, *given, **how)
    )
    given[:] = ["asked"]
    result = run("spark", "compact", "a", "b", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (4, '{"rows":3}\n', "aof2: one is odd\n")
    given[:] = ["refused"]
    result = run("spark", "compact", "a", "b")
    assert (result.exit_code, result.stderr) == (1, "aof2: it cannot be done; do another\n")


# -- parts of the seam ---------------------------------------------------------------------------------------------


def test_a_job_is_its_request_and_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a b.json"
    path.write_text("x")
    files = seen([path.as_uri(), "s3a://bucket/key"])
    assert files == [[str(path), 1, path.stat().st_mtime_ns], ["s3a://bucket/key"]]
    assert number_of("ingest", files) == number_of("ingest", seen([path.as_uri(), "s3a://bucket/key"]))
    assert still_there(files) == ""
    path.write_text("xy")
    assert still_there(files) == str(path)
    assert number_of("ingest", files) != number_of("ingest", seen([str(path), "s3a://bucket/key"]))
    path.unlink()
    assert still_there(files) == str(path)


def test_tallies_add_up() -> None:
    one = Tally.of({"rows": 2, "hash0": 5, "hash22": 1, "hash44": 2**20})
    assert one == Tally(2, (5 + (1 << 22)) % 2**64)
    assert Tally.of({"rows": 0, "hash0": None, "hash22": None, "hash44": None}) == Tally()
    assert Tally(1, 2**64 - 1) + Tally(1, 2) == Tally(2, 1)


def test_which_paths_are_in_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "mount.conf"
    conf.write_text('[volume]\nmountpoint = "/aof2"\nstate_dir = "/s"\n[tenants.events]\nkind = "append"\n')
    mounted = Mounted.find(str(conf))
    assert mounted is not None
    assert mounted.inside("/aof2/events/clicks/") == "events/clicks"
    assert mounted.inside("/aof2x") is None
    assert mounted.holds_streams("/aof2/events/clicks")
    assert not mounted.holds_streams("/aof2/default/clicks")
    with pytest.raises(PipelineError, match=r"no mount\.conf that says which volume"):
        Mounted.find(str(tmp_path / "other"))


class CapturedError(Exception):
    __module__ = "pyspark.errors.exceptions.captured"


SAID = """Job aborted due to stage failure: Task 0 in stage 1.0 failed: org.apache.spark.api.python.PythonException:
Traceback (most recent call last):
  File "/x/worker.py", line 1, in main
aof2.engine.errors.CorruptError: /aof2/events/clicks/.segments/5.idx: record 3 is damaged at byte 200

\tat org.apache.spark.api.python.BasePythonRunner(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (SAID, "/aof2/events/clicks/.segments/5.idx: record 3 is damaged at byte 200"),
        ("[PATH_NOT_FOUND] Path does not exist: file:/a. SQLSTATE: 42K03\n;", "Path does not exist: file:/a."),
        ("", "it did not say why"),
    ],
)
def test_the_cause_in_one_line(said: str, cause: str) -> None:
    assert cause_of(CapturedError(said)) == cause


def test_a_bug_keeps_its_traceback() -> None:
    assert cause_of(KeyError("x")) is None


def test_spark_that_does_not_start(tmp_path: Path) -> None:
    class PySparkRuntimeError(CapturedError):
        __module__ = "pyspark.errors.exceptions.base"

    log = tmp_path / "log"
    log.write_text("WARN something\nError: Unrecognized option: --bogus\n\tat here\n")
    found = cause_of(PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited"), log)
    assert found == "Spark did not start: Error: Unrecognized option: --bogus"
    assert cause_of(PySparkRuntimeError("[JAVA_GATEWAY_EXITED] …")) == "Spark did not start: it said nothing"
