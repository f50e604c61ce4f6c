"""AOF2 itself, through its command and a mount.conf, as a user mounts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from aof2.fs.bench import work
from aof2.fs.bench.contestants import START_S, Contestant, Setup
from aof2.fs.bench.process import StepError, is_mounted, unmount, wait_until

NAME = "aof2"
RANGED = "aof2 nopassthrough"
TENANT = "default"
CONF = """\
[volume]
mountpoint = "{mountpoint}"
state_dir = "{state}"
[remote]
url = "s3://{bucket}/volume"
endpoint_url = "{endpoint}"
region = "us-east-1"
[cache]
hot_bytes = {hot_bytes}
min_free = "1%"
[metrics]
listen = ""
[tenants.{tenant}]
kind = "files"
"""


class Aof2(Contestant):
    name = NAME
    options: tuple[str, ...] = ()

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.mountpoint = self.folder / "mnt"
        self.conf = self.folder / "mount.conf"
        self.conf.write_text(
            CONF.format(
                mountpoint=self.mountpoint,
                state=self.folder / "state",
                bucket=self.folder.name,
                endpoint=setup.server.endpoint_url,
                hot_bytes=setup.cache_bytes,
                tenant=TENANT,
            )
        )

    @property
    def directory(self) -> Path:
        return self.mountpoint / TENANT

    @property
    def control(self) -> Path:
        return self.folder / "state" / "control.sock"

    def start(self) -> None:
        self.mountpoint.mkdir(exist_ok=True)
        options = ["-o", ",".join(self.options)] if self.options else []
        self._aof2("mount", self.mountpoint, *options)
        wait_until(lambda: is_mounted(self.mountpoint), START_S, f"{self.name} is mounted")
        self.setup.processes.run(["stat", self.directory], deadline_s=START_S)

    def stop(self) -> None:
        """Without waiting for uploads: only this run needs what is in it."""
        if is_mounted(self.mountpoint):
            self._aof2("umount", self.mountpoint, "--no-wait")
        unmount(self.setup.processes, self.mountpoint)

    def settle(self) -> None:
        """Before it answers a verb, the daemon folds. This one costs least."""
        self.ask("cursors")

    def on_their_way(self, folder: Path) -> int:
        """Files of a folder that are not in the remote yet."""
        count: int = self.ask("status", path=self._path(folder))["tree"]["dirty_objects"]
        return count

    def until_remote(self, path: Path) -> None:
        self.ask("wait", paths=[self._path(path)])

    def drop(self, path: Path) -> None:
        self._aof2("evict", path)

    def _path(self, path: Path) -> str:
        return str(path.relative_to(self.mountpoint))

    def ask(self, verb: str, **arguments: object) -> Any:
        """What a command would ask the daemon, without the start of one."""
        try:
            return work.ask(str(self.control), verb, **arguments)
        except RuntimeError as e:
            raise StepError(f"{self.name}: {e}") from None

    def _aof2(self, verb: str, *arguments: str | Path) -> None:
        command = [Path(sys.executable).with_name("aof2"), verb, *arguments, "--conf", self.conf]
        environ = self.marked(self.setup.server.environ())
        self.setup.processes.run(command, deadline_s=self.setup.plan.deadline_s, env=environ)


class RangedAof2(Aof2):
    """The same with passthrough off: every read is answered by the daemon."""

    name = RANGED
    options = ("nopassthrough",)
