"""What goes over the control socket: one JSON object a line.

    → {"verb": "warm", "paths": ["default/a"], …}
    ← {"progress": {"what": "upload", "done": 1, "total": 9, "unit": "bytes"}}     any number
    ← {"alive": true}                                                              every ALIVE_EVERY_S while it works
    ← {"result": …}   or   {"error": "one line", "exit": 1}                        then the daemon closes

A connection carries one request. Names that are not UTF-8 travel as surrogate escapes, which JSON can spell.

Owner: pure. A crash leaves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2.engine.errors import Aof2Error
from aof2.engine.settings import Settings

SOCKET_NAME: Final = "control.sock"
REQUEST_BYTES_MAX: Final = 4 << 20  # as much as a command line holds, and more
ANSWER_BYTES_MAX: Final = 256 << 20
ALIVE_EVERY_S: Final = 5.0


class ProtocolError(Aof2Error):
    """The other end says what no aof2 of this version says. Restart the older of the two."""


class ControlError(Aof2Error):
    """The daemon could not do what it was asked for; the message is the whole line, `code` the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        self.code = code
        super().__init__(message)


class Args(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request has. The arguments of a verb are a struct beside its handler; anything else is refused."""

    verb: str


class Paths(Args, kw_only=True):
    paths: list[str]


class Progress(msgspec.Struct, frozen=True):
    """How far the work is. `unit`: "bytes", "files", "blobs" or "records"."""

    what: str
    done: int
    total: int
    unit: str = "bytes"


def socket_path(settings: Settings) -> Path:
    return settings.volume.state_dir / SOCKET_NAME


def encode(message: object) -> bytes:
    """One line. Structs become objects; names that are not UTF-8 are kept."""
    return json.dumps(msgspec.to_builtins(message), ensure_ascii=True).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError("not a line of JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message
