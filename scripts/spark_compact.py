"""`spark-submit [OPTIONS] spark_compact.py …` is `aof2 spark compact … -- OPTIONS`. Every machine has `aof2[spark]`."""

import sys

from aof2.fs.cli import main

if __name__ == "__main__":
    main(["spark", "compact", *sys.argv[1:]])
