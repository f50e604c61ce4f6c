"""The driver's question to the daemon: put what was staged into the stream, once.

The mount.conf says where the daemon listens; it is looked for as the command does: the option `conf`, $AOF2_CONF,
./mount.conf, /etc/aof2/mount.conf. The answer may get lost and the question be asked again: the job's number makes it
the same job.

Owner: the driver. Crash: Spark commits again, or does not.
"""

from __future__ import annotations

import json
import os
import socket
import tomllib
from pathlib import Path
from typing import Any, Final

from aof2.engine.errors import Aof2Error

SILENCE_MAX_S: Final = 600.0
CONTROL_NAME: Final = "control.sock"


class DeliveryError(Aof2Error):
    """The daemon did not take the job: nothing of it is in the stream, unless it said so before."""


def conf_path(named: str) -> Path:
    here = Path("mount.conf")
    found = named or os.environ.get("AOF2_CONF", "")
    if found:
        return Path(found)
    return here if here.exists() else Path("/etc/aof2/mount.conf")


def deliver(conf: str, stream: str, job_id: str, files: list[tuple[str, str]], *, overwrite: bool) -> dict[str, Any]:
    """What the job brought: `first_offset`, `next_offset`, `records`."""
    path = conf_path(conf)
    try:
        volume = tomllib.loads(path.read_text())["volume"]
        mountpoint, state_dir = volume["mountpoint"], volume["state_dir"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as e:
        raise DeliveryError(f"{path}: no mount.conf that says which volume ({e}); name it by option conf") from None
    Path(stream).mkdir(parents=True, exist_ok=True)  # a directory of such a tenant is a stream
    inside = os.path.relpath(stream, mountpoint)
    if inside.startswith(".."):
        raise DeliveryError(f"{stream}: not below {mountpoint}, where {path} mounts; option conf names another")
    return ask(
        Path(state_dir, CONTROL_NAME), verb="deliver", path=inside, job_id=job_id, files=files, overwrite=overwrite
    )


def ask(control: Path, **question: object) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SILENCE_MAX_S)
        try:
            folder = os.open(control.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                client.connect(f"/proc/self/fd/{folder}/{control.name}")  # an address holds 107 bytes, a path more
            finally:
                os.close(folder)
            client.sendall(json.dumps(question).encode() + b"\n")
            with client.makefile("rb") as answers:
                for line in answers:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise DeliveryError(answer["error"])
                    if "result" in answer:
                        result: dict[str, Any] = answer["result"]
                        return result
        except OSError as e:
            raise DeliveryError(f"{control}: the daemon does not answer ({e}); is the volume mounted?") from None
    raise DeliveryError(f"{control}: the daemon hung up")
