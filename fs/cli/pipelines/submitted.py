"""An application for spark-submit: `spark-submit [OPTIONS] submitted.py NAME …` is `aof2 spark NAME …`."""

from __future__ import annotations

import sys

from aof2.fs.cli import main

if __name__ == "__main__":
    main(["spark", *sys.argv[1:]])
