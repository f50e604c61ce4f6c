"""One line out of what Spark says when it cannot start or a job fails: the cause, not the way it came.

A task's Python error comes with its traceback, inside a Java exception with its own, often twice; a query's comes with
its plan. The line that names the innermost error is what a user can act on.

Owner: pure, but for reading the log's end. Crash: nothing is written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LOG_END_BYTES: Final = 64 << 10
CAUSE_CHARS_MAX: Final = 400
_PYTHON_ERROR: Final = re.compile(r"^(?:[\w.]+\.)?(?:[A-Z]\w*(?:Error|Exception)): (\S.*)$", re.MULTILINE)
_ERROR_CLASS: Final = re.compile(r"^\[[A-Z0-9_.]+\] ", re.ASCII)
_SQL_STATE: Final = re.compile(r" ?SQLSTATE: \w+;?$")
_SAID: Final = re.compile(r"(?:Error|Exception)(?: in .*)?: |^Error:|^Exception in ", re.MULTILINE)


def cause_of(error: Exception, log: Path | None = None) -> str | None:
    """None where it is no error of Spark's: a bug, that keeps its traceback."""
    if not type(error).__module__.startswith(("pyspark.", "py4j.")):
        return None
    if type(error).__name__ == "PySparkRuntimeError" and "JAVA_GATEWAY_EXITED" in str(error):
        return f"Spark did not start: {_last_said(log)}"
    return _innermost(str(error))


def is_refusal(error: Exception) -> bool:
    """Whether Spark refused what it was asked before it began: its log has no more to say."""
    return type(error).__name__ in ("AnalysisException", "ParseException", "IllegalArgumentException")


def _innermost(text: str) -> str:
    found = [said for said in _PYTHON_ERROR.findall(text) if not said.startswith("An error occurred while calling")]
    line = found[-1] if found else next((line for line in text.splitlines() if line.strip()), "it did not say why")
    return _SQL_STATE.sub("", _ERROR_CLASS.sub("", line.strip()))[:CAUSE_CHARS_MAX]


def _last_said(log: Path | None) -> str:
    """The last line of the log that names an error; else its last line."""
    try:
        data = log.read_bytes()[-LOG_END_BYTES:] if log else b""
    except OSError:
        data = b""
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _SAID.search(line) and not line.startswith("at ")]
    return ((errors or lines or ["it said nothing"])[-1])[:CAUSE_CHARS_MAX]
