"""rewrite: a sealed segment again, in another version. The only upgrade path: segments are never changed in place.

Invariants
- The source is verified before and the copy after; records keep payload, logical offset, timestamp, ext_id and flags.
- The copy appears under its name whole and sealed, or not at all.

Owner: one thread; the source is sealed, so no writer has it.

What a crash leaves behind: `<name>.tmp`, which recovery and the next call remove.

A stream's pointer keeps the old length when the file it names is replaced this way: the next recovery warns, opens
every segment and moves it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.segment.format import FOOTER_BYTES, HEADER_BYTES, RECORD_BYTES, FooterFlag, Version
from aof2.engine.segment.model import SealedSegment
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.writer import SegmentWriter

CRASH_POINTS: Final = ("segment.rewrite.renamed",)


def rewrite(
    env: Env,
    source: Path,
    target: Path,
    *,
    version: int = Version.V3,
    base_record_count: int | None = None,
    coordinator_watermark: int | None = None,
) -> SealedSegment:
    """Writes `source` to `target` (which may be the same path, and is replaced) in `version`.

    v2 keeps neither base_record_count nor coordinator_watermark: give them, or they become 0. LimitError: the records
    use what `version` does not have (v2: empty payloads, ext_ids).
    """
    temp = target.with_name(target.name + ".tmp")
    if temp.exists():
        env.files.unlink(temp)
    with SegmentReader(env, source) as reader:
        reader.verify()
        sealed = reader.sealed_segment()
        base = sealed.header.base_record_count if base_record_count is None else base_record_count
        watermark = sealed.footer.coordinator_watermark if coordinator_watermark is None else coordinator_watermark
        with _writer(env, temp, sealed, version, base) as writer:
            _copy(reader, writer)
            flags = sealed.footer.flags & ~int(FooterFlag.SEALED)
            copy = writer.seal(watermark, flush_failure=sealed.footer.flush_failure, flags=flags)
    with SegmentReader(env, temp) as check:
        if check.verify().record_count != sealed.record_count:
            raise CorruptError("the copy has another number of records", path=str(temp))
    env.files.rename(temp, target)
    env.failpoint("segment.rewrite.renamed")
    env.files.fsync_dir(target.parent)
    return SealedSegment(target, copy.header, copy.footer, copy.base_offset, copy.next_logical_offset)


def _writer(env: Env, path: Path, sealed: SealedSegment, version: int, base_record_count: int) -> SegmentWriter:
    old, new = Version(sealed.header.version), Version(version)
    records_bytes = sealed.durable_bytes - HEADER_BYTES[old] - sealed.record_count * RECORD_BYTES[old]
    size = HEADER_BYTES[new] + sealed.record_count * RECORD_BYTES[new] + records_bytes + FOOTER_BYTES[new]
    return SegmentWriter.create(
        env,
        path.parent,
        path=path,
        stream_id=sealed.header.stream_id,
        segment_id=sealed.segment_id,
        base_offset=sealed.base_offset,
        base_record_count=base_record_count,
        ext_id=sealed.footer.ext_id,
        version=new,
        capacity=max(sealed.header.max_size, size + 1),
    )


def _copy(reader: SegmentReader, writer: SegmentWriter) -> None:
    for r in reader.records():
        writer.append(
            r.payload,
            timestamp_ms=r.timestamp_ms,
            ext_id=r.ext_id,
            flags=r.flags,
            logical_offset=r.logical_offset,
        )
