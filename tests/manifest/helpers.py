"""What the manifest tests share: strategies for records, a stepped clock, a small log on disk."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.reader import Record, Stream
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)

PAYLOADS: st.SearchStrategy[p.Payload] = st.one_of(
    st.builds(p.SegmentOpened, U64, U32),
    st.builds(lambda a, b: p.SealSegment(a, b, None), U64, U64),
    st.builds(p.SealSegment, U64, U64, U64, U64, st.integers(0, 1)),
    st.builds(p.CompressionStarted, U32),
    st.builds(p.CompressionDone, U64, U32),
    st.builds(p.CompressionFailed, U32),
    st.builds(p.UploadStarted, KEYS),
    st.builds(p.UploadDone, KEYS, st.text(max_size=40)),
    st.builds(p.UploadFailed, KEYS, U32),
    st.builds(p.Tier2DeleteQueued, KEYS),
    st.builds(p.Tier2Deleted, KEYS),
    st.builds(p.HydrationStarted, U64),
    st.builds(p.HydrationDone, U64),
    st.builds(p.HydrationFailed, U32),
    st.builds(p.LocalEvicted, U64),
    st.builds(p.SnapshotMarker, U64, U64, U64),
    st.builds(p.CustomEvent, st.integers(2, 15), st.binary(max_size=60)),
)


class Clock:
    """A wall clock that moves only when told."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.ms = now_ms

    def __call__(self) -> int:
        return self.ms


def small(**changes: object) -> LogSettings:
    """The smallest chunks there are, so that a test rotates soon."""
    return LogSettings(**{"chunk_capacity": 16 << 10, **changes})  # type: ignore[arg-type]


def plain(records: list[Record]) -> list[tuple[object, ...]]:
    """Records without the log's own commit markers, as comparable tuples."""
    return [
        (r.ordinal, r.type_id, r.segment_id, r.logical_offset, r.timestamp_ms, r.payload)
        for r in records
        if not (r.type_id == 15 and r.payload[:4] == b"\1\0\0\0")
    ]


def written(directory: Path) -> list[tuple[object, ...]]:
    return plain(list(Stream(directory).records()))


def small_log(directory: Path, *, commits: int = 4, seal: bool = False) -> list[tuple[object, ...]]:
    """A log of one chunk with a few commits of mixed records, every commit synced; what is in it."""
    env = Env(now_ms=Clock())
    with ManifestLogWriter.open(env, directory, small()) as w:
        for i in range(commits):
            w.append(p.SegmentOpened(i * 100, 1), segment_id=i + 1)
            w.append(p.UploadDone(f"checkpoints/t/{i}/chunk", f"etag{i}"), segment_id=i + 1)
            w.append(p.SealSegment(i, i, 7, i, 0), segment_id=i + 1, logical_offset=i)
            w.commit()
        if seal:
            w.rotate()
    return written(directory)
