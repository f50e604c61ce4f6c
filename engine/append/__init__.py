"""Tenants of kind `append`: each directory is a stream of records, written through `_append`, read as plain files.

names.py      which names and inode numbers a stream has, and what they look like
rows.py       what happens to a stream, as changes to the catalog
framing.py    from what a writer wrote to records: lines, or one record a write
room.py       what a segment may grow by: of the quota, of the disk
segment.py    a segment that is not sealed: its file, and what of it is committed
stream.py     a stream: append, commit, rotate, drop
sealing.py    a full segment becomes a payload file and its index, in one commit
streams.py    the streams of a mount: found, committed together, sealed by age
staged.py    what a job staged beside a stream, cut into what makes a segment each
delivery.py  records that were staged come into a stream, by one commit
views.py      what is read without being stored so: `_tail`, the raw segment
handles.py    one open of `_append`, `_tail`, or a raw segment
recover.py    what a crash left of segments that were being written
tree.py       the names of a stream, to look at
kind.py       the kind: what changes names, and handles
api.py        open_stream: append, read and tail without a mount (unmounted.py: the kernel that it does without)
"""
