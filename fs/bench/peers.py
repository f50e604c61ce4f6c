"""The peers: other filesystems over the same server, or over a directory of the local disk."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from aof2.fs.bench.contestants import Mounted, Setup
from aof2.fs.bench.install import OF_PEER, find
from aof2.fs.bench.process import wait_until
from aof2.fs.bench.seaweed import free_ports, weed_binary

MIB = 1 << 20
RC_S = 10.0


class Rclone(Mounted):
    """`rclone mount --vfs-cache-mode full`: files in its cache, uploaded some seconds after they are closed."""

    name = "rclone"
    object_a_file = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.control = f"127.0.0.1:{free_ports(1)[0]}"

    def command(self) -> list[str]:
        return [
            find(OF_PEER["rclone"]) or "rclone", "mount", f"bench:{self.name}", str(self.mountpoint),
            "--vfs-cache-mode=full", f"--cache-dir={self.cache}", "--rc", f"--rc-addr={self.control}", "--rc-no-auth",
        ]  # fmt: skip

    def environ(self) -> dict[str, str]:
        remote = {
            "RCLONE_CONFIG": "",
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_BENCH_ENV_AUTH": "true",
            "RCLONE_CONFIG_BENCH_ENDPOINT": self.setup.server.endpoint_url,
        }
        return {**super().environ(), **remote}

    def until_remote(self, path: Path) -> None:
        wait_until(lambda: not self._uploads(), self.setup.plan.deadline_s, "rclone has uploaded everything", 0.2)

    def _uploads(self) -> int:
        request = urllib.request.Request(f"http://{self.control}/vfs/stats", b"", method="POST")
        with urllib.request.urlopen(request, timeout=RC_S) as answer:  # noqa: S310
            disk = json.load(answer)["diskCache"]
        return int(disk["uploadsInProgress"]) + int(disk["uploadsQueued"])


class S3fs(Mounted):
    """`s3fs -o use_cache`: uploads when a file is closed."""

    name = "s3fs"
    object_a_file = True

    def command(self) -> list[str]:
        options = [
            f"url={self.setup.server.endpoint_url}", "use_path_request_style", f"use_cache={self.cache}",
            f"tmpdir={self.folder}", "max_stat_cache_size=1000000", "endpoint=us-east-1",
        ]  # fmt: skip
        return ["s3fs", self.name, str(self.mountpoint), "-f", *(f"-o{option}" for option in options)]


class Weed(Mounted):
    """`weed mount`: SeaweedFS's own client, past the S3 side of the server; uploads while writing."""

    name = "weed"
    object_a_file = True

    def command(self) -> list[str]:
        ports = self.setup.server.ports
        return [
            weed_binary(), f"-logdir={self.folder}", "mount", f"-dir={self.mountpoint}", f"-cacheDir={self.cache}",
            f"-filer=127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}", f"-filer.path=/buckets/{self.name}",
            f"-cacheCapacityMB={self.setup.cache_bytes // MIB}", f"-localSocket={self.folder}/mount.sock",
        ]  # fmt: skip

    def requests(self) -> int | None:
        return None

    def fetched_bytes(self) -> int | None:
        """What the process read from anywhere: a little more than what it fetched."""
        if self.daemon is None:
            return None
        for line in Path(f"/proc/{self.daemon.pid}/io").read_text().splitlines():
            if line.startswith("rchar:"):
                return int(line.split()[1])
        return None


class Geesefs(Mounted):
    """`geesefs`: uploads in the background, many small objects at a time."""

    name = "geesefs"
    programs = (name,)
    object_a_file = True

    def command(self) -> list[str]:
        return [
            self.name, "-f", f"--endpoint={self.setup.server.endpoint_url}", "--region=us-east-1",
            f"--cache={self.cache}", self.name, str(self.mountpoint),
        ]  # fmt: skip

    def until_remote(self, path: Path) -> None:
        """fsync of a directory uploads what is below it."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class MountS3(Mounted):
    """`mount-s3`: uploads while a file is written, whole before its close returns."""

    name = "mount-s3"
    programs = (name,)
    object_a_file = True

    def command(self) -> list[str]:
        return [
            self.name, "--foreground", f"--endpoint-url={self.setup.server.endpoint_url}", "--region=us-east-1",
            "--force-path-style", "--allow-delete", "--allow-overwrite", f"--cache={self.cache}",
            self.name, str(self.mountpoint),
        ]  # fmt: skip


class PassthroughHp(Mounted):
    """libfuse's example of a fast filesystem: a directory of the local disk, passed through, with nothing recorded."""

    name = "passthrough_hp"
    programs = (name,)
    bucket = False

    def command(self) -> list[str]:
        return [self.name, "--foreground", str(self.cache), str(self.mountpoint)]


class Bindfs(Mounted):
    """`bindfs`: a directory of the local disk seen through FUSE, by path, with nothing recorded."""

    name = "bindfs"
    bucket = False

    def command(self) -> list[str]:
        return [self.name, "-f", str(self.cache), str(self.mountpoint)]

    def drop(self, path: Path) -> None:
        """Its files are the cache: there is nothing else to fetch them from."""
