"""Segments: append-only files of checksummed records, sealed once, found again after a crash.

format.py    what is written: header, record, footer, `current.sealed`
limits.py    what a caller may ask for
model.py     what is known about a segment: sealed, active, damaged
file.py      SegmentFile: space and durability of an unsealed file
writer.py    SegmentWriter: append, flush, seal
scan.py      the state of a segment's tail, and the judgement torn or corrupt
reader.py    SegmentReader: verified records out of a v2 or v3 file
index.py     a sealed segment in two files, payloads and index, and the raw segment made of them again
pointer.py   the `current.sealed` pointer
recovery.py  recover_stream: what a stream's folder holds after a crash
state.py     StreamState: what recovery found, and the counters
repair.py    the changes recovery makes to a folder: trim, keep, remove
upgrade.py   rewrite: the only way from one version to another

Version policy
- Readers take versions 2 and 3 and refuse newer ones with UnsupportedError: nothing is wrong with such a file.
- The writer writes either; 3 is the default.
- A segment is never changed in place to another version. `rewrite` makes a new file and renames it.
- Reserved bits and fields are zero. Set under a valid checksum they mean a newer writer (UnsupportedError).
"""
