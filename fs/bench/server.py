"""The S3 server of a run: SeaweedFS with a bucket for each contestant, so that it can say what it sent to whom.

Owner: the calling thread. The server dies with this process.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aof2.fs.bench.process import StepError
from aof2.fs.bench.seaweed import REGION, Seaweed, free_ports

METRICS_FLAG = "metricsPort"
METRICS_S = 10.0


@contextmanager
def running_server(folder: Path, buckets: list[str]) -> Iterator[Seaweed]:
    server = Seaweed(folder)
    server.ports[METRICS_FLAG] = free_ports(1)[0]
    server.start()
    try:
        client = _client(server)
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
        client.close()
        yield server
    finally:
        server.stop()


def _client(server: Seaweed) -> Any:
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name=REGION,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def sent_bytes(server: Seaweed, bucket: str) -> int:
    """What the S3 side of the server has sent from a bucket so far, by its own count."""
    url = f"http://127.0.0.1:{server.ports[METRICS_FLAG]}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=METRICS_S) as answer:
            return parse_sent(answer.read().decode(), bucket)
    except OSError as e:
        raise StepError(f"the server's metrics: {e}") from None


def parse_sent(text: str, bucket: str) -> int:
    pattern = rf'^SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{re.escape(bucket)}"}} (\S+)$'
    found = re.search(pattern, text, re.MULTILINE)
    return int(float(found[1])) if found else 0
