"""What users touch: the `aof2` command and the mount. Stands on `aof2.engine`; nothing below imports it."""
