"""Spark imports top-level modules named `pyspark_*` and registers their `DefaultSource`. This is ours, and all of it.

It is installed beside the package `aof2`, not inside of it (setup.py). The import stays light: Spark does it in every
session that uses any data source written in Python.
"""

from aof2.engine.spark.source import DefaultSource

__all__ = ["DefaultSource"]
