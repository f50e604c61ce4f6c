"""JuiceFS with a Redis of its own for the names, where both programs are on PATH; neither is installed.

Owner: the calling thread. The Redis keeps nothing on disk and is ended with the run.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress

from aof2.fs.bench.contestants import START_S, Mounted, Setup
from aof2.fs.bench.process import wait_until
from aof2.fs.bench.seaweed import free_ports

PING_S = 5.0


class JuiceFs(Mounted):
    """`juicefs mount`: uploads a file before its close returns."""

    name = "juicefs"
    programs = (name, "redis-server")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.port = str(free_ports(1)[0])
        self.names = f"redis://127.0.0.1:{self.port}/1"
        self.redis: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        megabytes = str(self.setup.cache_bytes >> 20)
        options = ["--no-usage-report", "--enable-xattr", "--cache-dir", str(self.cache), "--cache-size", megabytes]
        return [self.name, "mount", *options, self.names, str(self.mountpoint)]

    def environ(self) -> dict[str, str]:
        server = self.setup.server
        return {**super().environ(), "ACCESS_KEY": server.access_key, "SECRET_KEY": server.secret_key}

    def start(self) -> None:
        if self.redis is None:
            self._start_redis()
            bucket = f"{self.setup.server.endpoint_url}/{self.name}"
            line = [self.name, "format", "--storage", "s3", "--bucket", bucket, self.names, self.name]
            self.setup.processes.run(line, deadline_s=START_S, env=self.environ())
        super().start()

    def _start_redis(self) -> None:
        line = ["redis-server", "--bind", "127.0.0.1", "--port", self.port, "--save", "", "--dir", str(self.folder)]
        environ = self.marked({})  # its processor time is JuiceFS's
        self.redis = self.setup.processes.spawn(line, self.folder / "redis.log", environ)
        wait_until(self._answers, START_S, "redis-server answers")

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(self.port)), PING_S) as client:
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        return False
