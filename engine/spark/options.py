"""What `.option(…)` of the data source takes, read once into a frozen value.

Invariants: an unknown option, or a value that is not allowed, is a ValueError that names it and says what is; nothing
was read or written then. Spark hands options over in any case and as text.

Owner: frozen values. Crash: nothing here touches a disk.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from aof2.engine.units import parse_size, parse_time_ms

OFFSET_MAX: Final = 2**63 - 1
PARTITION_BYTES: Final = 32 << 20
DEADLINE_S: Final = 60.0
CORRUPT_COLUMN: Final = "_corrupt_record"
PASSED_BY_SPARK: Final = {"path", "paths", "checkpointlocation", "queryname", "header"}


class Mode(Enum):
    """What becomes of a record that is damaged. Words of Spark's own sources."""

    FAILFAST = "FAILFAST"
    DROPMALFORMED = "DROPMALFORMED"
    PERMISSIVE = "PERMISSIVE"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Offsets and times bound what is read: from the first on, up to before the second; times are milliseconds."""

    paths: tuple[str, ...]
    mode: Mode = Mode.FAILFAST
    corrupt_column: str = CORRUPT_COLUMN
    verify: bool = False
    pushdown: bool = False
    partition_bytes: int = PARTITION_BYTES
    starting_offset: int = 0
    ending_offset: int = OFFSET_MAX
    starting_ms: int = 0
    ending_ms: int = OFFSET_MAX
    starting_offsets: str = "earliest"
    fail_on_data_loss: bool = True
    max_records: int = 0
    max_bytes: int = 0


class What(Enum):
    """What a job's rows become."""

    RECORDS = "records"  # of a stream
    PARQUET = "parquet"  # files of a directory


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """`staging`: a folder of this machine that tasks and daemon see; by default one of the temporary folder. `remote`
    and what follows it: of the inbox, where `conf` does not say it. `job`: the number of a batch that may be written
    again after a crash; by default one of its own."""

    path: str
    conf: str = ""
    staging: str = ""
    checkpoint: str = ""
    job: str = ""
    what: What = What.RECORDS
    partition_by: tuple[str, ...] = ()
    remote: str = ""
    endpoint_url: str = ""
    region: str = ""
    tenant: str = ""
    deadline_s: float = DEADLINE_S

    @property
    def names_inbox(self) -> bool:
        """Whether the options leave no choice: only the inbox takes this."""
        return bool(self.remote or self.tenant or self.what is What.PARQUET)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    given = {key.lower(): value for key, value in options.items()}
    unknown = [key for key in given if key not in _WRITING and key not in PASSED_BY_SPARK]
    if unknown:
        raise ValueError(f"option {unknown[0]!r}: there is {', '.join(_WRITING)}")
    fields = {field: _parsed(name, given[name], parse) for name, (field, parse) in _WRITING.items() if name in given}
    found = WriteOptions(_written_to(given), checkpoint=given.get("checkpointlocation", ""), **fields)
    if found.partition_by and found.what is not What.PARQUET:
        raise ValueError('option partition_by goes with as = "parquet": records have no columns in the stream')
    if found.endpoint_url and not found.remote:
        raise ValueError("option endpoint_url goes with remote: which bucket there")
    if found.remote and not found.tenant:
        raise ValueError("option remote goes with tenant: which one of the volume")
    if found.staging and found.names_inbox:
        raise ValueError("option staging is of a mount on this machine; leave it out, or remote, tenant and as")
    return found


def _written_to(given: Mapping[str, str]) -> str:
    """Below a tenant that is named, a path may be relative to it."""
    if given.get("tenant") and not given.get("paths") and ":" not in given.get("path", ":"):
        return given["path"]
    found = paths_of(given)
    if len(found) != 1:
        raise ValueError("name one stream or directory to write to")
    return found[0]


def folder_of(staging: str, job: str) -> Path:
    """Where tasks of a job stage their records."""
    return Path(staging or Path(tempfile.gettempdir(), f"aof2-staging-{os.getuid()}"), job)


def read_options(options: Mapping[str, str]) -> ReadOptions:
    given = {key.lower(): value for key, value in options.items()}
    allowed = {name.lower(): name for name in _PARSERS}
    unknown = [key for key in given if key not in allowed and key not in PASSED_BY_SPARK]
    if unknown:
        raise ValueError(f"option {unknown[0]!r}: there is {', '.join(_PARSERS)}")
    fields: dict[str, Any] = {}
    for name, (field, parse) in _PARSERS.items():
        if name.lower() in given:
            fields[field] = _parsed(name, given[name.lower()], parse)
    return ReadOptions(paths=paths_of(given), **fields)


