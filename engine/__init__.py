"""The storage engine: formats, logs and tiers. Knows nothing of FUSE; stands on `aof2.native` alone."""
