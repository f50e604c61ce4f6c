"""Followers: the volume on other machines, read-only, from what its writer leaves in the remote.

The log of the writer is placed and replayed (`replicate/follow.py`); what is this machine's own, which bytes are on its
disk and which are pinned, is kept apart from it (`ownrows.py`, `ownlog.py`).
"""
