"""What of the remote is read to be proven, cut into pieces that any thread, process or machine can check by itself.

A piece has all that its check needs but the store; the answer is short where nothing is wrong. `run.py` checks pieces
on threads, Spark's tasks check them on executors (`engine/spark/pipelines/verify.py`): the same function and words.

Invariants
- Reads only. A few blocks of a blob, or one object of the log, are in memory.

Owner: pieces are values; `check_piece` blocks, any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, ChunkFlag, unpack_chunk_header
from aof2.engine.manifest.reader import parse_chunk, read_file, split_bundle
from aof2.engine.manifest.snapshot import decode_snapshot
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import ManifestBundleKey, ManifestChunkKey, ManifestSnapshotKey, parse_key
from aof2.engine.remote.prover import prove
from aof2.engine.remote.store import RemoteStore


class BlobPiece(NamedTuple):
    """A blob: `sha256` of its content; `sealed`, a chunk of that content; `resident`: its id where it is whole on the
    disk of the volume, 0 for none."""

    stream_id: int
    blob: BlobRow
    sha256: bytes
    sealed: ChunkRow | None
    resident: int

    @property
    def key(self) -> str:
        return self.blob.key

    @property
    def work_bytes(self) -> int:
        return self.blob.stored_bytes


class LogPiece(NamedTuple):
    """An object of a log. `here`: the same chunk on this disk, "" where it is not to be compared."""

    stream_id: int
    key: str
    here: str
    work_bytes: int = 1 << 18


Piece = BlobPiece | LogPiece


class Checked(NamedTuple):
    """`wrong`: a whole line, "" for nothing; `missing`: the object is not there, which the listing tells. `blobs`, of
    so many `bytes`: proven."""

    wrong: str = ""
    missing: bool = False
    blobs: int = 0
    bytes: int = 0


def check_piece(store: RemoteStore, piece: Piece) -> Checked:
    """TransientError where the remote cannot be asked."""
    try:
        if isinstance(piece, BlobPiece):
            prove(store, piece.blob, piece.sha256, piece.sealed)
            return Checked(blobs=1, bytes=piece.blob.stored_bytes)
        return Checked(wrong=_log_object(store, piece.key, piece.here))
    except RemoteMissingError:
        return Checked(missing=True)
    except (CorruptError, UnsupportedError) as e:
        return Checked(wrong=str(e))


def _log_object(store: RemoteStore, key: str, here: str) -> str:
    _, data = store.get_blob(key)
    match parse_key(key):
        case ManifestChunkKey(_, index):
            parse_chunk(data, path=key, last=False, expect_index=index)
            try:
                same = not here or _same_chunk(read_file(Path(here)), data)
            except FileNotFoundError:
                return ""
            return "" if same else f"{key}: diverges from {here}"
        case ManifestBundleKey(_, first, last):
            parts = split_bundle(len(data), lambda at: data[at : at + CHUNK_HEADER_LEN], first, last, path=key)
            for index, start, length in parts:
                parse_chunk(data[start : start + length], path=key, last=False, expect_index=index)
        case ManifestSnapshotKey():
            decode_snapshot(data, path=key)
    return ""


def _same_chunk(here: bytes, there: bytes) -> bool:
    """The same but for the `uploaded` flag, which is set on this disk once the copy is there."""
    a, b = (unpack_chunk_header(data[:CHUNK_HEADER_LEN]) for data in (here, there))
    flags = ~int(ChunkFlag.UPLOADED)
    same_header = a._replace(flags=a.flags & flags) == b._replace(flags=b.flags & flags)
    end = a.committed_len
    return same_header and here[CHUNK_HEADER_LEN:end] == there[CHUNK_HEADER_LEN:end]
