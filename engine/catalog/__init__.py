"""The catalog: the manifest logs folded into LMDB rows, with one writer and many readers.

Read in this order: `rows` (what a row is), `tables` (where it lives), `store` (the environment and its transactions),
`writer` (log first, then rows, in one thread), `changes` (the change feed), `snapshots` and `recovery` (how the rows
are rebuilt from the logs).
"""
