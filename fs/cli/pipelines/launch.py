"""A pipeline's session: started, its noise kept in a file, stopped; progress, summary and exit code.

The driver is this process: pyspark starts spark-submit with the options behind `--` (PYSPARK_SUBMIT_ARGS) and talks to
it. Where spark-submit started this process (`scripts/spark_NAME.py`), its session is used. A driver on the cluster
(`--deploy-mode cluster`) is no child of ours: spark-submit takes over with `submitted.py` as its application.

Owner: the main thread. Crash: Spark's log in a file under $TMPDIR; what a pipeline leaves, its module says.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click

from aof2.engine.errors import Aof2Error
from aof2.fs.cli import output
from aof2.fs.cli.errors import CliError, complain
from aof2.fs.cli.pipelines.causes import cause_of, is_refusal
from aof2.fs.cli.progress import shown_progress
from aof2.fs.cli.spark import SUBMIT_OPTIONS
from aof2.fs.control.protocol import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aof2.engine.spark.pipelines.seam import Summary, Tell

F = TypeVar("F", bound=Callable[..., Any])

SUBMITTED: Final = Path(__file__).with_name("submitted.py")
GATEWAY: Final = "PYSPARK_GATEWAY_PORT"  # set where spark-submit started this process


class Pipeline(Protocol):
    """A module of `engine/spark/pipelines`."""

    NAME: str

    def run(self, session: SparkSession, arguments: Any, tell: Tell) -> Summary: ...


def pipeline_options(command: F) -> F:
    """Adds `--json` and `--spark-log FILE`; the command hands them to `launch`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object.")
    log = click.option(
        "--spark-log",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Spark's own log goes there, and stays. Default: a temporary file, kept when the pipeline fails.",
    )
    return as_json(log(command))


def launch(pipeline: Any, arguments: Any, *, as_json: bool, spark_log: Path | None, failed_code: int = 1) -> None:
    """Runs a pipeline and ends the command: `failed_code` where it could not do its work."""
    options: list[str] = click.get_current_context().meta.get(SUBMIT_OPTIONS, [])
    try:
        check_installed()
        if _on_the_cluster(options):
            _submit(options)
        with shown_progress() as show, session(pipeline.NAME, options, spark_log) as started:
            summary = pipeline.run(started, arguments, _told(show))
    except (Aof2Error, OSError) as e:
        if failed_code == 1:
            raise
        from aof2.fs.wording import explain

        complain(explain(e))
        raise click.exceptions.Exit(failed_code) from None
    output.print_report(summary.report, summary.facts, as_json=as_json)
    for line in summary.complaints:
        complain(line)
    if summary.exit_code:
        raise click.exceptions.Exit(summary.exit_code)


def _told(show: Callable[[Progress], None]) -> Tell:
    """Not below spark-submit: it makes one of its application's errors and output, where `--json` is to be alone."""

    def tell(what: str, done: int, total: int, unit: str = "") -> None:
        if GATEWAY not in os.environ:
            show(Progress(what, done, total, unit))

    return tell


def check_installed() -> None:
    """CliError with the line to run where Spark, or its Java, is not here."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise CliError(f"Spark is not installed; run: {sys.executable} -m pip install 'aof2[spark]'")
    java_home = os.environ.get("JAVA_HOME", "")
    if shutil.which("java") is None and not Path(java_home, "bin", "java").is_file():
        raise CliError("there is no Java; run: sudo apt-get install -y default-jre-headless")


# -- the session


@contextlib.contextmanager
def session(name: str, options: list[str], spark_log: Path | None) -> Iterator[SparkSession]:
    """Spark, from its start to its end. What it says while a job fails becomes one line. Its log stays where that was
    asked for, or where the line names it."""
    log, named = spark_log or _temporary(), spark_log is not None
    started = None
    try:
        started = _started(name, options, log)
        yield started
    except (Aof2Error, OSError):
        raise
    except Exception as e:
        cause = cause_of(e, log)
        if cause is None:
            raise
        if is_refusal(e):
            raise CliError(cause) from None
        named = True
        raise CliError(f"{cause} (Spark's log: {log})") from None
    finally:
        if started is not None:
            started.stop()
        if not named:
            log.unlink(missing_ok=True)


def _temporary() -> Path:
    fd, name = tempfile.mkstemp(prefix="aof2-spark-", suffix=".log")
    os.close(fd)
    return Path(name)


def _started(name: str, options: list[str], log: Path) -> SparkSession:
    warnings.simplefilter("ignore")  # pyspark's imports warn about versions of its own dependencies
    from pyspark.sql import SparkSession

    if GATEWAY in os.environ:
        return SparkSession.builder.getOrCreate()
    os.environ["PYSPARK_PYTHON"] = _option(options, "spark.pyspark.python") or os.environ.get(
        "PYSPARK_PYTHON", sys.executable
    )
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*_defaults(name, options), *options, "pyspark-shell"])
    with _aside(log):
        return SparkSession.builder.getOrCreate()


def _defaults(name: str, options: list[str]) -> list[str]:
    """What is set unless the options say otherwise; spark-submit takes the last of two."""
    found = ["--name", f"aof2 {name}", "--conf", "spark.ui.showConsoleProgress=false"]
    if not any(option.split("=")[0] == "--master" for option in options):
        found += ["--master", "local[*]", "--conf", "spark.ui.enabled=false"]
    return found


def _option(options: list[str], key: str) -> str:
    """The value of a `--conf KEY=VALUE` among spark-submit's options."""
    return next((o.partition("=")[2] for o in reversed(options) if o.startswith(f"{key}=")), "")


@contextlib.contextmanager
def _aside(log: Path) -> Iterator[None]:
    """What is started inside has the log for its output and errors."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for fd in (1, 2):
            os.dup2(into, fd)
        yield
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(into)


# -- a driver on the cluster


def _on_the_cluster(options: list[str]) -> bool:
    if GATEWAY in os.environ:
        return False
    return "--deploy-mode=cluster" in options or ("--deploy-mode", "cluster") in pairwise(options)


def _submit(options: list[str]) -> None:
    """spark-submit takes this process's place; it runs the same command line on the cluster."""
    from pyspark.find_spark_home import _find_spark_home

    program = str(Path(_find_spark_home(), "bin", "spark-submit"))
    arguments = sys.argv[sys.argv.index("spark") + 1 :]
    del arguments[arguments.index("--") :]
    os.execv(program, [program, *options, str(SUBMITTED), *arguments])  # noqa: S606
