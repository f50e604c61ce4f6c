"""The one Spark session of a run (`sparkwork.py`), from the side that asks it.

Owner: the calling thread. The process carries the run's token, so that what ends the run ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from aof2.fs.bench.process import Processes, StepError, wait_until

SCRIPT: Final = Path(__file__).with_name("sparkwork.py")
START_S: Final = 120.0


def check_installed() -> None:
    """StepError with the line to run where Spark, or its Java, is not here."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise StepError(f"Spark is not installed; run: {sys.executable} -m pip install 'aof2[spark]'")
    if shutil.which("java") is None:
        raise StepError("there is no Java; run: sudo apt-get install -y default-jre-headless")


def connect(client: socket.socket, path: Path) -> None:
    """An address holds 107 bytes, a path more."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        client.connect(f"/proc/self/fd/{fd}/{path.name}")
    finally:
        os.close(fd)


class SparkProcess:
    """A session in a process of its own."""

    def __init__(self, processes: Processes, folder: Path, deadline_s: float) -> None:
        self._processes = processes
        self._folder = folder
        self._deadline_s = deadline_s
        self._socket = folder / "tasks"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Ready, its first job done."""
        log = self._folder / "log"
        command: list[str | Path] = [sys.executable, "-W", "ignore", SCRIPT, self._socket, self._folder / "local"]
        self._process = process = self._processes.spawn(command, log)
        wait_until(lambda: self._socket.exists() or process.poll() is not None, START_S, "Spark has started")
        if process.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()
            raise StepError(f"Spark did not start: {said[-1] if said else 'it said nothing'}")
        self.ask("count_prepared", 10, 10, 2)

    def ask(self, task: str, *arguments: object) -> dict[str, Any]:
        """What a task found, and how long it took."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(self._deadline_s)
            try:
                connect(client, self._socket)
                client.sendall(json.dumps([task, *arguments], default=str).encode() + b"\n")
                with client.makefile("rb") as answers:
                    line = answers.readline()
            except TimeoutError:
                raise StepError(f"Spark took longer than {self._deadline_s:g} s ({task})") from None
        answer: dict[str, Any] = json.loads(line or b'{"error": "Spark hung up"}')
        if "error" in answer:
            raise StepError(f"Spark, {task}: {answer['error']}")
        return answer
