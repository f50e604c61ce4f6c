"""The writer's look at what was delivered: every object that a commit names is there, whole, and what it says.

    an object of its own   one HEAD (size, checksum as it was put), one short GET (the footer)
    a pack                 one GET; each member is read and proven

A blob's frames are proven when it is put (the store refuses bytes that do not have the announced checksum) and by each
read of a block. Records of streams are read whole and checked one by one (`append/arriving.py`).

Invariants
- What comes out adds up: chunks as long as the volume's, of this job's numbers, of the content that the commit names.
- RefusedError says what is wrong, for good; TransientError that the remote cannot be asked now.
- Reads only; a pack a thread is in memory.

Owner: blocking, a worker thread and a few of its own. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.blob import pack
from aof2.engine.blob.format import BlobFooter, Codec
from aof2.engine.blob.reader import BlobReader, check_identity, read_footer
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.inbox.format import Commit, RefusedError, StagedBlob, StagedObject
from aof2.engine.inbox.stage import GENERATION
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import InboxBlobKey, is_pack, parse_key
from aof2.engine.remote.store import RemoteStore

PARALLEL: Final = 8
PACK_BYTES_MAX: Final = 64 << 20


class CheckedBlob(NamedTuple):
    """A chunk's content, and where it is in the remote."""

    sha256: bytes
    length: int
    crc64: int
    block_crcs: bytes
    key: str
    offset: int
    stored_bytes: int
    etag: str
    compression: str
    pack_bytes: int  # of the object, where blobs share it; 0: it has it for itself


class CheckedFile(NamedTuple):
    path: str
    size: int
    sha256: bytes
    chunks: tuple[CheckedBlob, ...]


class CheckedSegment(NamedTuple):
    payload: CheckedBlob
    index_blob: CheckedBlob
    records: int


class CheckedJob(NamedTuple):
    """A job of which everything is in the remote as it should be."""

    job_id: str
    to: str
    overwrite: bool
    files: tuple[CheckedFile, ...]
    segments: tuple[CheckedSegment, ...]


def check(commit: Commit, remote: RemoteStore, *, chunk_bytes: int, block_bytes: int) -> CheckedJob:
    """RefusedError: why nothing of it is published. Blocks."""
    blobs = [b for file in commit.files for b in file.blobs]
    blobs += [b for segment in commit.segments for b in (segment.payload, segment.index)]
    wanted: dict[int, list[StagedBlob]] = {}
    for blob in blobs:
        wanted.setdefault(blob.object, []).append(blob)
    look = partial(_look, remote, commit.tenant, block_bytes)
    with ThreadPoolExecutor(min(PARALLEL, len(wanted) or 1)) as pool:
        looks = pool.map(lambda at: look(commit.objects[at], wanted[at]), wanted)
        found = {number: one for some in looks for number, one in some.items()}
    files = tuple(
        _file(one.path, one.size, bytes.fromhex(one.sha256), [found[b.number] for b in one.blobs], chunk_bytes)
        for one in commit.files
    )
    segments = tuple(CheckedSegment(found[s.payload.number], found[s.index.number], s.records) for s in commit.segments)
    for segment in segments:
        for one in (segment.payload, segment.index_blob):
            _require(one.length <= chunk_bytes, f"{one.key}: {one.length} bytes, a segment's file is one chunk")
    return CheckedJob(commit.job_id, commit.to, commit.mode == "overwrite", files, segments)


def _file(path: str, size: int, sha256: bytes, chunks: list[CheckedBlob], chunk_bytes: int) -> CheckedFile:
    lengths = [chunk.length for chunk in chunks]
    _require(sum(lengths) == size, f"{path}: {size} bytes are said of it, its blobs have {sum(lengths)}")
    whole = all(length == chunk_bytes for length in lengths[:-1]) and all(0 < n <= chunk_bytes for n in lengths)
    _require(whole, f"{path}: its blobs are not chunks of {chunk_bytes} bytes")
    _require(len(chunks) != 1 or chunks[0].sha256 == sha256, f"{path}: its hash is not that of its content")
    return CheckedFile(path, size, sha256, tuple(chunks))


def _require(is_so: bool, reason: str) -> None:
    if not is_so:
        raise RefusedError(reason)


# -- one object --------------------------------------------------------------------------------------------------------


