"""Whether the remote has exactly the blob that a row describes: the one place where a blob's bytes are proven.

    check_size     one HEAD: there, and as long as it should be
    find           one short read: a blob that was put and not recorded says itself what it holds
    prove          every byte streamed: footer, each frame, the SHA-256 of the whole, and that they are what was sealed

RemoteMissingError and CorruptError (or UnsupportedError) say what is wrong; TransientError that it cannot be asked.

Invariants
- Reads only. A few blocks of a blob are in memory; nothing lands on the disk, so no quota is asked for.

Owner: blocking, any thread. A crash leaves nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from aof2.engine.blob.format import BlobFooter
from aof2.engine.blob.reader import BlobReader, check_identity, read_footer
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.errors import CorruptError
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import ChunkBlobKey, PackKey, chunk_blob_key, parse_key
from aof2.engine.remote.location import LocatedBlob
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.hashing import block_crc

HELD_BYTES: Final = 2 << 20


def named(chunk: ChunkRow, key: str) -> ChunkRow:
    """The chunk as the blob under this key speaks of it: the footer says under whose name it was first put, whichever
    chunk of that content it is made of now."""
    name = parse_key(key)
    if not isinstance(name, ChunkBlobKey):
        return chunk
    return msgspec.structs.replace(chunk, chunk_id=name.chunk_id, generation=name.generation)


def key_to_rebuild(chunk: ChunkRow, key: str) -> str:
    """Under which key the blob of this chunk's content is put again: its own; a member of a pack leaves that."""
    pack = parse_key(key)
    if not isinstance(pack, PackKey):
        return key
    return chunk_blob_key(pack.tenant, pack.checkpoint_id, chunk.chunk_id, chunk.generation, chunk.sha256)


def check_size(remote: RemoteStore, blob: BlobRow) -> None:
    info = remote.head_blob(blob.key)
    if info is None:
        raise RemoteMissingError(f"{blob.key}: missing in the remote")
    if not blob.location.fits(info.size):
        what = f"{info.size} bytes in the remote, its row says {blob.location.end}"
        raise CorruptError(what, path=blob.key)


def find(remote: RemoteStore, key: str, size: int, sha256: bytes) -> BlobFooter:
    """The footer of an object that is one blob of this content, by its own word."""
    footer = read_footer(partial(remote.get_range, key), size, path=key)
    check_identity(footer, sha256=sha256, path=key)
    return footer


def prove(remote: RemoteStore, blob: BlobRow, sha256: bytes, sealed: ChunkRow | None = None) -> BlobFooter:
    """`sealed`: a chunk of this content, whose checksums the blocks must have too. The footer of what is proven."""
    name = parse_key(blob.key)
    chunk_id, generation = (name.chunk_id, name.generation) if isinstance(name, ChunkBlobKey) else (None, None)
    read = LocatedBlob(remote, blob.location).read
    if blob.stored_bytes <= HELD_BYTES:  # one request for all of a small one
        held = memoryview(read(0, blob.stored_bytes))
        read = lambda start, length: bytes(held[start : start + length])  # noqa: E731
    reader = BlobReader(read, blob.stored_bytes, chunk_id=chunk_id, generation=generation, sha256=sha256, path=blob.key)
    for index, _ in enumerate(reader.blocks()):
        if sealed is not None and reader.footer.frames[index].raw_crc64 != block_crc(sealed.block_crcs, index):
            raise CorruptError(f"block {index} is not what was sealed as chunk {sealed.chunk_id}", path=blob.key)
    return reader.footer
