"""`spark-submit [OPTIONS] spark_manifest.py …` is `aof2 spark manifest … -- OPTIONS`. Workers have `aof2[spark]`."""

import sys

from aof2.fs.cli import main

if __name__ == "__main__":
    main(["spark", "manifest", *sys.argv[1:]])
