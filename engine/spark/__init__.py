"""Spark's data source `aof2`: streams read and written by record, without a row of Python.

pyspark_aof2.py  what Spark finds by itself: a top-level module with a `DefaultSource`
source.py        DefaultSource: the door
options.py       what `option(…)` takes
columns.py       what a row has, and which of it was asked for
streams.py       a stream's directory: its sealed segments, from one listing
filters.py       bounds of offset and time out of pushed-down filters
plan.py          segments within bounds, cut into partitions at records
read.py          a partition as Arrow batches: payload bytes as they lie, columns from the native scan
salvage.py       what is left of a partition with damaged records
batch.py         Aof2Reader: `spark.read`
micro.py         Aof2StreamReader: `spark.readStream`
write.py         Aof2Writer, Aof2StreamWriter: `df.write`, `df.writeStream`
way.py           which way rows go in: by a mount of this machine, or by the inbox
by_mount.py      staged beside the stream, taken over by the daemon
stage.py         a task's records in files beside the stream
deliver.py       the daemon is asked to put them in, once
by_inbox.py      put into the remote, taken in by the volume's writer, wherever that is
parquet.py       a task's rows as Parquet files

It runs in Spark's own Python processes, on machines that mount nothing of their own: it imports neither pyfuse3 nor,
but for a remote on S3, trio, and knows a stream by its files alone. Importing `source` costs next to nothing; pyarrow
and the native core come with the first reader.
"""
