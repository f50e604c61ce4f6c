"""What makes two runs the same job: the request, and what there was to read.

A job's number is the hash of both, so that the same command over the same files is the same job wherever and whenever
it runs again, and is another as soon as a file came, went or changed.

Owner: pure, but for looking at files. Crash: nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from aof2.engine.spark.pipelines.seam import PipelineError

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def number_of(pipeline: str, *facts: object) -> str:
    """`facts` are what JSON can spell."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return f"{pipeline}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def named(pipeline: str, name: str) -> str:
    """A number that the user gave."""
    if not NAME.fullmatch(name):
        raise PipelineError(f"--job {name!r}: letters, digits, dot, dash and underscore, at most 64")
    return f"{pipeline}-{name}"


def seen(names: Iterable[str]) -> list[list[object]]:
    """Files as they are now: name, size and time of those of this machine, the name alone of others."""
    found: list[list[object]] = []
    for name in sorted(names):
        parts = urlsplit(name)
        if parts.scheme not in ("", "file"):
            found.append([name])
            continue
        path = unquote(parts.path) if parts.scheme else name
        about = os.stat(path)
        found.append([path, about.st_size, about.st_mtime_ns])
    return found


def still_there(files: Iterable[list[object]]) -> str:
    """The first file that is gone or was changed since `seen`; "" where none was."""
    for path, *about in files:
        if not about:
            continue
        try:
            now = Path(str(path)).stat()
        except FileNotFoundError:
            return str(path)
        if [now.st_size, now.st_mtime_ns] != about:
            return str(path)
    return ""
