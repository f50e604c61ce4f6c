"""The order of a policy as a file: `recency/hot.lru`, `recency/warm.lru` under state_dir (FORMATS.md, *Recency*).

It is no part of the log: rebuilding a volume from its log loses it, and nothing but the order of evictions with it.

Invariants
- Replaced whole: a crash leaves the old order or the new one.
- `closed` is set by a clean stop alone and taken back before anything changes, so who reads it set knows that the file
  lists all that is here. It is outside the crc because it is changed in place.
- What is missing, damaged or of another version is no order: None.

Owner: blocking calls on worker threads, one at a time a file.
"""

from __future__ import annotations

import logging
import struct
import sys
from array import array
from pathlib import Path
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.recency.policy import Image

log = logging.getLogger(__name__)

MAGIC: Final = 0x414F463252434E54  # "AOF2RCNT"
VERSION: Final = 1
CLOSED: Final = 0x434C4F53  # "CLOS"
HEADER: Final = struct.Struct("<QIIQQQQ")
CRC: Final = struct.Struct("<Q")
CLOSED_AT: Final = 12
KEY_BYTES: Final = 8
SIZE_BYTES: Final = 4
CRASH_POINTS: Final = ("recency.temp", "recency.synced", "recency.renamed")


class Saved(NamedTuple):
    """An order that was saved, and whether the volume was closed in good order after that."""

    image: Image
    closed: bool


def encode(image: Image, saved_ms: int, *, closed: bool) -> list[bytes]:
    """The file, in pieces."""
    body = [_column(image.keys), _column(image.sizes)]
    head = HEADER.pack(MAGIC, VERSION, 0, saved_ms, *image.counts)
    crc = native.crc64(head)
    for piece in body:
        crc = native.crc64(piece, crc)
    if closed:
        head = HEADER.pack(MAGIC, VERSION, CLOSED, saved_ms, *image.counts)
    return [head, *body, CRC.pack(crc)]


def _column(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def decode(data: bytes) -> Saved | None:
    """The order in these bytes, if they are whole."""
    if len(data) < HEADER.size + CRC.size:
        return None
    magic, version, closed, saved_ms, *counts = HEADER.unpack_from(data)
    total = sum(counts)
    if (magic, version) != (MAGIC, VERSION) or closed not in (0, CLOSED):
        return None
    if len(data) != HEADER.size + total * (KEY_BYTES + SIZE_BYTES) + CRC.size:
        return None
    head = HEADER.pack(MAGIC, VERSION, 0, saved_ms, *counts)
    view = memoryview(data)[HEADER.size : -CRC.size]
    if CRC.unpack_from(data, len(data) - CRC.size)[0] != native.crc64(view, native.crc64(head)):
        return None
    keys, sizes = array("Q"), array("I")
    keys.frombytes(view[: total * KEY_BYTES])
    sizes.frombytes(view[total * KEY_BYTES :])
    if sys.byteorder == "big":
        keys.byteswap()
        sizes.byteswap()
    if len(set(keys)) != total:
        return None
    return Saved(Image((counts[0], counts[1], counts[2]), keys, sizes), closed == CLOSED)


def write(env: Env, path: Path, image: Image, *, closed: bool) -> None:
    env.make_dirs(path.parent)
    env.replace_file(path, encode(image, env.now_ms(), closed=closed), point="recency")


def read(path: Path) -> Saved | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        log.info("the order of eviction was not read", extra={"path": str(path), "error": str(e)})
        return None
    saved = decode(data)
    if saved is None:
        log.info("the order of eviction is damaged and not used", extra={"path": str(path)})
    return saved


def take_back_closed(env: Env, path: Path) -> None:
    """From here on the file may be behind."""
    with env.files.closing(env.files.open_rw(path)) as fd:
        env.files.pwrite(fd, bytes(4), CLOSED_AT)
        env.files.fsync(fd)
