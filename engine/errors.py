"""Every error the engine raises on purpose: few classes, each says what the caller does about it; and plain errnos.

Anything else that escapes the engine is a bug. Messages are one line: what, where, what to do.
"""

from __future__ import annotations

import os


class Aof2Error(Exception):
    """Base of all. Catch it at the edges (command line, mount) only."""


class CorruptError(Aof2Error):
    """Bytes are not what was written. Serve none of them; quarantine the file and repair from another copy.

    Never retried: the same bytes fail again.
    """

    def __init__(self, what: str, *, path: str = "", offset: int | None = None) -> None:
        self.what = what
        self.path = path
        self.offset = offset
        where = f"{path}: " if path else ""
        at = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{where}{what}{at}")


class UnsupportedError(Aof2Error):
    """Written by a newer AOF2 (version or reserved bits). Nothing is wrong with it: upgrade, then open again."""

    def __init__(self, what: str, *, path: str = "") -> None:
        self.what = what
        self.path = path
        super().__init__(f"{path + ': ' if path else ''}{what}; it was written by a newer AOF2, upgrade to read it")


class ReadOnlyError(Aof2Error):
    """The thing takes no writes: sealed, quarantined, turned off, or owned by another process. Do not retry."""


class LimitError(Aof2Error):
    """The request can never fit (a record over the format's limit). Make it smaller; retrying does not help."""


class FatalIOError(Aof2Error):
    """The disk refused to make bytes durable. What is on it is unknown: stop writing, stay read-only, never retry.

    After a failed fsync the kernel may have dropped the dirty pages and marked them clean, so a second fsync that
    succeeds proves nothing.
    """


class LandingError(Aof2Error):
    """Bytes came, and the file they belong in could not take them: `error` says why. It is not the sender's fault."""

    def __init__(self, error: OSError) -> None:
        self.error = error
        super().__init__(str(error))


class TransientError(Aof2Error):
    """It may work next time: retry with backoff. `reason_code` is what the manifest log records."""

    def __init__(self, message: str, *, reason_code: int = 0) -> None:
        self.reason_code = reason_code
        super().__init__(message)


def os_error(code: int, name: bytes | str = "") -> OSError:
    """What a filesystem answers: it goes to the caller as this errno."""
    return OSError(code, os.strerror(code), os.fsdecode(name) if name else None)
