"""`spark-submit [OPTIONS] spark_verify.py …` is `aof2 spark verify … -- OPTIONS`. Every machine has `aof2[spark]`."""

import sys

from aof2.fs.cli import main

if __name__ == "__main__":
    main(["spark", "verify", *sys.argv[1:]])
