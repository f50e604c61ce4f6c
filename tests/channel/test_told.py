"""What the channel tells the kernel of a row is what the daemon would: random rows through both."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.tables import encode
from aof2.fs.attrs import entry_out
from aof2.fs.options import Options
from tests.channel.test_fuzz import built
from tests.test_formats_page import example, inode_example

QUESTION = struct.Struct("=6I8q")
ENTRY_LEN = 128
ROWS = 4000
NS = 1_000_000_000


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


def some_number(rng: random.Random, bits: int) -> int:
    return rng.getrandbits(rng.randint(0, bits))


def some_row(rng: random.Random) -> InodeRow:
    size = some_number(rng, 50)
    sign = rng.choice((1, 1, 1, -1))
    return InodeRow(
        some_number(rng, 63),
        rng.choice((0o40000, 0o100000, 0o120000, 0o20000, 0o10000)) | rng.getrandbits(12),
        some_number(rng, 32),
        some_number(rng, 32),
        size,
        some_number(rng, 31),
        sign * some_number(rng, 63),
        some_number(rng, 64),
        sign * some_number(rng, 61),
        some_number(rng, 40),
        some_number(rng, 40),
        some_number(rng, 60),
        rng.randbytes(rng.choice((0, 3, 300))),
        rng.randbytes(rng.choice((0, 7, 255))),
        rng.randint(0, size),
    )


def some_stat(rng: random.Random) -> Any:
    times = {f"st_{t}time_ns": rng.choice((1, -1)) * some_number(rng, 61) for t in "mca"}
    return SimpleNamespace(st_size=some_number(rng, 50), st_blocks=some_number(rng, 40), **times)


def question(row: bytes, options: Options, backing: Any) -> bytes:
    flags = (options.uid is not None) | (options.gid is not None) << 1 | (backing is not None) << 2
    numbers = [0] * 8
    if backing is not None:
        numbers = [backing.st_size, backing.st_blocks]
        for t in "mca":
            numbers += divmod(getattr(backing, f"st_{t}time_ns"), NS)
    head = QUESTION.pack(len(row), flags, options.uid or 0, options.gid or 0, options.umask or 0, 0, *numbers)
    return head + row


def told(driver: Path, questions: list[bytes]) -> list[bytes]:
    ran = subprocess.run([driver, "told"], input=b"".join(questions), capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    answers = [ran.stdout[i : i + ENTRY_LEN] for i in range(0, len(ran.stdout), ENTRY_LEN)]
    assert len(answers) == len(questions)
    return answers


def test_rows_are_told_as_the_daemon_tells_them(driver: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    questions, expected = [], []
    for _ in range(ROWS):
        row = some_row(rng)
        options = Options(
            uid=rng.choice((None, 7)), gid=rng.choice((None, 0, 9)), umask=rng.choice((None, 0, 0o22, 0o777))
        )
        backing = rng.choice((None, some_stat(rng)))
        questions.append(question(encode(row), options, backing))
        expected.append(entry_out(row, options, backing, changing=backing is not None))
    assert told(driver, questions) == expected, f"seed {seed}"


def test_older_and_newer_rows(driver: Path) -> None:
    """Fields at the end may be missing, and there may be some that this release does not know."""
    row = InodeRow(5, 0o100644, 1, 2, 3, hole_bytes=1)
    fields = list(msgspec.structs.astuple(row))
    short, long = encode([5, 0o100644]), encode([*fields, {"a": [1, 2.5, None]}, b"x" * 70000, -1, "text"])
    answers = told(driver, [question(data, Options(), None) for data in (short, long)])
    assert answers == [entry_out(InodeRow(5, 0o100644), Options()), entry_out(row, Options())]


def test_damaged_rows_are_refused(driver: Path) -> None:
    row = encode(InodeRow(5, 0o100644, 1, 2, 3, last_name=b"name"))
    damaged = [row[:n] for n in range(len(row))]  # cut
    damaged += [row + b"\0", b"\x91" + row[1:], encode([5]), encode({}), encode([5, "x"]), encode([5, -1])]
    damaged.append(encode(InodeRow(5, 0o100644, size=1, hole_bytes=2)))
    assert set(told(driver, [question(data, Options(), None) for data in damaged])) == {bytes(ENTRY_LEN)}


def test_the_documented_row(driver: Path) -> None:
    (answer,) = told(driver, [question(example("inode-row"), Options(), None)])
    assert answer == entry_out(inode_example(), Options())
