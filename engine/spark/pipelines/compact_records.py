"""Sealed segments of a stream into larger segments of another.

Payloads, `ext_id` and `flags` are kept, in their order; offsets, times and segments are the target's to give, which
makes its segments as large as its tenant says (`segment_bytes`). A run is one micro-batch of a query, and a job of the
target: the checkpoint knows how far the source was read, and a run that was killed is the same job when it runs again.

Invariants: the source is truncated only before the end of what is in the target and in the remote.

Owner: the driver. Crash: staged files, swept after a day; the checkpoint tells where to go on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from aof2.engine.spark.pipelines import ingest
from aof2.engine.spark.pipelines.compact import Compaction, Done
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.seam import PipelineError
from aof2.engine.spark.streams import StreamDirectory


def compact(work: Compaction) -> Done:
    asked = work.asked
    if not asked.checkpoint:
        raise PipelineError("name a folder by --checkpoint: it is what tells how far the stream was read")
    if asked.schema or asked.select or asked.layout.partition_by:
        raise PipelineError("records are taken as they are: --schema, --select and --partition-by are for Parquet")
    before = StreamDirectory(asked.source).segments()
    taken = ingest.Arguments(
        target=asked.target,
        sources=[asked.source],
        format="aof2",
        into="records",
        trigger=ingest.AVAILABLE_NOW,
        checkpoint=asked.checkpoint,
        conf=asked.conf,
    )
    brought = ingest.run(work.session, taken, work.tell, work.env).report
    after = StreamDirectory(asked.target).segments()
    end = _end_of(asked.checkpoint, asked.source)
    done = Done(
        tally=Tally(brought["rows"], int(brought["checksum"], 16)),
        result=asked.target if brought["jobs"] else "",
        files_before=len(before),
        bytes_before=sum(segment.payload_bytes for segment in before),
        files_after=len(after),
        bytes_after=sum(segment.payload_bytes for segment in after),
    )
    if not asked.remove_sources or end is None:
        return done
    if work.mounted is None:
        raise PipelineError("--remove-sources: no mount.conf says which mount the stream is in; name it by --conf")
    work.until_durable(Path(asked.target))
    gone = work.mounted.truncate(asked.source, end)
    work.env.failpoint("compact.removed")
    return replace(done, removed=gone["segments"])


def _end_of(checkpoint: str, source: str) -> int | None:
    """The offset before which every record was brought: where the last micro-batch that is over ended."""
    commits = [int(path.name) for path in Path(checkpoint, "commits").glob("[0-9]*") if path.name.isdecimal()]
    if not commits:
        return None
    offsets = Path(checkpoint, "offsets", str(max(commits))).read_text().splitlines()
    found = json.loads(offsets[-1])  # a version, what Spark notes of the batch, a line for each source
    if source not in found:
        raise PipelineError(f"{checkpoint}: it is of another query, which read {', '.join(found)}")
    return int(found[source])
