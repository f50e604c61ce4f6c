"""The pack: blobs of small chunks, one behind the other, in one remote object, and behind them a directory of them.

    members    whole blobs (format.py), back to back from byte 0: each proves itself, and rows locate it as
               (key, offset, stored_len), so who reads a blob reads a member
    entries    member_count × 88 bytes: u64 chunk_id · u64 generation · u64 offset · u64 stored_len · u64 raw_len
               · u32 codec (0: all frames raw; 1: not) · u32 0 · u64 raw_crc64 · u8[32] sha256 of the raw chunk
    trailer    80 bytes, the last of the pack:
       0  u64 magic 0x414F46325041434B ("AOF2PACK")
       8  u32 version = 1            12  u32 flags = 0
      16  u64 footer_len             24  u64 member_count
      32  u64 pack_len               40  u8[32] name_hash
      72  u64 footer_crc64 over the entries and the trailer's bytes before it

Little-endian, packed. `name_hash` is the hash in the pack's key: the SHA-256 of the tenant's name and of chunk id,
generation and SHA-256 of each member, in order. It is known before a byte is read, so an upload has its key when it is
announced, and a retry with the same members puts the same pack under the same key.

Invariants
- decode_directory returns only what adds up: members are back to back, end where the directory starts, and hash to the
  name; each is at least a footer long. A pack that lies under another tenant's or another pack's key is CorruptError.
- A member is read by its row alone; the directory is for what no row speaks of any more, or not yet.

Versions: as of blobs. Magic, version, footer_len and footer_crc64 stay where they are.

Owner: pure functions, any thread. A crash leaves nothing here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

from aof2.engine.blob.format import BlobFooter, Codec, footer_len
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.native import Buffer, crc64

MAGIC: Final = 0x414F46325041434B
VERSION: Final = 1
ENTRY: Final = struct.Struct("<QQQQQIIQ32s")
TRAILER: Final = struct.Struct("<QIIQQQ32sQ")
NAME: Final = struct.Struct("<QQ32s")
MEMBERS_MAX: Final = 1 << 20
DIRECTORY_GUESS: Final = 64 << 10
_CRC: Final = struct.Struct("<Q")


class Member(NamedTuple):
    """One chunk of a pack, as its directory has it."""

    chunk_id: int
    generation: int
    offset: int
    stored_len: int
    raw_len: int
    compressed: bool
    raw_crc64: int
    sha256: bytes


class HasName(Protocol):
    """What a pack's name is made of, of each member."""

    @property
    def chunk_id(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def sha256(self) -> bytes: ...


def length_of(members: int, member_bytes: int) -> int:
    """Of a pack of so many members, which are so long together."""
    return member_bytes + members * ENTRY.size + TRAILER.size


def name_hash(tenant: str, members: Iterable[HasName]) -> bytes:
    names = (NAME.pack(one.chunk_id, one.generation, one.sha256) for one in members)
    return hashlib.sha256(b"".join((tenant.encode(), b"\0", *names))).digest()


def member_of(footer: BlobFooter, offset: int) -> Member:
    """The entry of a blob that lies at this offset."""
    compressed = any(frame.codec is not Codec.RAW for frame in footer.frames)
    return Member(
        footer.chunk_id,
        footer.generation,
        offset,
        footer.blob_len,
        footer.raw_len,
        compressed,
        footer.raw_crc64,
        footer.sha256,
    )


def encode_entry(member: Member) -> bytes:
    chunk_id, generation, offset, stored_len, raw_len, compressed, crc, sha256 = member
    return ENTRY.pack(chunk_id, generation, offset, stored_len, raw_len, int(compressed), 0, crc, sha256)


def entries_of(entries: Buffer) -> Iterator[Member]:
    """The members that packed entries speak of, unchecked."""
    for chunk_id, generation, offset, stored, raw, codec, _, crc, sha256 in ENTRY.iter_unpack(entries):
        yield Member(chunk_id, generation, offset, stored, raw, bool(codec), crc, sha256)


def encode_directory(members: Sequence[Member], hashed: bytes) -> bytes:
    end = members[-1].offset + members[-1].stored_len if members else 0
    return directory_of(b"".join(map(encode_entry, members)), end, hashed)


def directory_of(entries: Buffer, members_len: int, hashed: bytes) -> bytes:
    """The directory of members that are so long together, from their packed entries."""
    length = len(entries) + TRAILER.size
    count = len(entries) // ENTRY.size
    trailer = TRAILER.pack(MAGIC, VERSION, 0, length, count, members_len + length, hashed, 0)[: -_CRC.size]
    body = b"".join((entries, trailer))
    return body + _CRC.pack(crc64(body))


def read_directory(pread: Callable[[int, int], bytes], pack_len: int, *, tenant: str, path: str = "") -> list[Member]:
    """The checked directory of the pack of `pack_len` bytes: one read, a second only for many members."""
    guess = min(DIRECTORY_GUESS, pack_len)
    tail = pread(pack_len - guess, guess)
    need = needed_tail(tail, pack_len, path=path)
    if need > guess:
        tail = pread(pack_len - need, need)
    return decode_directory(tail, pack_len, tenant=tenant, path=path)


def needed_tail(tail: bytes, pack_len: int, *, path: str = "") -> int:
    """How many bytes of the pack's end decode_directory needs, told by its last 80."""
    if pack_len < TRAILER.size or len(tail) < TRAILER.size:
        raise CorruptError(f"a pack of {pack_len} bytes has no whole directory", path=path)
    at = pack_len - TRAILER.size
    magic, version, _, length, _, _, _, _ = TRAILER.unpack_from(tail, len(tail) - TRAILER.size)
    if magic != MAGIC:
        raise CorruptError(f"not a pack: trailer magic {magic:#018x}", path=path, offset=at)
    if version == 0:
        raise CorruptError("pack version 0", path=path, offset=at + 8)
    if not TRAILER.size <= length <= pack_len:
        raise CorruptError(f"pack directory of {length} bytes in {pack_len}", path=path, offset=at + 16)
    return int(length)


def decode_directory(tail: bytes, pack_len: int, *, tenant: str, path: str = "") -> list[Member]:
    """The directory at the end of `tail`, which is the end of a pack of `pack_len` bytes of that tenant."""
    length = needed_tail(tail, pack_len, path=path)
    if len(tail) < length:
        raise ValueError(f"the directory is {length} bytes long, the tail given {len(tail)}")
    start = pack_len - length
    view = memoryview(tail)[len(tail) - length :]
    _, version, flags, _, count, said_len, hashed, crc = TRAILER.unpack_from(view, length - TRAILER.size)

    def corrupt(what: str) -> CorruptError:
        return CorruptError(f"pack directory: {what}", path=path, offset=start)

    if crc64(view[: -_CRC.size]) != crc:
        raise corrupt("crc64 mismatch")
    if version != VERSION:
        raise UnsupportedError(f"pack version {version}", path=path)
    if flags:
        raise UnsupportedError(f"pack flags {flags:#x}", path=path)
    if said_len != pack_len:
        raise corrupt(f"it is of a pack of {said_len} bytes, this one has {pack_len}")
    if count > MEMBERS_MAX or length != count * ENTRY.size + TRAILER.size:
        raise corrupt(f"{count} members in {length} bytes")
    members: list[Member] = []
    for chunk_id, generation, offset, stored, raw, codec, zero, raw_crc, sha256 in ENTRY.iter_unpack(
        view[: count * ENTRY.size]
    ):
        if codec > 1 or zero:
            raise UnsupportedError(f"pack codec {codec:#x} of chunk {chunk_id}", path=path)
        if stored < footer_len(0):
            raise corrupt(f"chunk {chunk_id} is stored as {stored} bytes")
        members.append(Member(chunk_id, generation, offset, stored, raw, bool(codec), raw_crc, sha256))
    starts = list(accumulate((m.stored_len for m in members), initial=0))
    if any(m.offset != at for m, at in zip(members, starts, strict=False)) or starts[-1] != start:
        raise corrupt(f"members of {starts[-1]} bytes before a directory at {start}, or not back to back")
    if name_hash(tenant, members) != hashed:
        raise corrupt(f"it is not the one of tenant {tenant}, or not of these members")
    return members
