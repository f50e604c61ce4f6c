"""Packs: a directory that adds up or is refused, whatever is done to it."""

from __future__ import annotations

import random
import struct

import pytest

from aof2.engine.blob import pack
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.native import crc64

TENANT = "default"


def build(raws: list[bytes], *, tenant: str = TENANT) -> tuple[bytes, list[pack.Member]]:
    out = bytearray()
    members: list[pack.Member] = []
    for i, raw in enumerate(raws):
        at = len(out)
        writer = BlobWriter(out.extend, chunk_id=10 + i, generation=1 + i)
        if raw:
            writer.add_block(raw)
        members.append(pack.member_of(writer.finish(), at))
    out += pack.encode_directory(members, pack.name_hash(tenant, members))
    return bytes(out), members


def read(data: bytes, *, tenant: str = TENANT) -> list[pack.Member]:
    return pack.read_directory(lambda o, n: data[o : o + n], len(data), tenant=tenant)


def resealed(data: bytearray) -> bytes:
    """With a crc that is right again: a lie, not damage."""
    length = pack.needed_tail(bytes(data), len(data))
    data[-8:] = struct.pack("<Q", crc64(memoryview(data)[len(data) - length : -8]))
    return bytes(data)


SAMPLE = [b"A" * 500, b"", random.Random(1).randbytes(3000), b"x"]


@pytest.mark.parametrize("count", [0, 1, 4, 1000])
def test_a_directory_comes_back(count: int) -> None:
    data, members = build([SAMPLE[i % 4] + str(i).encode() for i in range(count)])
    assert read(data) == members


@pytest.mark.parametrize("gone", [1, 8, 79, 80, 100, 432, 1000])
def test_a_pack_cut_short_is_corrupt(gone: int) -> None:
    data, _ = build(SAMPLE)
    with pytest.raises(CorruptError):
        read(data[:-gone])


def test_every_bit_of_the_directory_counts() -> None:
    data, members = build(SAMPLE)
    start = members[-1].offset + members[-1].stored_len
    for at in range(start, len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises((CorruptError, UnsupportedError)):
            read(bytes(bad))


def test_another_tenants_pack_is_told_apart() -> None:
    data, _ = build(SAMPLE)
    with pytest.raises(CorruptError, match="not the one of tenant other"):
        read(data, tenant="other")


def test_lies_under_a_right_checksum() -> None:
    data, members = build(SAMPLE)
    start = members[-1].offset + members[-1].stored_len
    entry = pack.ENTRY.size

    def lying(at: int, value: int, form: str = "<Q") -> bytes:
        bad = bytearray(data)
        struct.pack_into(form, bad, start + at, value)
        return resealed(bad)

    swapped = bytearray(data)
    swapped[start : start + entry], swapped[start + entry : start + 2 * entry] = (
        data[start + entry : start + 2 * entry],
        data[start : start + entry],
    )
    for bad in (
        resealed(swapped),
        lying(0, 99),  # chunk id
        lying(16, 5),  # offset
        lying(24, 2),  # stored_len
        lying(24, 2**63),
        lying(4 * entry + 24, 3),  # member_count
        lying(4 * entry + 24, 2**60),
        lying(4 * entry + 32, len(data) - 1),  # pack_len
        lying(4 * entry + 40, 1),  # name_hash
    ):
        with pytest.raises(CorruptError):
            read(bad)
    for bad in (lying(40, 2, "<I"), lying(44, 1, "<I"), lying(4 * entry + 8, 2, "<I"), lying(4 * entry + 12, 1, "<I")):
        with pytest.raises(UnsupportedError):
            read(bad)


def test_a_footer_as_long_as_it_says_and_no_longer() -> None:
    data, _ = build(SAMPLE)
    for claim in (0, 79, len(data) + 1, 2**64 - 1):
        bad = bytearray(data)
        struct.pack_into("<Q", bad, len(data) - 64, claim)
        with pytest.raises(CorruptError):
            read(bytes(bad))
