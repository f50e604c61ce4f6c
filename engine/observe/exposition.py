"""Prometheus' text format (version 0.0.4), with counters named as their samples are.

prometheus-client's `generate_latest` writes `# TYPE x_total counter` over a sample called `x`. Here the header carries
the name the sample has.

Owner: pure functions. Crash: nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render(metrics: Iterable[Metric]) -> bytes:
    return "".join(line for metric in metrics for line in _family(metric)).encode()


def number(value: float) -> str:
    """As Prometheus spells floats."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _family(metric: Metric) -> Iterator[str]:
    samples = [s for s in metric.samples if not s.name.endswith("_created")]
    if not samples:
        return
    name = samples[0].name if metric.type == "counter" else metric.name
    kind = "untyped" if metric.type == "unknown" else metric.type
    documentation = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"
    for sample in samples:
        yield f"{sample.name}{_labels(sample)} {number(sample.value)}\n"


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(sample.labels.items())) + "}"


def _escape(value: str) -> str:
    clean = value.encode("utf-8", "backslashreplace").decode()
    return clean.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
