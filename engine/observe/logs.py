"""Log lines as JSON: one object a line, with the fields a query needs, and no secrets.

`{"ts": …, "level": …, "logger": …, "event" or "message": …, field: …}`. Fields come from `log_event`, or from
`extra=` of an ordinary logging call.

Invariants
- One record, one line, ASCII, valid JSON, whatever is in it: what JSON has no word for is spelled as text.
- A field called like a secret shows as "[redacted]", and so does anything inside any text that looks like one: access
  key ids, signatures and tokens in URLs and headers, passwords in URLs, and the secrets given at the start.
- Formatting never raises: a line that cannot be built says so and keeps its event.

Owner: stateless; any thread. Crash: a line is written whole or not at all, as far as one write() is.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, TextIO

REDACTED: Final = "[redacted]"
SECRET_VARIABLES: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_DEPTH_MAX: Final = 6
_FIELDS: Final = "aof2_fields"  # the record's attribute that log_event sets
_EVENT: Final = "aof2_event"
_OWN: Final = ("ts", "level", "logger", "event", "message")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", _FIELDS, _EVENT}

# Secret by name; idempotency tokens are none.
_SECRET_NAME: Final = re.compile(
    r"secret|passw|passphrase|credential|authorization|signature|access_?key|private_?key|api_?key|"
    r"^(?!idempotency_).*token",
    re.IGNORECASE,
)
_SECRET_TEXT: Final = (
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,}\b"), REDACTED),
    (re.compile(r"(?i)(x-amz-(?:signature|credential|security-token)\s*[=:]\s*)[^&\s\"']+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)(aws_(?:secret_access_key|session_token|security_token)\s*[=:]\s*)[^\s\"'&]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)(authorization[\"']?\s*[=:]\s*)[^\r\n]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]+"), rf"\1{REDACTED}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE), rf"\1{REDACTED}@"),
)


# Without one of these no pattern above can match: few texts are looked at more closely.
_SUSPECT: Final = re.compile(r"AKIA|ASIA|AROA|AIDA|x-amz-|aws_|authorization|bearer|://", re.IGNORECASE)


class JsonFormatter(logging.Formatter):
    """One line of JSON a record. `secrets` are values that must never be shown, wherever they turn up."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = sorted((s for s in secrets if len(s) >= 8), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        line = {"ts": _iso(record.created), "level": record.levelname, "logger": record.name}
        try:
            line |= self._body(record)
        except Exception as e:  # noqa: BLE001 (a bad argument must not cost the line, nor the program)
            line |= {"message": self._text(str(record.msg)), "log_error": f"{type(e).__name__} while formatting"}
        return json.dumps(line, ensure_ascii=True, allow_nan=False)

    def _body(self, record: logging.LogRecord) -> dict[str, Any]:
        event = getattr(record, _EVENT, None)
        body = {"event": event} if event is not None else {"message": self._text(record.getMessage())}
        fields = dict(getattr(record, _FIELDS, {}))
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        for name, value in fields.items():
            body[f"{name}_" if name in _OWN else str(name)] = self._field(str(name), value)
        if record.exc_info and record.exc_info[0] is not None:
            body["exception"] = self._text(self.formatException(record.exc_info))
        if record.stack_info:
            body["stack"] = self._text(record.stack_info)
        return body

    def _field(self, name: str, value: object, depth: int = 0) -> Any:
        if _SECRET_NAME.search(name):
            return REDACTED
        return self._plain(value, depth)

    def _plain(self, value: object, depth: int) -> Any:
        """The value in JSON's terms."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return self._plain(value.value, depth)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).hex()
        if depth < _DEPTH_MAX:
            if isinstance(value, Mapping):
                return {self._text(str(k)): self._field(str(k), v, depth + 1) for k, v in value.items()}
            if isinstance(value, list | tuple | set | frozenset):
                return [self._plain(v, depth + 1) for v in value]
        return self._text(str(value))

    def _text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        if _SUSPECT.search(text):
            for pattern, replacement in _SECRET_TEXT:
                text = pattern.sub(replacement, text)
        return text


def log_event(logger: logging.Logger, event: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """A line with `event` and exactly these fields. Their names may be anything, also what logging uses itself."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_EVENT: event, _FIELDS: fields})


class _Handler(logging.StreamHandler[TextIO]):
    """Of a full disk a line stays in the stream's buffer, and comes out behind the next that finds room. A traceback of
    that would be one more line for the same disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def configure_logging(stream: TextIO, level: int = logging.INFO, *, logger: str = "") -> logging.Handler:
    """JSON lines of `logger` (the root) on `stream`; the AWS secrets of the environment are known to it."""
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter(os.environ.get(name, "") for name in SECRET_VARIABLES))
    target = logging.getLogger(logger)
    target.addHandler(handler)
    target.setLevel(level)
    return handler


def _iso(created_s: float) -> str:
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