def paths_of(given: Mapping[str, str]) -> tuple[str, ...]:
    """`load(path)` or `load([path, …])`: paths of this machine, patterns among them expanded."""
    many: list[str] = json.loads(given["paths"]) if given.get("paths") else []
    named = [*many, *([given["path"]] if given.get("path") else [])]
    if not named:
        raise ValueError('no path: say which stream, as in .load("/aof2/events/clicks")')
    found: list[str] = []
    for name in map(local_path, named):
        matches = sorted(map(str, Path("/").glob(name[1:]))) if glob.has_magic(name) else [name]
        if not matches:
            raise ValueError(f"{name}: no stream matches")
        found += matches
    return tuple(dict.fromkeys(found))


def local_path(name: str) -> str:
    """Spark may write a path as `file:///…`."""
    parts = urlsplit(name)
    if not parts.scheme:
        path = name
    elif parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = unquote(parts.path)
    else:
        raise ValueError(f"{name}: a stream is a directory of this machine's mount, not {parts.scheme}")
    if not path.startswith("/"):
        raise ValueError(f"{name}: say the whole path, tasks may run in other directories")
    return path.rstrip("/") or "/"


def _parsed(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as e:
        raise ValueError(f"option {name} is {text!r}: {e}") from None


def _mode(text: str) -> Mode:
    try:
        return Mode(text.upper())
    except ValueError:
        raise ValueError(f"it is one of {', '.join(m.value for m in Mode)}") from None


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it is true or false")
    return text.lower() == "true"


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= OFFSET_MAX:
        raise ValueError("it is a number, 1 at least")
    return int(text)


def _offset(text: str) -> int:
    if not text.isdecimal() or int(text) > OFFSET_MAX:
        raise ValueError("it is an offset: a number of bytes")
    return int(text)


def _column(text: str) -> str:
    if not text:
        raise ValueError("it is the name of a column")
    return text


def _time_ms(text: str) -> int:
    """Milliseconds since 1970, or a date and time; without a zone it is UTC."""
    if text.isdecimal():
        return min(int(text), OFFSET_MAX)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it is milliseconds since 1970 or a time such as 2026-01-31T12:00:00Z") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0, micros(moment) // 1000)


def micros(moment: datetime) -> int:
    """Microseconds since 1970, exactly."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _start(text: str) -> str:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        return str(_offset(text))
    except ValueError:
        raise ValueError("it is earliest, latest or an offset") from None


def _size(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ValueError("it is a size, 1 byte at least")
    return size


def _what(text: str) -> What:
    try:
        return What(text.lower())
    except ValueError:
        raise ValueError(f"it is one of {', '.join(w.value for w in What)}") from None


def _columns(text: str) -> tuple[str, ...]:
    """`a,b`, or a list as JSON."""
    found = json.loads(text) if text.startswith("[") else [name.strip() for name in text.split(",")]
    if not found or not all(isinstance(name, str) and name for name in found) or len(set(found)) != len(found):
        raise ValueError("it is names of columns, with commas in between")
    return tuple(found)


def _duration(text: str) -> float:
    return parse_time_ms(text) / 1000


_WRITING: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "conf": ("conf", str),
    "staging": ("staging", str),
    "job": ("job", str),
    "as": ("what", _what),
    "partition_by": ("partition_by", _columns),
    "remote": ("remote", str),
    "endpoint_url": ("endpoint_url", str),
    "region": ("region", str),
    "tenant": ("tenant", str),
    "deadline": ("deadline_s", _duration),
}
_PARSERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "mode": ("mode", _mode),
    "columnNameOfCorruptRecord": ("corrupt_column", _column),
    "verify": ("verify", _flag),
    "pushdown": ("pushdown", _flag),
    "partitionBytes": ("partition_bytes", _size),
    "startingOffset": ("starting_offset", _offset),
    "endingOffset": ("ending_offset", _offset),
    "startingTimestamp": ("starting_ms", _time_ms),
    "endingTimestamp": ("ending_ms", _time_ms),
    "startingOffsets": ("starting_offsets", _start),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
    "maxRecordsPerTrigger": ("max_records", _count),
    "maxBytesPerTrigger": ("max_bytes", _size),
}
