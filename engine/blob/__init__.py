"""The blob: one chunk as the remote and the warm tier store it, any block of it readable and provable alone.

format.py the bytes · writer.py blocks to blob · reader.py blob to verified blocks.
"""

from aof2.engine.blob.format import BLOCK_BYTES, FOOTER_GUESS, BlobFooter, Codec, Frame, decode_footer, needed_tail
from aof2.engine.blob.reader import BlobReader, check_identity, decode_frame, read_footer
from aof2.engine.blob.writer import LEVEL, BlobWriter, encode_blob

__all__ = [
    "BLOCK_BYTES",
    "FOOTER_GUESS",
    "LEVEL",
    "BlobFooter",
    "BlobReader",
    "BlobWriter",
    "Codec",
    "Frame",
    "check_identity",
    "decode_footer",
    "decode_frame",
    "encode_blob",
    "needed_tail",
    "read_footer",
]
