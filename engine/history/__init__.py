"""The manifest log as tables: what `aof2 report` draws, `aof2 spark manifest` writes as Parquet, and tests compare.

    sources.py    where the log is: this disk, the remote, or both, a stream's chunks in their order
    columns.py    a chunk's records as columns, by the native scan and numpy: no Python a record
    timeline.py   sums over time, of bounded size whatever the time is
    segments.py   a number for each segment, set by one record and looked at by the next
    fold.py       columns → bytes per tier, movements, returns (evicted, and fetched again), requests
    uses.py       what was opened, as the log's samples have it, and what another cache size would have had of it
    heat.py       which directories are used and fetched, by hour
    cost.py       requests and bytes at a price
    history.py    all of it for one volume: one pass, bounded memory

Needs numpy (`pip install 'aof2[report]'`), which the rest of the engine does without. Everything here only reads.
"""
