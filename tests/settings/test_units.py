"""Sizes, times and shares as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.units import (
    SIZE_UNITS,
    TIME_UNITS_MS,
    MinFree,
    format_size,
    format_time,
    parse_min_free,
    parse_size,
    parse_time_ms,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("7B", 7),
        ("16KiB", 16 << 10),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        ("20GiB", 20 << 30),
        ("2TiB", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "64MB", "64mib", "64M", "-1", "-1MiB", -1, 1.5, True, None, [], "1.5B", "0.3KiB", "1e3", "١KiB",
     "1MiB ", " 1MiB", "1\n", "99999999999999999999", "8388608TiB", 2**63, "0x10", "1,5MiB", "1_000"],
)  # fmt: skip
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="KiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("250ms", 250), ("30s", 30_000), ("1.5s", 1500), ("5min", 300_000), ("1h", 3_600_000),
     ("7d", 604_800_000), ("0s", 0)],
)  # fmt: skip
def test_times(text: str, time_ms: int) -> None:
    assert parse_time_ms(text) == time_ms


@pytest.mark.parametrize("text", ["", "30", 30, 0, "s", "5m", "1w", "-1s", "1.5ms", "1 hour", True, None, "5%", "1S"])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(ValueError, match="min, h, d"):
        parse_time_ms(text)


@pytest.mark.parametrize(
    ("text", "min_free"),
    [
        ("5%", MinFree(fraction=0.05)),
        ("0.5%", MinFree(fraction=0.005)),
        (0.05, MinFree(fraction=0.05)),
        ("10GiB", MinFree(size_bytes=10 << 30)),
        (0, MinFree()),
        ("0%", MinFree()),
    ],
)
def test_min_free(text: object, min_free: MinFree) -> None:
    assert parse_min_free(text) == min_free


@pytest.mark.parametrize("text", ["100%", "-5%", "5 percent", "%", 1.0, -0.1, float("nan"), float("inf"), "half", True])
def test_what_is_no_min_free(text: object) -> None:
    with pytest.raises(ValueError, match="share of the disk"):
        parse_min_free(text)


def test_min_free_of_a_disk() -> None:
    assert MinFree(fraction=0.05).bytes_of(1000) == 50
    assert MinFree(size_bytes=10).bytes_of(1000) == 10
    assert MinFree().bytes_of(1000) == 0


@given(st.integers(0, 10**6), st.sampled_from(sorted(SIZE_UNITS)))
def test_a_size_comes_back_from_its_spelling(number: int, unit: str) -> None:
    size = number * SIZE_UNITS[unit]
    assert parse_size(f"{number}{unit}") == size
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**6), st.sampled_from(sorted(TIME_UNITS_MS)))
def test_a_time_comes_back_from_its_spelling(number: int, unit: str) -> None:
    time_ms = number * TIME_UNITS_MS[unit]
    assert parse_time_ms(f"{number}{unit}") == time_ms
    assert parse_time_ms(format_time(time_ms)) == time_ms