def _look(
    remote: RemoteStore, tenant: str, block_bytes: int, staged: StagedObject, blobs: Sequence[StagedBlob]
) -> dict[int, CheckedBlob]:
    try:
        in_pack = is_pack(staged.key)
        return (_in_pack if in_pack else _alone)(remote, tenant, block_bytes, staged, blobs)
    except RemoteMissingError:
        raise RefusedError(f"{staged.key}: missing in the remote") from None
    except (CorruptError, UnsupportedError) as e:
        raise RefusedError(f"a blob is damaged: {e}") from None


def _alone(
    remote: RemoteStore, _: str, block_bytes: int, staged: StagedObject, blobs: Sequence[StagedBlob]
) -> dict[int, CheckedBlob]:
    info = remote.head_blob(staged.key)
    if info is None:
        raise RemoteMissingError(staged.key)
    wrong = info.size != staged.size or info.crc64 not in (None, int(staged.crc64, 16))
    _require(not wrong, f"{staged.key}: it is not the object that the commit lists: size or checksum differ")
    _require(len({b.number for b in blobs}) == 1, f"{staged.key}: it is one blob, several are said to be in it")
    blob, name = blobs[0], parse_key(staged.key)
    _require((blob.offset, blob.length) == (0, staged.size), f"{staged.key}: it is one blob, all of it")
    footer = read_footer(partial(remote.get_range, staged.key), staged.size, path=staged.key)
    if isinstance(name, InboxBlobKey):
        check_identity(footer, chunk_id=name.chunk_id, generation=name.generation, sha256=name.sha256, path=staged.key)
    return {blob.number: _checked(footer, blob, staged, info.etag, block_bytes, 0)}


def _in_pack(
    remote: RemoteStore, tenant: str, block_bytes: int, staged: StagedObject, blobs: Sequence[StagedBlob]
) -> dict[int, CheckedBlob]:
    _require(staged.size <= PACK_BYTES_MAX, f"{staged.key}: a pack of {staged.size} bytes, {PACK_BYTES_MAX} at most")
    info, data = remote.get_blob(staged.key)
    wrong = info.size != staged.size or native.crc64(data) != int(staged.crc64, 16)
    _require(not wrong, f"{staged.key}: it is not the object that the commit lists: size or checksum differ")
    view = memoryview(data)
    pread: Callable[[int, int], bytes] = lambda at, length: bytes(view[at : at + length])  # noqa: E731
    members = {m.chunk_id: m for m in pack.read_directory(pread, len(data), tenant=tenant, path=staged.key)}
    found: dict[int, CheckedBlob] = {}
    for blob in blobs:
        one = members.get(blob.number)
        there = one is not None and (one.offset, one.stored_len) == (blob.offset, blob.length)
        _require(there, f"{staged.key}: blob {blob.number} is not in it there")
        body = view[blob.offset : blob.offset + blob.length]
        read: Callable[[int, int], bytes] = lambda at, length, body=body: bytes(body[at : at + length])  # type: ignore[misc]  # noqa: E731
        reader = BlobReader(read, blob.length, path=staged.key)
        for _ in reader.blocks():
            pass
        found[blob.number] = _checked(reader.footer, blob, staged, info.etag, block_bytes, staged.size)
    return found


def _checked(
    footer: BlobFooter, blob: StagedBlob, staged: StagedObject, etag: str, block_bytes: int, pack_bytes: int
) -> CheckedBlob:
    check_identity(
        footer, chunk_id=blob.number, generation=GENERATION, sha256=bytes.fromhex(blob.sha256), path=staged.key
    )
    _require(
        footer.block_bytes == block_bytes, f"{staged.key}: blocks of {footer.block_bytes}, not {block_bytes} bytes"
    )
    codecs = {frame.codec for frame in footer.frames}
    _require(Codec.HOLE not in codecs and footer.raw_len > 0, f"{staged.key}: a delivered blob has no holes")
    return CheckedBlob(
        footer.sha256,
        footer.raw_len,
        footer.raw_crc64,
        b"".join(frame.raw_crc64.to_bytes(8, "little") for frame in footer.frames),
        staged.key,
        blob.offset,
        blob.length,
        etag,
        "zstd" if Codec.ZSTD in codecs else "",
        pack_bytes,
    )
