"""Checksums: known answers, every length and alignment of every kernel, chaining, combining."""

from __future__ import annotations

import mmap
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2 import native
from aof2.native import reference
from tests.native.support import noise

LENGTH_MAX = 1100
KERNELS = native.crc_implementations()
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)

# "123456789" gives the check value that CRC catalogues list; every crc64 here is also computed bit by bit below.
VECTORS = [
    (b"", 0, 0),
    (b"123456789", 0xAE8B14860A799888, 0xCBF43926),
    (bytes(32), 0xCF3473434D4ECF3B, 0x190A55AD),
    (b"\xff" * 32, 0xA0A06974C34D63C4, 0xFF6CAB0B),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("data", "crc64", "crc32"), VECTORS)
def test_vectors(kernel: str, data: bytes, crc64: int, crc32: int) -> None:
    assert native.crc64_with(kernel, data) == crc64 == reference.crc64_bitwise(data)
    assert native.crc32_with(kernel, data) == crc32


def test_the_references_agree() -> None:
    data = noise(300)
    assert reference.crc64(data) == reference.crc64_bitwise(data) == reference.crc64_prefixes(data)[-1]
    assert reference.crc64(data[100:], reference.crc64(data[:100])) == reference.crc64(data)


def test_another_implementation_agrees() -> None:
    checksums = pytest.importorskip("awscrt.checksums")
    data = noise(1 << 20)
    for length in (0, 1, 15, 16, 255, 256, 1023, 1024, 4097, 1 << 20):
        assert native.crc64(data[:length]) == checksums.crc64nvme(data[:length])
        assert native.crc64(data[:length], 12345) == checksums.crc64nvme(data[:length], 12345)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_length_at_every_alignment(kernel: str) -> None:
    data = memoryview(noise(LENGTH_MAX + 64))
    for alignment in range(64):
        prefixes = reference.crc64_prefixes(bytes(data[alignment : alignment + LENGTH_MAX]), 99)
        for length in range(LENGTH_MAX + 1):
            view = data[alignment : alignment + length]
            assert native.crc64_with(kernel, view, 99) == prefixes[length], (alignment, length)
            assert native.crc32_with(kernel, view, 99) == zlib.crc32(view, 99), (alignment, length)


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_buffers(kernel: str) -> None:
    data = noise(200_000)
    for length in (4095, 4096, 4097, 65_536, 199_999):
        assert native.crc64_with(kernel, data[:length]) == reference.crc64(data[:length])
        assert native.crc32_with(kernel, data[:length]) == zlib.crc32(data[:length])


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=5), U64, U32)
def test_chained_calls_equal_one(data: bytes, cuts: list[int], start64: int, start32: int) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    crc64, crc32 = start64, start32
    for low, high in pairwise(bounds):
        crc64, crc32 = native.crc64(data[low:high], crc64), native.crc32(data[low:high], crc32)
    assert crc64 == native.crc64(data, start64) == reference.crc64(data, start64)
    assert crc32 == native.crc32(data, start32) == zlib.crc32(data, start32)


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_combine(a: bytes, b: bytes) -> None:
    crc64 = native.crc64_combine(native.crc64(a), native.crc64(b), len(b))
    crc32 = native.crc32_combine(native.crc32(a), native.crc32(b), len(b))
    assert crc64 == native.crc64(a + b) == reference.crc64_combine(native.crc64(a), native.crc64(b), len(b))
    assert crc32 == zlib.crc32(a + b) == reference.crc32_combine(native.crc32(a), native.crc32(b), len(b))


@given(U64, U64, U32, U32, U64, U64)
def test_combine_is_associative_for_any_length(a64: int, b64: int, a32: int, b32: int, len_b: int, len_c: int) -> None:
    """Lengths far past memory: appending B then C is appending B||C."""
    len_b, len_c = len_b // 2, len_c // 2
    one_by_one = native.crc64_combine(native.crc64_combine(a64, b64, len_b), 5, len_c)
    assert one_by_one == native.crc64_combine(a64, native.crc64_combine(b64, 5, len_c), len_b + len_c)
    one_by_one = native.crc32_combine(native.crc32_combine(a32, b32, len_b), 5, len_c)
    assert one_by_one == native.crc32_combine(a32, native.crc32_combine(b32, 5, len_c), len_b + len_c)


def test_kinds_of_buffer() -> None:
    data = noise(5000)
    with mmap.mmap(-1, 5000) as mapped:
        mapped[:] = data
        for buf in (data, bytearray(data), memoryview(data), memoryview(bytearray(data)), mapped):
            assert native.crc64(buf) == native.crc64(data)
            assert native.crc32(buf) == native.crc32(data)
        mapped.resize(10_000)  # refused while anything holds the buffer
    assert native.crc64(memoryview(data).cast("Q")) == native.crc64(data)
    assert native.crc64(bytearray()) == native.crc64(memoryview(b"")) == 0


def test_a_kernel_there_is_not() -> None:
    assert KERNELS[0] == "portable"
    with pytest.raises(ValueError, match="no checksum kernel 'abacus'"):
        native.crc64_with("abacus", b"")


def test_a_start_that_does_not_fit() -> None:
    with pytest.raises(OverflowError):
        native.crc32(b"", 2**32)
    with pytest.raises(OverflowError):
        native.crc64(b"", -1)
