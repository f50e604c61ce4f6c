"""The answers about names that do not go through pyfuse3 are those that do."""

from __future__ import annotations

import os
import stat
import struct

import pyfuse3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.catalog.rows import InodeRow
from aof2.fs import attrs
from aof2.fs.options import Options

ENTRY = struct.Struct("=QQQQII3Q3q10I")
ATTR = struct.Struct("=QII3Q3q10I")
u32, u63, ns = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(-(2**62), 2**62)
kinds = st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR])
rows = st.builds(
    InodeRow, u63, st.builds(lambda kind, mode: kind | mode, kinds, st.integers(0, 0o7777)), u32, u32,
    st.integers(0, 2**50), u32, ns, ns, ns, u32,
)  # fmt: skip
options = st.builds(
    Options, uid=st.none() | u32, gid=st.none() | u32, umask=st.none() | st.integers(0, 0o777)
)  # fmt: skip


def fields(attr: pyfuse3.EntryAttributes) -> list[int]:
    times = [attr.st_atime_ns, attr.st_mtime_ns, attr.st_ctime_ns]
    return [
        attr.st_ino, attr.st_size, attr.st_blocks, *(t // 10**9 for t in times), *(t % 10**9 for t in times),
        attr.st_mode, attr.st_nlink, attr.st_uid, attr.st_gid, attr.st_rdev, attr.st_blksize, 0,
    ]  # fmt: skip


@given(rows, options, st.booleans(), st.booleans())
def test_packed_attributes_are_those_of_pyfuse3(row: InodeRow, told: Options, dirty: bool, changing: bool) -> None:
    backing = os.stat(__file__) if dirty and stat.S_ISREG(row.mode) else None
    expected = attrs.attributes(row, told, backing, changing=changing)
    entry = ENTRY.unpack(attrs.entry_out(row, told, backing, changing=changing))
    assert list(entry[:6]) == [row.ino, 0, expected.entry_timeout, expected.attr_timeout, 0, 0]
    assert list(entry[6:]) == fields(expected)
    attr = ATTR.unpack(attrs.attr_out(row, told, backing, changing=changing))
    assert list(attr) == [expected.attr_timeout, 0, 0, *fields(expected)]


@pytest.mark.parametrize("follow", [False, True])
def test_an_absent_name_may_be_remembered_where_no_other_machine_makes_it(follow: bool) -> None:
    told = Options(follow=follow)
    entry_timeout = attrs.absent(told).entry_timeout
    assert ENTRY.unpack(attrs.absent_out(told))[:4] == (0, 0, entry_timeout, 0)
    assert (entry_timeout == 0) == follow
