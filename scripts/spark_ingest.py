"""`spark-submit [OPTIONS] spark_ingest.py …` is `aof2 spark ingest … -- OPTIONS`. Every machine has `aof2[spark]`."""

import sys

from aof2.fs.cli import main

if __name__ == "__main__":
    main(["spark", "ingest", *sys.argv[1:]])
