"""The mount that a pipeline works on, from the driver's machine: what is in it, and what its daemon is asked for.

Owner: the driver. Crash: nothing is written here; the daemon finishes what it was asked for, or never began.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aof2.engine.spark.deliver import CONTROL_NAME, ask, conf_path
from aof2.engine.spark.pipelines.seam import PipelineError

APPEND_KIND: Final = "append"


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a job brought to a stream: records from the first offset up to before the second."""

    first_offset: int
    next_offset: int
    records: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount by its conf; `tenants`: the kind of each; `framed`: those whose records are what a write brought."""

    conf: str
    mountpoint: str
    state_dir: str
    tenants: dict[str, str]
    framed: frozenset[str] = frozenset()

    @classmethod
    def find(cls, named: str) -> Mounted | None:
        """None where there is no conf: what is read and written then is a disk's. One that was named must be there."""
        path = conf_path(named)
        if not path.exists() and not named and not os.environ.get("AOF2_CONF"):
            return None
        try:
            conf = tomllib.loads(path.read_text())
            volume = conf["volume"]
            tenants = conf.get("tenants", {})
            kinds = {name: keys.get("kind", "files") for name, keys in tenants.items()}
            framed = frozenset(name for name, keys in tenants.items() if keys.get("framing", "line") != "line")
            return cls(str(path), os.path.realpath(volume["mountpoint"]), volume["state_dir"], kinds, framed)
        except (OSError, KeyError, tomllib.TOMLDecodeError) as e:
            raise PipelineError(f"{path}: no mount.conf that says which volume ({e}); name it by --conf") from None

    def inside(self, path: str) -> str | None:
        """A path as the daemon knows it; None where it is not in this mount."""
        below = os.path.relpath(os.path.realpath(path), self.mountpoint)
        return None if below == ".." or below.startswith("../") else below

    def holds_streams(self, path: str) -> bool:
        """Whether a directory of that name is a stream."""
        below = self.inside(path)
        return below is not None and self.tenants.get(below.split("/")[0]) == APPEND_KIND

    def holds_lines(self, path: str) -> bool:
        """Whether a stream of that name has a record a line."""
        below = self.inside(path)
        return below is not None and self.holds_streams(path) and below.split("/")[0] not in self.framed

    def delivered(self, stream: str, job: str) -> Delivered | None:
        """What a job brought, if it did."""
        if not Path(stream).is_dir():
            return None
        done = self._ask("delivered", path=self._needed(stream), job_id=job)
        return Delivered(done["first_offset"], done["next_offset"], done["records"]) if done else None

    def wait(self, path: str) -> None:
        """Until everything below is in the remote."""
        self._ask("wait", paths=[self._needed(path)])

    def truncate(self, stream: str, before: int) -> dict[str, Any]:
        """Whole segments before an offset go; `segments` and `bytes` say how many."""
        return self._ask("truncate", path=self._needed(stream), before=before)

    def _needed(self, path: str) -> str:
        below = self.inside(path)
        if below is None:
            raise PipelineError(f"{path}: not below {self.mountpoint}, where {self.conf} mounts; --conf names another")
        return below

    def _ask(self, verb: str, **question: object) -> dict[str, Any]:
        return ask(Path(self.state_dir, CONTROL_NAME), verb=verb, **question)
