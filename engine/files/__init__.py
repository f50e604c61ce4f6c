"""Files of tenants of kind `files`: open, written, sealed. See `table.py`."""

from aof2.engine.files.state import Kernel, Mode, OpenFile
from aof2.engine.files.table import Files, stream_of

__all__ = ["Files", "Kernel", "Mode", "OpenFile", "stream_of"]
