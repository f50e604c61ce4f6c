"""Files of tenants of kind `files`: open, written, sealed. See `table.py`."""

from aof2.engine.files.state import Kernel, Mode, OpenFile, stream_of
from aof2.engine.files.table import Files

__all__ = ["Files", "Kernel", "Mode", "OpenFile", "stream_of"]
