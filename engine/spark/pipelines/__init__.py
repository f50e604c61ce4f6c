"""What `aof2 spark NAME` runs: one module a pipeline, each with a `run` that a test calls as the command does.

seam.py        what every pipeline takes and gives back, and how far Spark is
reconcile.py   counts and checksums, the same in any order
jobs.py        what makes two runs the same job
mounted.py     the mount, from the driver: what is in it, what its daemon is asked for
workspace.py   a directory that is made beside its place, and comes into it by one step
tables.py      frames as Parquet; records.py: frames as records of a stream

ingest.py      what Spark can read, into records or Parquet
compact.py     segments and small files into large ones; compact_stream.py, compact_records.py, compact_files.py: the
               three kinds of it

A pipeline has
    NAME                      its name
    Arguments                 a frozen dataclass: what the command line was read into
    run(session, arguments, tell) -> Summary
and never prints, asks or exits: `fs/cli/pipelines/NAME.py` reads the command line, starts the session, shows progress
and prints. Errors that a user can cause are Aof2Error with one line.

To add one: a module here, its command in `fs/cli/pipelines/`, and a row of `PIPELINES` in `fs/cli/spark.py`.

Modules here run in the driver; what they send to tasks is found there by name: workers need `pip install 'aof2[spark]'`
and nothing else. Nothing of Spark or Arrow is imported before `run`.
"""
