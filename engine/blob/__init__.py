"""The blob: one chunk as the remote and the warm tier store it, any block of it readable and provable alone.

format.py the bytes · writer.py blocks to blob · reader.py blob to verified blocks.
"""
